"""What is never changed once it is written: heads, tables and frames, and what they lead to. Any version, from nothing.

It finds a way to a version over what is here, and builds its chunks one by one. It knows neither the state that is
held nor which version that is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from echo_node.errors import DefectError, StoreError
from echo_node.net.blobs.shelf import InFile
from echo_node.weights import disk
from echo_node.weights.blobfolder import BlobFolder
from echo_node.weights.flat import Chunk, FlatLayout
from echo_node.weights.journal import Head, Journal
from echo_node.weights.passage import Passage, missing_frames, read_table
from echo_node.weights.refusal import UnprovenError
from echo_node.weights.routes import Step, Way, cheapest
from echo_node.weights.scratch import Bytes
from protocol import Route, merkle_root


class NoWayError(StoreError):
    """A version cannot be built from what is here."""


class OffChainError(DefectError):
    """A head is not of the chain, or no longer: a grant may leave heads behind at any moment."""

    def __init__(self) -> None:
        super().__init__("only a head of the chain can be held", advice="keep it first")


class Truth:
    """The chain and its blobs, together."""

    def __init__(self, flat: FlatLayout, blobs: BlobFolder, journal: Journal) -> None:
        self.flat = flat
        self.blobs = blobs
        self.journal = journal
        self._whole = set[bytes]()
        """Tables that were found with all their frames: finding that out again would look at every file."""
        self._lost = 0

    def missing(self, route: Route) -> list[tuple[bytes, int | None]]:
        """Blobs of a route that are not here, with their sizes: the table alone as long as that is not here."""
        table = read_table(self.blobs, route)
        if table is None:
            return [(route.table, None)]
        return [(frame.blob, frame.size) for frame in missing_frames(self.blobs, table)]

    def is_whole(self, route: Route) -> bool:
        """Whether the table and every frame of a route are here."""
        if self._lost != self.blobs.lost:  # some file was damaged: of which table, nobody knows
            self._lost = self.blobs.lost
            self._whole.clear()
        if route.table not in self._whole:
            if self.missing(route):
                return False
            self._whole.add(route.table)
        return True

    def names(self, head: Head) -> Iterator[bytes]:
        """Every blob that a head leads to, as far as its tables are here."""
        yield head.message.roster
        for route in head.message.routes:
            yield from self.names_of(route)

    def names_of(self, route: Route) -> Iterator[bytes]:
        yield route.table
        table = read_table(self.blobs, route)
        yield from (frame.blob for frame in table or () if frame.size)

    def held_of(self, head: Head) -> dict[bytes, InFile]:
        """What is here of a head, for the shelf."""
        found = {blob: self.blobs.held(blob) for blob in self.names(head)}
        return {blob: held for blob, held in found.items() if held}

    def keep_only(self, needed: Collection[bytes]) -> int:
        """Remove all other blobs, and what downloads of them have left. The bytes that were freed."""
        self._whole.intersection_update(needed)
        gone = {blob: size for blob, size in self.blobs.all() if blob not in needed}
        for path in [self.blobs.path(blob) for blob in gone]:
            disk.remove(path)
        for blob, path in self.blobs.drafts():
            if blob not in needed:
                disk.remove(path)
        return sum(gone.values())

    def hashes(self, head: Head) -> list[bytes]:
        """The hashes of a version's chunks, from one of its tables. Their root is the head's."""
        for route in head.message.routes:
            table = read_table(self.blobs, route)
            after = [frame.after for frame in table or ()]
            if after and merkle_root(after) == head.message.root:
                return after
        raise NoWayError("no table of that version is here", advice="fetch it again")

    def way(self, head_id: bytes, held: Collection[bytes] = ()) -> Way:
        """The cheapest way to a version over what is here."""
        way = cheapest(self.journal.known, head_id, held, self._cost)
        if way is None:
            raise NoWayError("that version cannot be built from what is here", advice="fetch it again")
        return way

    def can_build(self, head_id: bytes) -> bool:
        """Whether there is a way to a version from nothing, over what is here."""
        return cheapest(self.journal.known, head_id, (), self._cost) is not None

    def _cost(self, route: Route) -> int | None:
        return route.size if self.is_whole(route) else None

    def passage(self, step: Step) -> Passage:
        table = read_table(self.blobs, step.route)
        if table is None:
            raise UnprovenError(
                "missing-blob", f"the table of version {step.head.message.version} is not here"
            )
        return Passage(self.flat, self.blobs, step, table)

    def passages(self, way: Way) -> list[Passage]:
        return [self.passage(step) for step in way]

    @staticmethod
    def build(passages: Sequence[Passage], chunk: Chunk, base: Bytes | None = None) -> Bytes:
        """A chunk at the end of a way."""
        for passage in passages:
            base = passage.build(chunk, base)
        if base is None:
            raise StoreError("a way without a step leads nowhere")
        return base
