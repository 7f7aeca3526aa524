"""The one version that is held whole: a head, the hashes of its chunks, and a scratch file that is made to fit them.

Chunks are compared and swapped one by one; when anything fails on the way, the old ones are built again from the truth.
It knows neither threads that wait nor where blobs come from.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from typing import TypeAlias

from echo_node.errors import StoreError
from echo_node.weights import parallel
from echo_node.weights.blobfolder import DamagedBlobError
from echo_node.weights.flat import Chunk
from echo_node.weights.journal import Head
from echo_node.weights.passage import Passage, hash_of
from echo_node.weights.refusal import UnprovenError
from echo_node.weights.scratch import Bytes, Scratch
from echo_node.weights.storefolder import StoreFolder
from echo_node.weights.truth import NoWayError, Truth
from protocol import merkle_root

log = logging.getLogger(__name__)

Build: TypeAlias = Callable[[Chunk, Bytes], Bytes]
"""From a chunk as it is to the chunk as it shall be."""


class HeldState:
    """What is in the scratch file, and what it ought to be."""

    def __init__(self, place: StoreFolder, truth: Truth, scratch: Scratch) -> None:
        self._place = place
        self._truth = truth
        self.scratch = scratch
        self.head: Head | None = None
        self.hashes: list[bytes] = []
        """Of the chunks of that head's state."""
        self.torn = False
        """Whether the scratch may be something else than that."""

    def recover(self) -> None:
        """Be at the version that the pointer names, as it was when the last process ended, however that was."""
        current = self._place.current()
        if current is None:
            return
        head = self._truth.journal.known.get(current)
        if head is None:
            raise StoreError(
                f"{self._place} holds a version that its own chain does not know", advice="move it away"
            )
        try:
            self.hashes = self._truth.hashes(head)
            self.head, self.torn = head, self.scratch.mark != current
            self.mend()
        except (NoWayError, DamagedBlobError) as error:
            log.warning("the weights have to be fetched again: %s", error)
            self.head, self.hashes, self.torn = None, [], False

    def proven(self, chunk: Chunk) -> Bytes:
        """A chunk of the version that is held, right even where something else has written into the scratch."""
        data = self.scratch.read(chunk)
        return data if hash_of(data) == self.hashes[chunk.index] else self._again(chunk)

    def swap(self, head: Head, after: list[bytes], build: Build) -> None:
        """Go to another version: each chunk that is not there yet is built from the one that is, hashed, and written."""
        self.mend()
        if merkle_root(after) != head.message.root:
            raise UnprovenError(
                "wrong-root", f"the chunks of version {head.message.version} have another root"
            )

        def swap_chunk(chunk: Chunk) -> None:
            at, wanted = self.scratch.read(chunk), after[chunk.index]
            found = hash_of(at)
            if found == wanted:
                return
            if self.head is not None and found != self.hashes[chunk.index]:
                at = self._again(chunk)
            made = build(chunk, at)
            if hash_of(made) != wanted:
                raise UnprovenError("wrong-after-hash", f"chunk {chunk.index} comes out as another one")
            self.scratch.write(chunk, made.data)

        self.scratch.about_to_change()
        self.torn = True
        try:
            parallel.each(swap_chunk, self._truth.flat.chunks)
            self._place.flip(head.id)
        except BaseException:
            with suppress(StoreError, UnprovenError):  # it is tried again before the state is used
                self.mend()
            raise
        self.head, self.hashes, self.torn = head, after, False

    def mend(self) -> None:
        """Build those chunks again that are not what they ought to be, if there may be any, and point to them again."""
        if not self.torn:
            return
        if self.head is not None and self._place.current() != self.head.id:
            self._place.flip(self.head.id)
        if self.head is not None and (wrong := self.wrong()):
            self.scratch.about_to_change()
            passages = self._passages()
            parallel.each(
                lambda chunk: self.scratch.write(chunk, self._truth.build(passages, chunk).data), wrong
            )
        self.torn = False

    def wrong(self) -> list[Chunk]:
        """Chunks that are not what they ought to be, read again one and all."""
        chunks = self._truth.flat.chunks
        found = parallel.each(lambda chunk: hash_of(self.scratch.read(chunk)), chunks)
        return [chunk for chunk in chunks if found[chunk.index] != self.hashes[chunk.index]]

    def close(self) -> None:
        self.scratch.close(self.head.id if self.head and not self.torn else None)

    def _again(self, chunk: Chunk) -> Bytes:
        """A chunk of the version that is held, from nothing but the truth."""
        return self._truth.build(self._passages(), chunk)

    def _passages(self) -> list[Passage]:
        if self.head is None:
            raise StoreError("no version is held")
        return self._truth.passages(self._truth.way(self.head.id))
