"""Weights store on disk: one complete, proven version at any moment.

    with WeightsStore.open(folder, rules, layout) as store:
        store.keep_head(head)               # judged by the rules of the chain, and synced
        ...                                 # blobs arrive in `store.blobs.folder`
        store.advance(head, route)          # compare-and-swap per chunk, then the pointer
        with store.lease() as held:         # nobody changes the state meanwhile
            engine.load(held.head.id, held.state)

In the folder, `blobs` and `heads` are immutable; `current` names the active version; `state` can
be rebuilt. Everything here blocks: call it from a thread. Threads may share a store, processes
may not.
"""

from __future__ import annotations

import logging
import tempfile
import threading
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

from echo_node.errors import DefectError, StoreError
from echo_node.net.blobs.blob_registry import InFile
from echo_node.storage.blob_dir import BlobDir
from echo_node.weights import blob_gc, fsck, parallel
from echo_node.weights.active_version import ActiveVersion, Build
from echo_node.weights.chain_log import ChainLog, Floor, Head
from echo_node.weights.errors import UnprovenError
from echo_node.weights.flat_layout import Chunk, FlatLayout
from echo_node.weights.route_graph import Step, Way
from echo_node.weights.route_reader import hash_of
from echo_node.weights.rwlock import RwLock
from echo_node.weights.state_file import Bytes, StateFile
from echo_node.weights.store_layout import StoreLayout
from echo_node.weights.version_archive import OffChainError, VersionArchive
from echo_node.weights.weights_view import WeightsView, leased
from protocol import Equivocation, Follower, Layout, Route, Rules, TermGrant, merkle_root

log = logging.getLogger(__name__)
PRUNE_SECONDS: Final = 20.0
"""Longest wait in seconds of `prune` for versions that are being built."""
LEASE_SECONDS: Final = 60.0
"""Seconds for which readers and writers of the state wait for each other."""


