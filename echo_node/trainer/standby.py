"""A trainer that does not lead: it follows the chain, holds the newest checkpoint, votes, and takes over when nobody leads.

    await Standby(run, network, identity, store, folder, journal).take_turns(lead)

`lead` trains on what is in the store, the folder and the journal until it is done or cancelled: there are the weights of the
head at which the term begins, the replicated checkpoint from which the masters come, what the chain was trained on since, what
verifiers have said, and groups that wait. It knows nothing of how that is done.
"""

from __future__ import annotations

import logging
import random
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

import trio

from echo_node.errors import ConfigError, EchoError, PeerError, StoreError, boundary
from echo_node.net.base import Network
from echo_node.net.blobs.blobs import Blobs
from echo_node.net.throttle import Throttle, Uplink
from echo_node.run import Run
from echo_node.terms.electing import Candidate
from echo_node.terms.heartbeat import Pulse
from echo_node.terms.lease import Lease
from echo_node.terms.reign import DeposedError, Reign
from echo_node.terms.replicas import Borrowing, Lending
from echo_node.terms.voting import VoteBox, VotingDesk
from echo_node.trainer.accounting import Accounting
from echo_node.trainer.checkpoint import LARGEST_FILE, from_bytes, read_checkpoint, write_checkpoint
from echo_node.trainer.journal import TrainingJournal
from echo_node.trainer.overhearing import Overhearing
from echo_node.trainer.settings import training_settings
from echo_node.trainer.witnessing import Witnessing
from echo_node.weights import disk
from echo_node.weights.journal import Head
from echo_node.weights.pull import Puller
from echo_node.weights.store import WeightsStore
from protocol import Identity, limits

