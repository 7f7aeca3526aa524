"""A standby trainer: follow the chain, replicate checkpoints, vote, and take over.

    await Standby(run, network, identity, store, folder, journal).take_turns(lead)

`lead` trains on what is in the store, the folder and the journal until it is done or cancelled:
there are the weights of the head at which the term begins, the replicated checkpoint from which the
masters come, what the chain was trained on since, the verdicts, and groups that wait.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

import trio

from echo_node.election.candidate import Candidate
from echo_node.election.checkpoint_replication import CheckpointFetcher, CheckpointServer
from echo_node.election.elector import ElectorServer, VoteLog
from echo_node.election.heartbeat import HeartbeatMonitor
from echo_node.election.heartbeat_times import HEARTBEATS, HeartbeatTimes
from echo_node.election.leadership import DeposedError, Leadership
from echo_node.election.lease import Lease
from echo_node.errors import ConfigError, EchoError, PeerError, StoreError
from echo_node.net.base import Network
from echo_node.net.blobs.client import BlobClient
from echo_node.net.rate_limit import Throttle, UploadLimit
from echo_node.runs.algorithm import training_settings
from echo_node.runs.run import Run
from echo_node.trainer.journal import TrainingJournal
from echo_node.trainer.provenance import ProvenanceReader
from echo_node.trainer.replicated_checkpoints import ReplicatedCheckpoints
from echo_node.trainer.standby_buffer import StandbyBuffer
from echo_node.trainer.verdict_listener import StandbyVerdictListener
from echo_node.weights.chain_log import Head
from echo_node.weights.puller import Puller
from echo_node.weights.store import WeightsStore
from protocol import Identity, limits

log = logging.getLogger(__name__)
PULL_SECONDS: Final = 1.0
"""Mean seconds before another attempt after a version could not be pulled."""
STAGGER: Final = 0.25
"""Share of a lease that a trainer waits for each one named before it."""
CHECKPOINT_SHARE: Final = 16
"""Most bytes of a checkpoint per byte of published state.