class WeightsStore:
    """Weights of one node. `open` makes it."""

    def __init__(
        self, place: StoreLayout, archive: VersionArchive, held: ActiveVersion, lent: BlobDir
    ) -> None:
        self._place = place
        self._held = held
        self._turn = threading.RLock()
        """Held by whoever changes anything in the folder."""
        self._leases = RwLock()
        self._building = RwLock()
        """Read by whoever builds a version from blobs, written by whoever removes blobs."""
        self.archive = archive
        self.flat = archive.flat
        self.blobs = archive.blobs
        """Folder in which blobs are written and downloaded."""
        self.lent = lent
        """Blobs served besides the chain. Their owner removes them; pruning does not."""
        self._pinned: frozenset[bytes] = frozenset()
        """Heads that stay buildable. Replaced and never changed, so that it needs no lock."""

    @classmethod
    @contextmanager
    def open(
        cls, folder: Path, rules: Rules, layout: Layout, *, floor: Floor | None = None, durable: bool = True
    ) -> Generator[WeightsStore]:
        """Open the store in a folder, made if there is none, at its active version.

        `floor` is the start of the chain that a link names. Without `durable` nothing is synced:
        for folders that nobody needs after the process.
        """
        flat = FlatLayout(layout)
        if flat.id != rules.layout:
            raise UnprovenError("wrong-layout", "a layout that is not the manifest's")
        with StoreLayout.locked(folder, durable=durable) as place:
            blobs = BlobDir(place.blobs, durable=durable)
            blobs.tidy()
            archive = VersionArchive(flat, blobs, ChainLog(place.heads, rules, floor, durable=durable))
            held = ActiveVersion(place, archive, StateFile(place.state, flat, durable=durable))
            lent = BlobDir(place.lent, durable=durable)
            lent.tidy()
            store = cls(place, archive, held, lent)
            try:
                held.recover()
                yield store
            finally:
                with store._leases.writing(LEASE_SECONDS):
                    held.close()

    @classmethod
    @contextmanager
    def temporary(cls, rules: Rules, layout: Layout) -> Generator[WeightsStore]:
        """Open a store in a temporary folder."""
        with (
            tempfile.TemporaryDirectory(prefix="echo-weights-") as folder,
            cls.open(Path(folder), rules, layout, durable=False) as store,
        ):
            yield store

    @property
    def follower(self) -> Follower:
        """Return the chain as this node took it."""
        return self.archive.journal.follower

    @property
    def tip(self) -> Head | None:
        """Return the head of the active version.

        The chain's newest may be another: newer, or on another branch.
        """
        return self._held.head

    @property
    def tip_of_chain(self) -> Head | None:
        """Return the head of the active version, if it is still on the chain."""
        tip = self.tip
        return tip if tip is not None and any(tip.id == head.id for head in self.follower.heads) else None

    def find(self, head_id: bytes) -> Head | None:
        """Return a known head, of the chain or of an abandoned branch."""
        return self.archive.journal.known.get(head_id)

    def keep_head(self, head: Head) -> bool:
        """Take a head by the rules of the chain, synced; return False if nothing changed.

        A `ChainError` says why it was refused.
        """
        with self._turn:
            return self.archive.journal.keep_head(head)

    def keep_grant(self, grant: TermGrant, branch: Sequence[Head] = ()) -> None:
        """Enter the next term; see `Follower.grant`."""
        with self._turn:
            self.archive.journal.keep_grant(grant, branch)

    def keep_proof(self, proof: Equivocation) -> bool:
        """Convict a key; see `Follower.convict`."""
        with self._turn:
            return self.archive.journal.keep_proof(proof)

    def missing(self, route: Route) -> list[tuple[bytes, int | None]]:
        """Return blobs that a route lacks, with sizes; first its table alone.

        Other blobs are known once the table is there.
        """
        return self.archive.missing(route)

    def held_of(self, head: Head) -> dict[bytes, InFile]:
        """Return the blobs of a head that are here (roster, tables, frames), to serve."""
        return self.archive.held_of(head)

    def advance(self, head: Head, route: Route, *, deadline: float = LEASE_SECONDS) -> None:
        """Advance to a head by one of its routes, whose blobs are all here, or stay."""
        self.walk((Step(head, route),), deadline=deadline)

    def walk(self, way: Way, *, refused: list[Step] | None = None, deadline: float = LEASE_SECONDS) -> None:
        """Advance to the last head of a way in one swap, or stay with an error.

        Each chunk goes through all steps in memory and is written once. A way may begin with an
        anchor older than the active version, because it is on disk and costs nothing: step by step,
        the store would go back to it, and a crash would leave it there. The way starts from the
        active version, or from nothing. An `UnprovenError` says what was wrong with it, and
        `refused` gets the step; a `StoreError` is the disk's.
        """
        if not way:
            return
        target = way[-1].head
        if all(target.id != known.id for known in reversed(self.follower.heads)):
            raise OffChainError
        with self._turn:
            self._check_joined(way)
            readers = self.archive.readers(way)
            afresh = way[0].route.base is None

            def build(chunk: Chunk, at: Bytes) -> Bytes:
                made: Bytes | None = None if afresh else at
                for step, reader in zip(way, readers, strict=True):
                    try:
                        made = reader.build(chunk, made)
                    except UnprovenError:
                        if refused is not None:
                            refused.append(step)
                        raise
                if made is None:
                    raise DefectError("a way without a step")
                return made

            self.swap(target, readers[-1].after, build, deadline=deadline)

    def _check_joined(self, way: Way) -> None:
        """Check that each step starts where the one before ended, the first at the tip.

        Two heads can have one state.
        """
        at = self.tip.message.root if self.tip else None
        for step in way:
            base = None if step.route.base is None else self.find(step.route.base)
            if step.route.base is not None and (base is None or base.message.root != at):
                version = step.head.message.version
                raise UnprovenError("wrong-base", f"version {version} starts from another state than this")
            at = step.head.message.root

    def swap(self, head: Head, after: list[bytes], build: Build, *, deadline: float = LEASE_SECONDS) -> None:
        """Switch to a kept head by building its chunks. For `advance` and the publisher."""
        with self._turn, self._leases.writing(deadline):
            self._held.swap(head, after, build)

    def chunk(self, chunk: Chunk) -> Bytes:
        """Return a copy of a chunk of the active version, for the publisher."""
        return self._held.proven(chunk)

    @property
    def hashes(self) -> list[bytes]:
        """Return the hashes of the chunks of the active version."""
        return self._held.hashes

    @contextmanager
    def turn(self) -> Generator[None]:
        """Keep others from changing the store within the block."""
        with self._turn:
            yield

    @contextmanager
    def lease(self, *, deadline: float = LEASE_SECONDS) -> Generator[WeightsView]:
        """Lease the tip and its state, which nobody changes within the block."""
        with self._reading(deadline):
            if self.tip is None:
                raise StoreError("no version of the weights is here yet", advice="wait until one was fetched")
            with leased(self.archive, self.tip, self._held.state_file.view()) as held:
                yield held

    @contextmanager
    def materialise(self, head_id: bytes, *, deadline: float = LEASE_SECONDS) -> Generator[WeightsView]:
        """Build any version in a temporary file of its own, removed after the block."""
        head = self.find(head_id)
        if head is None:
            raise StoreError("a head that this node does not know", advice="keep it first")
        with self._place.another_state(self.flat) as other:
            with self._reading(deadline), self._building.reading(deadline):
                self._build_into(other, head)
            with leased(self.archive, head, other.view()) as held:
                yield held

    def pin(self, head_id: bytes) -> None:
        """Keep a version buildable while this store is open, until `unpin`.

        Does not block.
        """
        self._pinned = self._pinned | {head_id}

    def unpin(self, head_id: bytes) -> None:
        """Let a version be pruned again. Does not block."""
        self._pinned = self._pinned - {head_id}

    def prune(self, *, versions: int, settled: bytes | None) -> int:
        """Remove blobs of old versions; return the bytes freed.

        The last `versions` can still be built, and so can pinned ones. `settled` is a head with an
        anchor that enough others hold: only what is older may go. Waits for versions that are being
        built from blobs here, and leaves all as it is if that takes too long.
        """
        with self._turn, ExitStack() as removing:
            try:
                removing.enter_context(self._building.writing(PRUNE_SECONDS))
            except StoreError:
                log.info("old versions are not pruned this time: one is being built from their blobs")
                return 0
            needed = blob_gc.needed(
                self.archive, self.tip, versions=versions, settled=settled, pinned=self._pinned
            )
            return 0 if needed is None else self.archive.keep_only(needed)

    def verify(self) -> list[str]:
        """Read everything again, every hash and signature, and return the problems."""
        with self._turn, self._reading(LEASE_SECONDS):
            return fsck.problems(self.archive, self._place, self._held)

    @contextmanager
    def _reading(self, deadline: float) -> Generator[None]:
        if self._held.torn:
            with self._leases.writing(deadline):
                self._held.mend()
        with self._leases.reading(deadline):
            yield

    def _build_into(self, other: StateFile, head: Head) -> None:
        """Build a version beside the active one, and from that one where it is cheaper."""
        way = self.archive.way(head.id, () if self.tip is None else (self.tip.id,))
        readers = self.archive.readers(way)
        from_here = not way or way[0].route.base is not None

        def build(chunk: Chunk) -> bytes:
            made = self.archive.build(readers, chunk, self._held.proven(chunk) if from_here else None)
            other.write(chunk, made.data)
            return hash_of(made)

        if merkle_root(parallel.each(build, self.flat.chunks)) != head.message.root:
            raise DefectError(f"version {head.message.version} came out with another root")
