"""Delivery over every implementation of the network, with the real clock and the real disk."""

from __future__ import annotations

from contextlib import AsyncExitStack
from types import SimpleNamespace

import trio

from echo_node.net.base import RequestError
from echo_node.net.outbox import direct_delivery
from echo_node.net.outbox.backoff import Patience
from echo_node.net.outbox.direct_delivery import Taker, deliver, serve_deliveries
from echo_node.net.request_response import HANDLERS_PER_PEER
from protocol import Identity
from tests.net.behaviour import IDENTITIES, until
from tests.net.delivery_fixtures import GROUPS, Receiver, Sender, accept, ids, items

ONE, TWO, *_ = IDENTITIES
HONEST = Identity(b"h" * 32)
HASTE = Patience(gather=0.01, moment=0.1, first=0.1, cap=0.5, deadline=5.0)


async def test_all_items_arrive_once_though_both_sides_restart(join, tmp_path):
    swarm = SimpleNamespace(join=join)
    receiver = Receiver(swarm, TWO, tmp_path / "in")
    sender = Sender(swarm, ONE, tmp_path / "out", TWO.public, patience=HASTE)
    everything = ids(items(500))
    with trio.fail_after(60):
        async with sender.life():
            await sender.outbox.put(items(500, size=1000)[:300])
            async with receiver.life():
                await receiver.some.wait()
            await sender.outbox.put(items(500, size=1000)[300:400])
        async with receiver.life(), sender.life():
            await sender.outbox.put(items(500, size=1000)[400:])
            await sender.emptied()
            assert sorted(receiver.handed) == sorted(everything)
            assert sorted(receiver.waiting()) == sorted(everything)


async def test_peers_that_deliver_without_end_take_nobody_elses_place(join, monkeypatch):
    """As many as would fill all request slots of a node, if they waited there."""
    monkeypatch.setattr(direct_delivery, "PER_SECOND", 0.1)
    monkeypatch.setattr(direct_delivery, "BURST", 8.0)

    async def take(_message):
        await trio.lowlevel.checkpoint()
        return b"taken"

    async def deliver_without_end(network):
        while True:
            try:
                await deliver(network, ONE.public, GROUPS, b"of no use", deadline=60)
            except RequestError as error:
                if error.reason == "busy":
                    told[network.public].set()
                await trio.sleep(0.5)

    async with AsyncExitStack() as stack:
        here, *others = [await stack.enter_async_context(join(each)) for each in IDENTITIES[:5]]
        honest = await stack.enter_async_context(join(HONEST))
        told = {each.public: trio.Event() for each in others}
        stack.enter_context(serve_deliveries(here, {GROUPS: Taker(accept, take)}))
        nursery = await stack.enter_async_context(trio.open_nursery())
        with trio.fail_after(30):
            await until(lambda: len(here.peers()) == len(others) + 1)
            for each in others:
                for _ in range(HANDLERS_PER_PEER):
                    nursery.start_soon(deliver_without_end, each)
            for each in told.values():
                await each.wait()
            for _ in range(5):
                assert await deliver(honest, ONE.public, GROUPS, b"of use", deadline=20) == b"taken"
        nursery.cancel_scope.cancel()
