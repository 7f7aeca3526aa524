"""Find peers that hold wanted blobs: the named ones, and those found in the DHT.

A size that contradicts the wanted one, or exceeds its bound, is refused before a byte is fetched.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import trio

from echo_node.net.base import Network, RequestError
from echo_node.net.blobs.source_stats import SourceStats
from protocol import ProtocolError, decode, encode, limits, topics
from protocol.blob import BlobHoldings, BlobWants
from protocol.errors import InconsistentError

ASK_SECONDS: Final = 10.0
"""Deadline of one question."""
CANDIDATES: Final = 16
"""Most peers asked what they hold."""
LOOKUPS: Final = 3
"""Blobs looked up in the DHT: a peer with some of a table has most of it."""


@dataclass(frozen=True, slots=True)
class Want:
    """A wanted blob, of this size if that is known, or else of at most `most` bytes."""

    blob: bytes
    size: int | None = None
    most: int = limits.FRAME_BYTES


@dataclass(frozen=True, slots=True)
class Holdings:
    """Which peers hold which of the wanted blobs, and the blobs' sizes."""

    by_peer: dict[bytes, frozenset[bytes]]
    sizes: dict[bytes, int]
    asked: tuple[bytes, ...] = ()
    """Peers that were asked, and may hold some of it later."""


class BlobProviders:
    """Finds holders of blobs, for one node."""

    def __init__(self, network: Network, sources: SourceStats) -> None:
        self._network = network
        self._sources = sources

    async def gather(
        self, wants: Sequence[Want], named: Collection[bytes], *, look_up: bool, under: Collection[bytes] = ()
    ) -> Holdings:
        """Ask the named peers what they hold; with `look_up` also those of the DHT.

        `under` are the keys looked up instead of each blob, such as the table of many frames.
        """
        candidates = dict.fromkeys(named)
        if look_up:
            keys = list(under) or [want.blob for want in wants]
            candidates |= dict.fromkeys(await self._look_up(keys[:LOOKUPS]))
        candidates.pop(self._network.public, None)
        asked = self._sources.in_order(candidates)[:CANDIDATES]
        reported: dict[bytes, dict[bytes, int]] = {}

        async def ask(peer: bytes) -> None:
            reported[peer] = await self._ask(peer, wants)

        with _one_error():
            async with trio.open_nursery() as nursery:
                for peer in asked:
                    nursery.start_soon(ask, peer)
        found = _majority_sizes(wants, {peer: reported[peer] for peer in asked})
        return Holdings(found.by_peer, found.sizes, tuple(asked))

    async def _look_up(self, blobs: Sequence[bytes]) -> list[bytes]:
        found: list[bytes] = []

        async def find(blob: bytes) -> None:
            found.extend(await self._network.find(topics.blob_key(blob), CANDIDATES))

        with _one_error():
            async with trio.open_nursery() as nursery:
                for blob in blobs:
                    nursery.start_soon(find, blob)
        return found

    async def _ask(self, peer: bytes, wants: Sequence[Want]) -> dict[bytes, int]:
        found: dict[bytes, int] = {}
        for at in range(0, len(wants), limits.WANTS):
            batch = wants[at : at + limits.WANTS]
            try:
                answer = await self._network.request(
                    peer,
                    topics.WANTS_STREAM,
                    encode(BlobWants.of(want.blob for want in batch)),
                    deadline=ASK_SECONDS,
                    most=limits.SMALL_BYTES,
                )
                found |= self._plausible(peer, batch, decode(BlobHoldings, answer).sizes)
            except RequestError as error:
                if error.reason == "left":
                    raise
                self._sources.fault(peer, "stalled" if error.reason == "deadline" else "gone")
                break
            except ProtocolError:
                self._sources.fault(peer, "refused")
                break
        return found

    def _plausible(
        self, peer: bytes, wants: Sequence[Want], sizes: tuple[int | None, ...]
    ) -> dict[bytes, int]:
        if len(sizes) != len(wants):
            raise InconsistentError(f"sizes of {len(sizes)} blobs, not of {len(wants)}", "sizes")
        found = {}
        for want, size in zip(wants, sizes, strict=True):
            if size is None:
                continue
            if size > want.most if want.size is None else size != want.size:
                self._sources.fault(peer, "wrong-size")
            else:
                found[want.blob] = size
        return found


@contextmanager
def _one_error() -> Generator[None]:
    """Raise the first of several equal errors: this node has left the network."""
    try:
        yield
    except* RequestError as group:
        failure = group.exceptions[0]
    else:
        return
    raise failure


def _majority_sizes(wants: Sequence[Want], reported: dict[bytes, dict[bytes, int]]) -> Holdings:
    """Return holders of each blob at the size that most of its holders report."""
    sizes: dict[bytes, int] = {}
    for want in wants:
        votes = Counter(held[want.blob] for held in reported.values() if want.blob in held)
        if votes:
            sizes[want.blob] = votes.most_common(1)[0][0]
    by_peer = {
        peer: frozenset(blob for blob, size in held.items() if size == sizes[blob])
        for peer, held in reported.items()
    }
    return Holdings({peer: held for peer, held in by_peer.items() if held}, sizes)
