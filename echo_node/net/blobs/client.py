"""Fetch blobs by their hash from several peers, resumable and verified.

    data = await blobs.fetch([Want(blob, size)], named=[peer])
    paths = await blobs.fetch_to(folder, wants)

Rounds follow one another as long as they make progress; each asks anew who holds what is left.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

import trio

from echo_node.errors import PeerError
from echo_node.net.base import Network, RequestError
from echo_node.net.blobs.assembly import BlobAssembly
from echo_node.net.blobs.multi_source_download import Download, DownloadSettings, Progress
from echo_node.net.blobs.partial_blob import FilePartialBlob, MemoryPartialBlob, SmallFilePartialBlob, held_in
from echo_node.net.blobs.piece_reader import Reader
from echo_node.net.blobs.piece_scheduler import turns
from echo_node.net.blobs.providers import BlobProviders, Holdings, Want
from echo_node.net.blobs.source_stats import SourceStats
from echo_node.net.rate_limit import Throttle
from protocol import limits

MEMORY_BYTES: Final = 1024**3
"""Default bound in bytes for one fetch into memory."""
LARGE_AT_ONCE: Final = 64
"""Blobs of several pieces fetched at once: each has files open."""
LOOK_UP_FROM: Final = limits.READ_BYTES
"""Bytes above which providers are looked up in the DHT beside the named peers."""

MakeAssembly: TypeAlias = Callable[[bytes, int], Awaitable[BlobAssembly]]


@dataclass(frozen=True, slots=True)
class _FetchOptions:
    """A caller's peers to ask, keys to look up, and callbacks."""

    named: tuple[bytes, ...]
    under: tuple[bytes, ...]
    progress: Callable[[Progress], None]
    arrived: Callable[[bytes], None] = lambda _blob: None


