"""Hold a term as its leader: heartbeats, answers to candidates, deposition.

    async with Leadership(network, identity, store, manifest, votes).hold():
        ...                                        # lead

When a grant of a later term arrives, the block ends with a `DeposedError`.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final

import trio

from echo_node.election.elector import ElectorServer, VoteLog
from echo_node.election.heartbeat import HeartbeatMonitor, HeartbeatSender
from echo_node.election.heartbeat_times import HeartbeatTimes
from echo_node.election.lease import Lease
from echo_node.errors import PeerError
from echo_node.net.base import Network
from echo_node.weights.chain_follower import ChainFollower
from echo_node.weights.store import WeightsStore
from protocol import ChainError, Follower, Identity, ProtocolError, peer_id
from protocol.manifest import Terms

log = logging.getLogger(__name__)
ASK_SECONDS: Final = 15.0
"""Seconds in which a restarted leader asks whether it still leads. Without answers, it leads."""
ASK_PAUSE: Final = 0.5


class DeposedError(PeerError):
    """Another trainer leads a later term; this node follows from now on."""


class Leadership:
    """One leader's hold on its term.

    `ext` returns further entries for each heartbeat, `times` are those of the heartbeats before.
    """

    def __init__(
        self,
        network: Network,
        identity: Identity,
        store: WeightsStore,
        terms: Terms,
        votes: VoteLog,
        *,
        times: HeartbeatTimes | None = None,
        ext: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        self._public = identity.public
        self._store = store
        self._chain = ChainFollower(network, store)
        lease = Lease(lambda: store.follower, terms.lease_ms / 1000)
        self._heartbeats = HeartbeatMonitor(network, self._chain, lease)
        self._server = ElectorServer(network, self._chain, lease, votes, held=lambda: store.tip)
        self._heart = HeartbeatSender(
            network,
            identity,
            lambda: store.follower,
            lease,
            seconds=terms.heartbeat_ms / 1000,
            times=times,
            ext=ext,
        )

    @property
    def leads(self) -> bool:
        follower = self._store.follower
        return follower.leader == self._public and not follower.holding

    @asynccontextmanager
    async def hold(self) -> AsyncGenerator[None]:
        """Lead until the block is left or this node is deposed.

        Others are asked first: this node may have been replaced while it was away.
        """
        with trio.move_on_after(ASK_SECONDS):
            await self._chain.ask_around()
            await self._ask_electors()
        self._check_leads()
        try:
            with self._server.serve():
                async with trio.open_nursery() as nursery:
                    for task in (self._chain.follow, self._heartbeats.follow, self._heart.beat, self._watch):
                        nursery.start_soon(task)
                    yield
                    nursery.cancel_scope.cancel()
        except (ChainError, ExceptionGroup) as error:
            # The publisher may find out first, when a head of its own is refused.
            if self.leads:
                raise
            raise self._deposed() from error

    async def _ask_electors(self) -> None:
        """Ask enough electors for a later grant to reach one of any majority.

        A run without heads has none.
        """
        rules, later = self._store.follower.rules, self._store.follower.term + 1
        others = set(rules.electors_of(later)) - {self._public}
        enough = len(others) - rules.majority_of(later) + 1
        answered = set[bytes]()
        while self.leads and self._chain.tip is not None and len(answered) < enough:
            for elector in sorted(others - answered):
                try:
                    await self._chain.ask_for_grants(elector)
                    answered.add(elector)
                except (PeerError, ProtocolError) as error:
                    log.info("an elector cannot say whether this trainer still leads: %s", error)
            await trio.sleep(ASK_PAUSE)

    async def _watch(self) -> None:
        seen: Follower = self._store.follower
        while True:
            self._check_leads()
            seen = await self._chain.wait_for_change(seen)

    def _check_leads(self) -> None:
        if not self.leads:
            raise self._deposed()

    def _deposed(self) -> DeposedError:
        follower = self._store.follower
        if not follower.leader or follower.holding:
            return DeposedError(
                f"nobody leads term {follower.term}: its leader or its election was caught in a lie",
                advice="wait for the electors to grant the next term",
            )
        return DeposedError(
            f"{peer_id(follower.leader)} leads term {follower.term}, so this trainer no longer does",
            advice="it stands by, and follows the chain from there",
        )
