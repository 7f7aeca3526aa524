"""Whoever follows a run keeps an eye on its leader, and votes if it is an elector: for samplers and verifiers.

    async with Watch(network, puller.hearing, manifest.terms).work() as lease:
        await lease.wait_until_fresh()

It knows no role: what a silent leader means for the work, the worker decides.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

import trio

from echo_node.net.base import Network
from echo_node.terms.heartbeat import Pulse
from echo_node.terms.lease import Lease
from echo_node.terms.voting import VoteBox, VotingDesk
from echo_node.weights.hearing import Hearing
from echo_node.weights.journal import Head
from protocol.manifest import Terms


class Watch:
    """One follower's. With a `box` it votes, where its key is an elector's; `held` is the newest head whose weights it has."""

    def __init__(
        self,
        network: Network,
        hearing: Hearing,
        terms: Terms,
        *,
        box: VoteBox | None = None,
        held: Callable[[], Head | None] = lambda: None,
    ) -> None:
        self.lease = Lease(lambda: hearing.follower, terms.lease_ms / 1000)
        self._pulse = Pulse(network, hearing, self.lease)
        self._desk = None if box is None else VotingDesk(network, hearing, self.lease, box, held=held)

    @property
    def clock(self) -> str | None:
        """What a person should know of this machine's clock, if anything."""
        return self._pulse.clocks.apart

    @asynccontextmanager
    async def work(self) -> AsyncGenerator[Lease]:
        """Listen, and answer candidates, until the context is left."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._pulse.follow)
            if self._desk is None:
                yield self.lease
            else:
                with self._desk.serve():
                    yield self.lease
            nursery.cancel_scope.cancel()