class BlobClient:
    """Downloads of one node, which share source statistics and a download limit."""

    def __init__(
        self,
        network: Network,
        *,
        sources: SourceStats | None = None,
        settings: DownloadSettings | None = None,
        downlink: Throttle | None = None,
        luck: random.Random | None = None,
    ) -> None:
        self._network = network
        self._luck = luck or random.Random()  # noqa: S311 - spreads load, keeps no secret
        self.sources = sources or SourceStats(self._luck)
        self._settings = settings or DownloadSettings()
        self.downlink = downlink or Throttle()
        self._reader = Reader(network, self.sources, self.downlink)
        self._holders = BlobProviders(network, self.sources)
        self.asked_again = 0
        """Pieces requested from a second source in the end-game, in total."""

    async def fetch(
        self,
        wants: Iterable[Want],
        *,
        named: Collection[bytes] = (),
        under: Collection[bytes] = (),
        progress: Callable[[Progress], None] | None = None,
        most: int = MEMORY_BYTES,
    ) -> dict[bytes, bytes]:
        """Fetch blobs into memory, at most `most` bytes together.

        `named` are peers that should have them. Others are looked up where it pays, by the keys in
        `under` if the blobs are not announced one by one.
        """
        partials: dict[bytes, MemoryPartialBlob] = {}

        async def make(blob: bytes, size: int) -> BlobAssembly:
            if sum(len(partial.data) for partial in partials.values()) + size > most:
                raise PeerError(
                    f"blobs of more than {most} bytes together", advice="fetch them into a folder"
                )
            await trio.lowlevel.checkpoint()
            partials[blob] = MemoryPartialBlob(size)
            return BlobAssembly(blob, size, partials[blob])

        asked = _FetchOptions(tuple(named), tuple(under), progress or _ignore_progress)
        await self._all(_distinct(wants), asked, make)
        return {blob: bytes(partial.data) for blob, partial in partials.items()}

    async def fetch_to(
        self,
        folder: Path,
        wants: Iterable[Want],
        *,
        named: Collection[bytes] = (),
        under: Collection[bytes] = (),
        progress: Callable[[Progress], None] | None = None,
        arrived: Callable[[bytes], None] | None = None,
    ) -> dict[bytes, Path]:
        """Fetch missing blobs into files of a folder, named by their ids.

        `arrived` is called with each finished blob while others are still being fetched.
        """
        wanted = _distinct(wants)
        paths = {want.blob: folder / want.blob.hex() for want in wanted}

        def here() -> set[bytes]:
            folder.mkdir(parents=True, exist_ok=True)
            return {want.blob for want in wanted if held_in(folder, want.blob)}

        def begin(blob: bytes, size: int) -> BlobAssembly:
            small = size <= limits.READ_BYTES
            partial = (
                SmallFilePartialBlob(folder, blob, size) if small else FilePartialBlob(folder, blob, size)
            )
            assembly = BlobAssembly(blob, size, partial)
            assembly.resume()
            return assembly

        async def make(blob: bytes, size: int) -> BlobAssembly:
            return await trio.to_thread.run_sync(begin, blob, size)

        found = await trio.to_thread.run_sync(here)
        left = [want for want in wanted if want.blob not in found]
        asked = _FetchOptions(
            tuple(named), tuple(under), progress or _ignore_progress, arrived or _ignore_arrival
        )
        await self._all(left, asked, make)
        return paths

    async def held(self, wants: Iterable[Want], named: Collection[bytes]) -> frozenset[bytes]:
        """Return which of the blobs these peers report to hold, without a DHT lookup."""
        found = await self._holders.gather(_distinct(wants), named, look_up=False)
        return frozenset(found.sizes)

    async def _all(self, wants: list[Want], asked: _FetchOptions, make: MakeAssembly) -> None:
        """Fetch chunk by chunk; peers that held some of one chunk are asked for the next."""
        known = dict.fromkeys(asked.named)
        look_up = not known
        total, done = sum(want.size or 0 for want in wants), 0

        def report(progress: Progress) -> None:
            asked.progress(
                Progress(done + progress.done, max(total, done + progress.total), progress.sources)
            )

        for chunk in _chunks(wants):
            assemblies: dict[bytes, BlobAssembly] = {}
            each = _FetchOptions(tuple(known), asked.under, report, asked.arrived)
            try:
                known |= dict.fromkeys(await self._chunk(chunk, each, make, assemblies, look_up=look_up))
            finally:
                for assembly in assemblies.values():
                    assembly.partial.close()
            done += sum(assembly.size for assembly in assemblies.values())
            look_up = False

    async def _chunk(
        self,
        wants: list[Want],
        asked: _FetchOptions,
        make: MakeAssembly,
        assemblies: dict[bytes, BlobAssembly],
        *,
        look_up: bool,
    ) -> set[bytes]:
        """Fetch in rounds until all is here, and return the peers that held some of it."""
        left, helped = wants, set[bytes]()
        pauses = iter(self._settings.round_pauses)
        while left:
            before = self._state(assemblies)
            holdings = await self._holders.gather(
                left, (*asked.named, *helped), look_up=look_up, under=asked.under
            )
            helped |= holdings.by_peer.keys()
            for blob, size in holdings.sizes.items():
                await _prepare(assemblies, blob, size, make)
            await self._round(assemblies, holdings, asked)
            left = [want for want in left if want.blob not in assemblies or not assemblies[want.blob].final]
            if left and look_up and self._state(assemblies) == before:
                if (pause := next(pauses, None)) is None:
                    raise PeerError(
                        f"{len(left)} of {len(wants)} blobs cannot be had from any peer now",
                        advice="pieces that arrived in a folder are kept; try again later",
                    )
                await trio.sleep(pause * self._luck.uniform(0.5, 1.5))
            look_up = True
        return helped

    async def _round(
        self,
        assemblies: dict[bytes, BlobAssembly],
        holdings: Holdings,
        asked: _FetchOptions,
    ) -> None:
        here = sum(assembly.size for assembly in assemblies.values() if assembly.final)
        download = Download(
            self._network,
            self.sources,
            self._reader,
            self._settings,
            [assembly for assembly in assemblies.values() if not assembly.final],
            holdings.by_peer,
            luck=self._luck,
            progress=lambda now: asked.progress(Progress(here + now.done, here + now.total, now.sources)),
            arrived=asked.arrived,
        )
        try:
            if len(assemblies) > 1:
                download.scheduler.turn = turns(assemblies, self._network.public, holdings.asked)
            if download.scheduler.left_bytes > LOOK_UP_FROM and (asked.named or len(assemblies) > 1):
                await download.run(lambda: self._renew(download, assemblies, asked, holdings.asked))
            else:
                await download.run()
        finally:
            self.asked_again += download.scheduler.asked_again

    async def _renew(
        self,
        download: Download,
        assemblies: dict[bytes, BlobAssembly],
        asked: _FetchOptions,
        peers: tuple[bytes, ...],
    ) -> None:
        """Look up providers repeatedly: other downloaders become providers, too."""
        look_up = bool(asked.named)  # else it was done before
        while True:
            if not look_up:
                await trio.sleep(self._settings.renew_seconds * self._luck.uniform(0.75, 1.25))
            left = [
                Want(assembly.blob, assembly.size) for assembly in assemblies.values() if not assembly.final
            ]
            try:
                holdings = await self._holders.gather(left, peers, look_up=look_up, under=asked.under)
            except RequestError:
                return  # this node has left the network, which the download notices by itself
            download.renew(holdings.by_peer)
            peers, look_up = tuple(dict.fromkeys((*peers, *holdings.asked))), False

    def _state(self, assemblies: dict[bytes, BlobAssembly]) -> tuple[int, ...]:
        """Return what progress changes: pieces here, blobs final, lies found."""
        lies = sum(faults.get("wrong-blob", 0) for faults in self.sources.faults().values())
        here = sum(len(assembly.pieces) - len(assembly.missing()) for assembly in assemblies.values())
        return here, sum(assembly.final for assembly in assemblies.values()), lies


async def _prepare(assemblies: dict[bytes, BlobAssembly], blob: bytes, size: int, make: MakeAssembly) -> None:
    """Create the assembly of a blob of the reported size, with its pieces on disk."""
    known = assemblies.get(blob)
    if known is not None and known.size == size:
        return
    if known is not None:
        known.partial.close()
    assemblies[blob] = await make(blob, size)


def _chunks(wants: list[Want]) -> Iterator[list[Want]]:
    """Split wants by what one question may carry and how many files may be open."""
    chunk: list[Want] = []
    large = 0
    for want in wants:
        is_large = (want.size or want.most) > limits.READ_BYTES
        if len(chunk) == limits.WANTS or (large == LARGE_AT_ONCE and is_large):
            yield chunk
            chunk, large = [], 0
        chunk.append(want)
        large += is_large
    if chunk:
        yield chunk


def _distinct(wants: Iterable[Want]) -> list[Want]:
    return list({want.blob: want for want in wants}.values())


def _ignore_progress(_progress: Progress) -> None:
    return


def _ignore_arrival(_blob: bytes) -> None:
    return
