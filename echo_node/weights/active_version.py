"""The active version: a head, its chunk hashes and a state file that matches them.

Chunks are compared and swapped one by one; after a failure the old ones are rebuilt from the
archive.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from typing import TypeAlias

from echo_node.errors import StoreError
from echo_node.storage.blob_dir import DamagedBlobError
from echo_node.weights import parallel
from echo_node.weights.chain_log import Head
from echo_node.weights.errors import UnprovenError
from echo_node.weights.flat_layout import Chunk
from echo_node.weights.route_reader import RouteReader, hash_of
from echo_node.weights.state_file import Bytes, StateFile
from echo_node.weights.store_layout import StoreLayout
from echo_node.weights.version_archive import NoWayError, VersionArchive
from protocol import merkle_root

log = logging.getLogger(__name__)

Build: TypeAlias = Callable[[Chunk, Bytes], Bytes]
"""Function from the current bytes of a chunk to the new ones."""


class ActiveVersion:
    """State file with the version that it should hold."""

    def __init__(self, place: StoreLayout, archive: VersionArchive, state_file: StateFile) -> None:
        self._place = place
        self._archive = archive
        self.state_file = state_file
        self.head: Head | None = None
        self.hashes: list[bytes] = []
        """Hashes of the chunks of that head's state."""
        self.torn = False
        """Whether the state file may hold something else."""

    def recover(self) -> None:
        """Recover the version that the pointer names, however the last process ended."""
        current = self._place.current()
        if current is None:
            return
        head = self._archive.journal.known.get(current)
        if head is None:
            raise StoreError(
                f"{self._place} holds a version that its own chain does not know", advice="move it away"
            )
        try:
            self.hashes = self._archive.hashes(head)
            self.head, self.torn = head, self.state_file.mark != current
            self.mend()
        except (NoWayError, DamagedBlobError) as error:
            log.warning("the weights have to be fetched again: %s", error)
            self.head, self.hashes, self.torn = None, [], False

    def proven(self, chunk: Chunk) -> Bytes:
        """Return a chunk of the active version, rebuilt if the state file is wrong there."""
        data = self.state_file.read(chunk)
        return data if hash_of(data) == self.hashes[chunk.index] else self._again(chunk)

    def swap(self, head: Head, after: list[bytes], build: Build) -> None:
        """Switch to another version: build, hash and write each chunk that differs."""
        self.mend()
        if merkle_root(after) != head.message.root:
            raise UnprovenError(
                "wrong-root", f"the chunks of version {head.message.version} have another root"
            )

        def swap_chunk(chunk: Chunk) -> None:
            at, wanted = self.state_file.read(chunk), after[chunk.index]
            found = hash_of(at)
            if found == wanted:
                return
            if self.head is not None and found != self.hashes[chunk.index]:
                at = self._again(chunk)
            made = build(chunk, at)
            if hash_of(made) != wanted:
                raise UnprovenError("wrong-after-hash", f"chunk {chunk.index} comes out as another one")
            self.state_file.write(chunk, made.data)

        self.state_file.about_to_change()
        self.torn = True
        try:
            parallel.each(swap_chunk, self._archive.flat.chunks)
            self._place.flip(head.id)
        except BaseException:
            with suppress(StoreError, UnprovenError):  # it is tried again before the state is used
                self.mend()
            raise
        self.head, self.hashes, self.torn = head, after, False

    def mend(self) -> None:
        """Rebuild chunks that are wrong after a failure, and restore the pointer."""
        if not self.torn:
            return
        if self.head is not None and self._place.current() != self.head.id:
            self._place.flip(self.head.id)
        if self.head is not None and (wrong := self.wrong()):
            self.state_file.about_to_change()
            readers = self._passages()
            parallel.each(
                lambda chunk: self.state_file.write(chunk, self._archive.build(readers, chunk).data), wrong
            )
        self.torn = False

    def wrong(self) -> list[Chunk]:
        """Return the chunks whose bytes do not have their hash; reads all of them."""
        chunks = self._archive.flat.chunks
        found = parallel.each(lambda chunk: hash_of(self.state_file.read(chunk)), chunks)
        return [chunk for chunk in chunks if found[chunk.index] != self.hashes[chunk.index]]

    def close(self) -> None:
        self.state_file.close(self.head.id if self.head and not self.torn else None)

    def _again(self, chunk: Chunk) -> Bytes:
        """Rebuild a chunk of the active version from the archive alone."""
        return self._archive.build(self._passages(), chunk)

    def _passages(self) -> list[RouteReader]:
        if self.head is None:
            raise StoreError("no version is held")
        return self._archive.readers(self._archive.way(self.head.id))
