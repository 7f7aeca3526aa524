"""The weights on disk: one whole version that can be proven, whatever happens in the middle. Knows no network.

    with WeightsStore.open(folder, rules, layout) as store:
        store.keep_head(head)                      # judged by the rules of the chain, and synced
        ...                                        # blobs arrive in `store.blobs.folder`, by `net/blobs.fetch_to`
        store.advance(head, route)                 # compare-and-swap per chunk, then the pointer flips
        with store.lease() as held:                # nobody changes the state meanwhile
            engine.load(held.head.id, held.state)

In the folder, `blobs` and `heads` are the truth and never change; `current` names the version; `state` is scratch.
Everything here blocks: call it from a thread. Threads may share a store, processes may not.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from echo_node.errors import DefectError, StoreError
from echo_node.net.blobs.shelf import InFile
from echo_node.weights import checking, parallel, pruning
from echo_node.weights.blobfolder import BlobFolder
from echo_node.weights.flat import Chunk, FlatLayout
from echo_node.weights.held import Build, HeldState
from echo_node.weights.journal import Floor, Head, Journal
from echo_node.weights.lease import Leases
from echo_node.weights.leased import Leased, leased
from echo_node.weights.passage import hash_of
from echo_node.weights.refusal import UnprovenError
from echo_node.weights.routes import Step, Way
from echo_node.weights.scratch import Bytes, Scratch
from echo_node.weights.storefolder import StoreFolder
from echo_node.weights.truth import OffChainError, Truth
from protocol import Equivocation, Follower, Layout, Route, Rules, TermGrant, merkle_root

LEASE_SECONDS: Final = 60.0
"""How long readers and writers of the state wait for one another."""


class WeightsStore:
    """One node's weights. `open` makes it."""

    def __init__(self, place: StoreFolder, truth: Truth, held: HeldState, lent: BlobFolder) -> None:
        self._place = place
        self._held = held
        self._turn = threading.RLock()
        """Whoever changes anything in the folder, one after the other."""
        self._leases = Leases()
        self.truth = truth
        self.flat = truth.flat
        self.blobs = truth.blobs
        """Where blobs are put, and downloaded to."""
        self.lent = lent
        """What this node gives besides the chain. Whoever put it there takes it away again: pruning does not."""

    @classmethod
    @contextmanager
    def open(
        cls, folder: Path, rules: Rules, layout: Layout, *, floor: Floor | None = None, durable: bool = True
    ) -> Generator[WeightsStore]:
        """The store in a folder, made if there is none, at the version that it held. `floor` is what a link says.

        Without `durable` nothing is synced: for folders that nobody needs after the process.
        """
        flat = FlatLayout(layout)
        if flat.id != rules.layout:
            raise UnprovenError("wrong-layout", "a layout that is not the manifest's")
        with StoreFolder.locked(folder, durable=durable) as place:
            blobs = BlobFolder(place.blobs, durable=durable)
            blobs.tidy()
            truth = Truth(flat, blobs, Journal(place.heads, rules, floor, durable=durable))
            held = HeldState(place, truth, Scratch(place.state, flat, durable=durable))
            lent = BlobFolder(place.lent, durable=durable)
            lent.tidy()
            store = cls(place, truth, held, lent)
            try:
                held.recover()
                yield store
            finally:
                with store._leases.writing(LEASE_SECONDS):
                    held.close()

    @classmethod
    @contextmanager
    def temporary(cls, rules: Rules, layout: Layout) -> Generator[WeightsStore]:
        """A store that is gone afterwards."""
        with (
            tempfile.TemporaryDirectory(prefix="echo-weights-") as folder,
            cls.open(Path(folder), rules, layout, durable=False) as store,
        ):
            yield store

    @property
    def follower(self) -> Follower:
        """The chain as this node took it."""
        return self.truth.journal.follower

    @property
    def tip(self) -> Head | None:
        """The head whose state is held whole. The chain's newest may be another: newer, or on another branch."""
        return self._held.head

    def find(self, head_id: bytes) -> Head | None:
        """A head that was taken, of the chain or of a branch that was left."""
        return self.truth.journal.known.get(head_id)

    def keep_head(self, head: Head) -> bool:
        """Take a head by the rules of the chain, synced. A `ChainError` says why not; False: it changes nothing."""
        with self._turn:
            return self.truth.journal.keep_head(head)

    def keep_grant(self, grant: TermGrant, branch: Sequence[Head] = ()) -> None:
        """Enter the next term; see `Follower.grant`."""
        with self._turn:
            self.truth.journal.keep_grant(grant, branch)

    def keep_proof(self, proof: Equivocation) -> bool:
        """Convict a key; see `Follower.convict`."""
        with self._turn:
            return self.truth.journal.keep_proof(proof)

    def missing(self, route: Route) -> list[tuple[bytes, int | None]]:
        """Blobs that a route still needs, with their sizes: its table alone, as long as that is not here."""
        return self.truth.missing(route)

    def held_of(self, head: Head) -> dict[bytes, InFile]:
        """What is here of a head (roster, tables, frames), for `net/shelf`."""
        return self.truth.held_of(head)

    def advance(self, head: Head, route: Route, *, deadline: float = LEASE_SECONDS) -> None:
        """Go to a head of the chain by one of its routes, whose blobs are all here; or stay, with an error."""
        self.walk((Step(head, route),), deadline=deadline)

    def walk(self, way: Way, *, deadline: float = LEASE_SECONDS) -> None:
        """Go to the head at the end of a way at once, each chunk over all its steps; or stay, with an error.

        The way starts from the state that is held, or from nothing. An `UnprovenError` says what was wrong with it, a
        `StoreError` what the disk did.
        """
        if not way:
            return
        target = way[-1].head
        if all(target.id != known.id for known in reversed(self.follower.heads)):
            raise OffChainError
        with self._turn:
            self._check_joined(way)
            passages = self.truth.passages(way)
            afresh = way[0].route.base is None
            self.swap(
                target,
                passages[-1].after,
                lambda chunk, at: self.truth.build(passages, chunk, None if afresh else at),
                deadline=deadline,
            )

    def _check_joined(self, way: Way) -> None:
        """Each step starts where the one before it ended, and the first where we are. Two heads can have one state."""
        at = self.tip.message.root if self.tip else None
        for step in way:
            base = None if step.route.base is None else self.find(step.route.base)
            if step.route.base is not None and (base is None or base.message.root != at):
                version = step.head.message.version
                raise UnprovenError("wrong-base", f"version {version} starts from another state than this")
            at = step.head.message.root

    def swap(self, head: Head, after: list[bytes], build: Build, *, deadline: float = LEASE_SECONDS) -> None:
        """Go to a head that was kept, whose chunks somebody knows to build. For `advance` and the publisher."""
        with self._turn, self._leases.writing(deadline):
            self._held.swap(head, after, build)

    def chunk(self, chunk: Chunk) -> Bytes:
        """A copy of a chunk of the state that is held. For the publisher, which nobody changes it under."""
        return self._held.proven(chunk)

    @property
    def hashes(self) -> list[bytes]:
        """Of the chunks of the state that is held."""
        return self._held.hashes

    @contextmanager
    def turn(self) -> Generator[None]:
        """Nobody else changes anything meanwhile."""
        with self._turn:
            yield

    @contextmanager
    def lease(self, *, deadline: float = LEASE_SECONDS) -> Generator[Leased]:
        """The tip and its state, which nobody changes meanwhile. What it gives is good within the block alone."""
        with self._reading(deadline):
            if self.tip is None:
                raise StoreError("no version of the weights is here yet", advice="wait until one was fetched")
            with leased(self.truth, self.tip, self._held.scratch.view()) as held:
                yield held

    @contextmanager
    def materialise(self, head_id: bytes, *, deadline: float = LEASE_SECONDS) -> Generator[Leased]:
        """The state of any version that can be built from what is here, in a file of its own; gone after the block."""
        head = self.find(head_id)
        if head is None:
            raise StoreError("a head that this node does not know", advice="keep it first")
        with self._place.another_state(self.flat) as other:
            with self._reading(deadline):
                self._build_into(other, head)
            with leased(self.truth, head, other.view()) as held:
                yield held

    def prune(self, *, versions: int, settled: bytes | None) -> int:
        """Remove blobs of old versions, and say how many bytes that freed. The last `versions` can still be built.

        `settled` is a head with an anchor that enough others hold: what is older than it may go, and nothing else.
        """
        with self._turn:
            needed = pruning.needed(self.truth, self.tip, versions=versions, settled=settled)
            return 0 if needed is None else self.truth.keep_only(needed)

    def verify(self) -> list[str]:
        """Read everything again, every hash and signature, and say what is wrong."""
        with self._turn, self._reading(LEASE_SECONDS):
            return checking.problems(self.truth, self._place, self._held)

    @contextmanager
    def _reading(self, deadline: float) -> Generator[None]:
        if self._held.torn:
            with self._leases.writing(deadline):
                self._held.mend()
        with self._leases.reading(deadline):
            yield

    def _build_into(self, other: Scratch, head: Head) -> None:
        """Build a version beside the one that is held, and from that one where this is cheaper."""
        way = self.truth.way(head.id, () if self.tip is None else (self.tip.id,))
        passages = self.truth.passages(way)
        from_here = not way or way[0].route.base is not None

        def build(chunk: Chunk) -> bytes:
            made = self.truth.build(passages, chunk, self._held.proven(chunk) if from_here else None)
            other.write(chunk, made.data)
            return hash_of(made)

        if merkle_root(parallel.each(build, self.flat.chunks)) != head.message.root:
            raise DefectError(f"version {head.message.version} came out with another root")
