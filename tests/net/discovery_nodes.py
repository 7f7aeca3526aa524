"""Nodes that look for peers on real loopback hosts, and waits that end."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import dataclass

import trio

from echo_node.net.discovery.address_book import AddressBook
from echo_node.net.discovery.dialer import Dialer
from echo_node.net.discovery.seeds import Seed, parse_seed
from echo_node.net.host import HardHost, build_host, running
from echo_node.net.swarm import id_of
from protocol import Identity

LOOPBACK = "/ip4/127.0.0.1/tcp/0"


@dataclass
class Node:
    """One node under test."""

    identity: Identity
    host: HardHost
    discovery: Dialer
    book: AddressBook

    @property
    def public(self) -> bytes:
        return self.identity.public

    @property
    def address(self) -> str:
        """Where it listens, without its id."""
        return str(self.host.get_transport_addrs()[0])

    @property
    def seed(self) -> Seed:
        return parse_seed(f"{self.address}/p2p/{self.identity.peer_id}")

    def peers(self) -> set[bytes]:
        return self.discovery._peers.connected()


@asynccontextmanager
async def searching(identity=None, *, listen=LOOPBACK, book=None, **options):
    """A node that listens and looks for peers."""
    identity = identity or Identity.generate()
    host = build_host(identity)
    book = book if book is not None else AddressBook(None)
    async with running(host, [listen]), trio.open_nursery() as nursery:
        discovery = Dialer(host, book=book, **options)
        nursery.start_soon(discovery.run)
        try:
            yield Node(identity, host, discovery, book)
        finally:
            nursery.cancel_scope.cancel()


@asynccontextmanager
async def crowd():
    """Nodes that come and go in any order: `node, leave = await add(…)`.

    All that are left go together.
    """
    async with trio.open_nursery() as nursery:

        async def live(options, task_status):
            gone, scope = trio.Event(), trio.CancelScope()

            async def leave():
                scope.cancel()
                await gone.wait()

            with scope:
                async with searching(**options) as node:
                    task_status.started((node, leave))
                    await trio.sleep_forever()
            gone.set()

        async def add(**options):
            return await nursery.start(live, options)

        yield add
        nursery.cancel_scope.cancel()


async def until(condition, seconds=10.0):
    """Wait until something is so, and say how long it took."""
    began = trio.current_time()
    with trio.fail_after(seconds):
        while not condition():  # noqa: ASYNC110 - what is waited for happens in other tasks, threads and processes
            await trio.sleep(0.01)
    return trio.current_time() - began


async def part(one: Node, two: Node) -> None:
    """End what is between two nodes."""
    await one.host.disconnect(id_of(two.public))


def dead_seed(identity=None) -> Seed:
    """An address at which nobody listens: port 1 of this machine."""
    identity = identity or Identity.generate()
    return parse_seed(f"/ip4/127.0.0.1/tcp/1/p2p/{identity.peer_id}")