Masters and two moments are six.
"""
CHECKPOINT_REST: Final = 64 << 20


class Standby:
    """One trainer of a run and its folder, over all its terms."""

    def __init__(
        self,
        run: Run,
        network: Network,
        identity: Identity,
        store: WeightsStore,
        folder: Path,
        journal: TrainingJournal,
        *,
        uplink: UploadLimit | None = None,
        downlink: Throttle | None = None,
    ) -> None:
        rules, terms = run.rules, run.manifest.terms
        if identity.public not in rules.trainers:
            raise ConfigError("this key is none of the run's trainers", advice="its author must name it")
        self._store = store
        self._journal = journal
        self._bound = run.manifest.sync.staleness
        self._checkpoints = ReplicatedCheckpoints(folder / "checkpoints")
        self._beat_seconds = terms.heartbeat_ms / 1000
        self._before = rules.trainers[: rules.trainers.index(identity.public)]
        """Trainers that may stand before this one does."""
        self._random = random.Random(identity.public)  # noqa: S311 - jitter, not a secret
        self._puller = Puller(network, store, uplink=uplink, downlink=downlink)
        chain = self._puller.chain
        times = HeartbeatTimes(folder / HEARTBEATS)
        self.lease = Lease(lambda: store.follower, terms.lease_ms / 1000, times=times)
        self._lease_seconds = terms.lease_ms / 1000
        self.checkpoint_fetcher = CheckpointFetcher(
            network,
            folder / "borrowed",
            self._checkpoints.keep,
            most=CHECKPOINT_SHARE * store.flat.size + CHECKPOINT_REST,
            blobs=BlobClient(network, downlink=downlink),
        )
        room = (self._bound + 1) * training_settings(run.manifest).batch_groups
        self._verdict_listener = StandbyVerdictListener(run, network, identity, journal)
        self._group_buffer = StandbyBuffer(run, network, store, journal, room, self._verdict_listener.saw)
        self._provenance = ProvenanceReader(self._puller, journal, self._bound, self._group_buffer.bytes_of)
        self._heartbeats = HeartbeatMonitor(
            network, chain, self.lease, on_heartbeat=self.checkpoint_fetcher.hear
        )
        vote_log = VoteLog(folder / "votes", identity, run.id)
        self._elector = ElectorServer(network, chain, self.lease, vote_log, held=lambda: store.tip)
        self.candidate = Candidate(
            network, chain, self.lease, vote_log, self._elector, held=lambda: store.tip_of_chain
        )
        self._checkpoint_server = CheckpointServer(store)
        self._leadership = Leadership(
            network, identity, store, terms, vote_log, times=times, ext=self._checkpoint_server.ext
        )
        self._ordered = trio.Event()

    @property
    def clock(self) -> str | None:
        """Return a warning about this machine's clock, if there is one."""
        return self._heartbeats.clocks.apart

    def promote(self) -> None:
        """Stand for election once the lease is over, by an operator's order.

        Needed where there are too few electors for a trainer to stand by itself.
        """
        self._ordered.set()

    async def take_turns(self, lead: Callable[[], Awaitable[None]]) -> None:
        """Stand by and lead, one after the other, until `lead` has returned."""
        while True:
            await self.wait_to_lead()
            try:
                async with self._leadership.hold(), trio.open_nursery() as nursery:
                    nursery.start_soon(self._serve_checkpoints)
                    await lead()
                    nursery.cancel_scope.cancel()
                    return
            except DeposedError as error:
                log.warning("%s", error)

    async def wait_to_lead(self) -> None:
        """Follow until this trainer leads a term, whose grant is on disk."""
        if not self.candidate.leads:
            async with self._puller.work(), trio.open_nursery() as nursery:
                with self._elector.serve():
                    for task in (
                        self._heartbeats.follow,
                        self.checkpoint_fetcher.follow,
                        self._group_buffer.follow,
                        self._verdict_listener.follow,
                        self._provenance.follow,
                        self._keep_up,
                    ):
                        nursery.start_soon(task)
                    await self._win_election()
                nursery.cancel_scope.cancel()
        if (tip := self._store.follower.tip) is not None:
            await trio.to_thread.run_sync(self._checkpoints.remove_after, tip.message.version)

    # Following

    async def _keep_up(self) -> None:
        """Pull the weights and the roster of every new head, to be able to go on from it."""
        held: bytes | None = None
        while True:
            head = await self._puller.chain.wait_for_newer(held)
            try:
                await self._fetch_rosters()
                await self._prune(head)
                await self._puller.pull()
                held = head.id
            except (PeerError, StoreError) as error:
                log.info("version %d is not here yet: %s", head.message.version, error)
                await trio.sleep(PULL_SECONDS * self._random.uniform(0.5, 1.5))

    async def _fetch_rosters(self) -> None:
        """Fetch the rosters of the newest heads, whose groups a new leader is sent."""
        for head in self._store.follower.heads[-limits.HEADS :]:
            if not self._store.blobs.has(head.message.roster):
                await self._puller.roster(head)

    async def _prune(self, tip: Head) -> None:
        """Prune the bytes of groups that a checkpoint covers, as the leader does."""
        number = await self._journal.last_number(self._checkpoints.covered)
        await self._journal.settle(number, step=tip.message.step - self._bound)

    # Taking over

    async def _win_election(self) -> None:
        """Stand whenever the lease runs out, until elected: the leader may come back."""
        by_hand = not self.candidate.may_stand_alone
        while not self.candidate.leads:
            if by_hand:
                await self._ordered.wait()
                self._ordered = trio.Event()
            await self.lease.wait_until_over()
            others = len(set(self._before) - {self._store.follower.leader})
            await trio.sleep(others * STAGGER * self._lease_seconds * self._random.uniform(0.75, 1.25))
            if self.lease.is_over:
                log.warning("the leader has been silent for %.1f s: standing", self._lease_seconds)
                await self.candidate.stand(by_hand=by_hand)

    async def _serve_checkpoints(self) -> None:
        """Serve the newest checkpoint to the others, whenever there is a new one."""
        served: Path | None = None
        while True:
            newest = await trio.to_thread.run_sync(self._checkpoints.files)
            if newest and newest[-1][0] != served:
                path, step = newest[-1]
                try:
                    await trio.to_thread.run_sync(self._checkpoint_server.lend, path, step)
                    served = path
                except EchoError as error:
                    log.warning("a checkpoint cannot be served: %s", error)
            await trio.sleep(self._beat_seconds)
