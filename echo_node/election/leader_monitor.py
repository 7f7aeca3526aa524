"""Watch a run's leader, and vote as an elector: for samplers and verifiers.

    async with LeaderMonitor(network, follower, manifest.terms).work() as lease:
        await lease.wait_until_fresh()

What a silent leader means for the work is up to the worker.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import trio

from echo_node.election.elector import ElectorServer, VoteLog
from echo_node.election.heartbeat import HeartbeatMonitor
from echo_node.election.heartbeat_times import HeartbeatTimes
from echo_node.election.lease import Lease
from echo_node.net.base import Network
from echo_node.weights.chain_follower import ChainFollower
from echo_node.weights.chain_log import Head
from protocol.manifest import Terms


class LeaderMonitor:
    """Leader monitor of a follower.

    With a `votes` it votes, if its key is an elector's.

    `held` returns the newest head with weights on this node; `times` is the file with the times of
    the last heartbeats.
    """

    def __init__(
        self,
        network: Network,
        chain: ChainFollower,
        terms: Terms,
        *,
        votes: VoteLog | None = None,
        held: Callable[[], Head | None] = lambda: None,
        times: Path | None = None,
    ) -> None:
        self.lease = Lease(lambda: chain.follower, terms.lease_ms / 1000, times=HeartbeatTimes(times))
        self._heartbeats = HeartbeatMonitor(network, chain, self.lease)
        self._server = None if votes is None else ElectorServer(network, chain, self.lease, votes, held=held)

    @property
    def clock(self) -> str | None:
        """Return a warning about this machine's clock, if there is one."""
        return self._heartbeats.clocks.apart

    @asynccontextmanager
    async def work(self) -> AsyncGenerator[Lease]:
        """Listen, and answer candidates, until the context is left."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._heartbeats.follow)
            if self._server is None:
                yield self.lease
            else:
                with self._server.serve():
                    yield self.lease
            nursery.cancel_scope.cancel()