log = logging.getLogger(__name__)
PULL_SECONDS: Final = 1.0
"""After a version could not be had."""
STAGGER: Final = 0.25
"""Shares of a lease by which trainers wait for those that the manifest names before them."""
CHECKPOINT_SHARE: Final = 16
"""Bytes of a checkpoint for each byte of the published state, at most: masters and two moments are six."""
CHECKPOINT_REST: Final = 64 << 20
_VERSION: Final = "head_version"
"""The note in which a checkpoint says what was published when it was made."""
_NAME: Final = re.compile(r"step-(\d+)\.safetensors")


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
        uplink: Uplink | None = None,
        downlink: Throttle | None = None,
    ) -> None:
        rules, terms = run.rules, run.told.terms
        if identity.public not in rules.trainers:
            raise ConfigError("this key is none of the run's trainers", advice="its author must name it")
        self._store = store
        self._journal = journal
        self._bound = run.told.sync.staleness
        self._checkpoints = folder / "checkpoints"
        self._beat_seconds = terms.heartbeat_ms / 1000
        self._before = rules.trainers[: rules.trainers.index(identity.public)]
        """Trainers that may stand before this one does."""
        self._luck = random.Random(identity.public)  # noqa: S311 - spreads load, keeps no secret
        self._puller = Puller(network, store, uplink=uplink, downlink=downlink)
        hearing = self._puller.hearing
        self.lease = Lease(lambda: store.follower, terms.lease_ms / 1000)
        self._lease_seconds = terms.lease_ms / 1000
        self.borrowing = Borrowing(
            network,
            folder / "borrowed",
            self._keep_checkpoint,
            most=CHECKPOINT_SHARE * store.flat.size + CHECKPOINT_REST,
            blobs=Blobs(network, downlink=downlink),
        )
        self._covered = -1
        """The version of the newest checkpoint that came from another trainer."""
        room = (self._bound + 1) * training_settings(run.told).batch_groups
        self._witnessing = Witnessing(run, network, identity, journal)
        self._overhearing = Overhearing(run, network, store, journal, room, self._witnessing.saw)
        self._accounting = Accounting(self._puller, journal, self._bound, self._overhearing.bytes_of)
        self._pulse = Pulse(network, hearing, self.lease, told=self.borrowing.hear)
        box = VoteBox(folder / "votes", identity, run.id)
        self._desk = VotingDesk(network, hearing, self.lease, box, held=lambda: store.tip)
        self.candidate = Candidate(network, hearing, self.lease, box, self._desk, held=self._held)
        self._lending = Lending(store)
        self._reign = Reign(network, identity, store, terms, box, ext=self._lending.ext)
        self._ordered = trio.Event()

    @property
    def clock(self) -> str | None:
        """What a person should know of this machine's clock, if anything."""
        return self._pulse.clocks.apart

    def promote(self) -> None:
        """What an operator orders where there are too few electors: ask them, once the lease is over."""
        self._ordered.set()

    async def take_turns(self, lead: Callable[[], Awaitable[None]]) -> None:
        """Stand by and lead, one after the other, until `lead` has come to its end."""
        while True:
            await self.wait_to_lead()
            try:
                async with self._reign.hold(), trio.open_nursery() as nursery:
                    nursery.start_soon(self._lend)
                    await lead()
                    nursery.cancel_scope.cancel()
                    return
            except DeposedError as error:
                log.warning("%s", error)

    async def wait_to_lead(self) -> None:
        """Follow until this trainer leads a term, whose grant is on disk; at once, if it does."""
        if not self.candidate.leads:
            async with self._puller.work(), trio.open_nursery() as nursery:
                with self._desk.serve():
                    for task in (
                        self._pulse.follow,
                        self.borrowing.follow,
                        self._overhearing.follow,
                        self._witnessing.follow,
                        self._accounting.follow,
                        self._keep_up,
                    ):
                        nursery.start_soon(task)
                    await self._win()
                nursery.cancel_scope.cancel()
        if (tip := self._store.follower.tip) is not None:
            await trio.to_thread.run_sync(self._forget_after, tip.message.version)

    # Following

    async def _keep_up(self) -> None:
        """Hold the weights and the roster of every new head: without them nobody could go on from it."""
        held: bytes | None = None
        while True:
            head = await self._puller.hearing.wait_for_newer(held)
            try:
                await self._fetch_rosters()
                await self._let_go(head)
                await self._puller.pull()
                held = head.id
            except (PeerError, StoreError) as error:
                log.info("version %d is not here yet: %s", head.message.version, error)
                await trio.sleep(PULL_SECONDS * self._luck.uniform(0.5, 1.5))

    async def _fetch_rosters(self) -> None:
        """Who may sample under the newest heads, whose groups a new leader will be sent."""
        for head in self._store.follower.heads[-limits.HEADS :]:
            if not self._store.blobs.has(head.message.roster):
                await self._puller.roster(head)

    async def _let_go(self, tip: Head) -> None:
        """The bytes of groups that a checkpoint covers may go, as they do where it was made."""
        number = await self._journal.last_number(self._covered)
        await self._journal.settle(number, step=tip.message.step - self._bound)

    def _held(self) -> Head | None:
        """The newest head of the chain whose weights are here."""
        tip = self._store.tip
        heads = self._store.follower.heads
        return tip if tip is not None and any(tip.id == head.id for head in heads) else None

    def _keep_checkpoint(self, path: Path) -> None:
        made = from_bytes(disk.read_whole(path, LARGEST_FILE), blame=PeerError)
        with boundary(PeerError, "reading the version of a checkpoint"):
            version = int(made.notes.get(_VERSION, "-1"))
        write_checkpoint(self._checkpoints, made)
        self._covered = max(-1, min(version, limits.SAFE_INTEGER))

    # Taking over

    async def _win(self) -> None:
        """Wait for the lease to run out, and stand; again and again, since the leader may come back in between."""
        by_hand = not self.candidate.may_stand_alone
        while not self.candidate.leads:
            if by_hand:
                await self._ordered.wait()
                self._ordered = trio.Event()
            await self.lease.wait_until_over()
            others = len(set(self._before) - {self._store.follower.leader})
            await trio.sleep(others * STAGGER * self._lease_seconds * self._luck.uniform(0.75, 1.25))
            if self.lease.is_over:
                log.warning("the leader has been silent for %.1f s: standing", self._lease_seconds)
                await self.candidate.stand(by_hand=by_hand)

    def _forget_after(self, version: int) -> None:
        """Remove checkpoints of versions that this chain does not have: a leader that is gone made them. Blocks."""
        for path, _ in _files(self._checkpoints):
            try:
                made = int(read_checkpoint(path).notes.get(_VERSION, "-1"))
            except (StoreError, ValueError):
                continue
            if made > version:
                disk.remove(path)

    async def _lend(self) -> None:
        """Lend the newest checkpoint to the others, whenever there is another one."""
        lent: Path | None = None
        while True:
            newest = await trio.to_thread.run_sync(_files, self._checkpoints)
            if newest and newest[-1][0] != lent:
                path, step = newest[-1]
                try:
                    await trio.to_thread.run_sync(self._lending.lend, path, step)
                    lent = path
                except EchoError as error:
                    log.warning("a checkpoint cannot be lent: %s", error)
            await trio.sleep(self._beat_seconds)


def _files(folder: Path) -> list[tuple[Path, int]]:
    """The checkpoints of a folder with their steps, the newest last."""
    with disk.touching(f"looking into {folder.name}"):
        names = [path for path in folder.iterdir() if _NAME.fullmatch(path.name)] if folder.is_dir() else []
    steps = [(path, int(path.stem.removeprefix("step-"))) for path in names]
    return sorted(steps, key=lambda each: each[1])
