"""Delivery over every medium, with the real clock and the real disk. The tests know nothing else of the medium."""

from __future__ import annotations

from types import SimpleNamespace

import trio

from echo_node.net.outbox.backoff import Patience
from tests.net.behaviour import IDENTITIES
from tests.net.post import Receiver, Sender, ids, items

ONE, TWO, *_ = IDENTITIES
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
            assert sorted(await receiver.waiting()) == sorted(everything)
