"""Immutable heads, tables and frames; rebuilds any version."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Sequence

from echo_node.errors import DefectError, StoreError
from echo_node.net.blobs.blob_registry import InFile
from echo_node.storage import files
from echo_node.storage.blob_dir import BlobDir
from echo_node.weights.chain_log import ChainLog, Head
from echo_node.weights.errors import UnprovenError
from echo_node.weights.flat_layout import Chunk, FlatLayout
from echo_node.weights.route_graph import Step, Way, cheapest
from echo_node.weights.route_reader import RouteReader, missing_frames, read_table
from echo_node.weights.state_file import Bytes
from protocol import Route, merkle_root


class NoWayError(StoreError):
    """A version cannot be built from the blobs on disk."""


class OffChainError(DefectError):
    """A head is not, or no longer, on the chain.

    A grant may abandon heads at any moment.
    """

    def __init__(self) -> None:
        super().__init__("only a head of the chain can be held", advice="keep it first")


class VersionArchive:
    """The chain and its blobs."""

    def __init__(self, flat: FlatLayout, blobs: BlobDir, journal: ChainLog) -> None:
        self.flat = flat
        self.blobs = blobs
        self.journal = journal
        self._whole = set[bytes]()
        """Tables known to have all their frames: a new check would look at every file."""
        self._lost = 0
        self._checking = threading.Lock()
        """Held while a table is found whole, or blobs go: else one that goes counts as whole."""

    def missing(self, route: Route) -> list[tuple[bytes, int | None]]:
        """Return blobs that a route lacks, with sizes; first its table alone.

        Other blobs are known once the table is there.
        """
        table = read_table(self.blobs, route)
        if table is None:
            return [(route.table, None)]
        return [(frame.blob, frame.size) for frame in missing_frames(self.blobs, table)]

    def is_whole(self, route: Route) -> bool:
        """Return whether the table and every frame of a route are here."""
        with self._checking:
            if self._lost != self.blobs.lost:  # some file was damaged: of which table, nobody knows
                self._lost = self.blobs.lost
                self._whole.clear()
            if route.table not in self._whole:
                if self.missing(route):
                    return False
                self._whole.add(route.table)
            return True

    def names(self, head: Head) -> Iterator[bytes]:
        """Iterate over every blob of a head, as far as its tables are here."""
        yield head.message.roster
        for route in head.message.routes:
            yield from self.names_of(route)

    def names_of(self, route: Route) -> Iterator[bytes]:
        yield route.table
        table = read_table(self.blobs, route)
        yield from (frame.blob for frame in table or () if frame.size)

    def held_of(self, head: Head) -> dict[bytes, InFile]:
        """Return the blobs of a head that are here, to serve."""
        found = {blob: self.blobs.held(blob) for blob in self.names(head)}
        return {blob: held for blob, held in found.items() if held}

    def keep_only(self, needed: Collection[bytes]) -> int:
        """Remove all other blobs and their partial downloads; return the bytes freed."""
        with self._checking:
            self._whole.intersection_update(needed)
            gone = {blob: size for blob, size in self.blobs.all() if blob not in needed}
            for path in [self.blobs.path(blob) for blob in gone]:
                files.remove(path)
            for blob, path in self.blobs.drafts():
                if blob not in needed:
                    files.remove(path)
            return sum(gone.values())

    def hashes(self, head: Head) -> list[bytes]:
        """Return a version's chunk hashes from a table, checked against its root."""
        for route in head.message.routes:
            table = read_table(self.blobs, route)
            after = [frame.after for frame in table or ()]
            if after and merkle_root(after) == head.message.root:
                return after
        raise NoWayError("no table of that version is here", advice="fetch it again")

    def way(self, head_id: bytes, held: Collection[bytes] = ()) -> Way:
        """Return the cheapest way to a version over what is here."""
        way = cheapest(self.journal.known, head_id, held, self._cost)
        if way is None:
            raise NoWayError("that version cannot be built from what is here", advice="fetch it again")
        return way

    def can_build(self, head_id: bytes) -> bool:
        """Return whether a version can be built from nothing, over what is here."""
        return cheapest(self.journal.known, head_id, (), self._cost) is not None

    def _cost(self, route: Route) -> int | None:
        return route.size if self.is_whole(route) else None

    def reader(self, step: Step) -> RouteReader:
        table = read_table(self.blobs, step.route)
        if table is None:
            raise UnprovenError(
                "missing-blob", f"the table of version {step.head.message.version} is not here"
            )
        return RouteReader(self.flat, self.blobs, step, table)

    def readers(self, way: Way) -> list[RouteReader]:
        return [self.reader(step) for step in way]

    @staticmethod
    def build(readers: Sequence[RouteReader], chunk: Chunk, base: Bytes | None = None) -> Bytes:
        """Build a chunk at the end of a way."""
        for reader in readers:
            base = reader.build(chunk, base)
        if base is None:
            raise StoreError("a way without a step leads nowhere")
        return base
