"""Blobs by their hash, from whoever has them: many sources at once, resumed where it stopped, proven before it is given.

    data = await blobs.fetch([Want(blob, size)], named=[peer])
    paths = await blobs.fetch_to(folder, wants)

Rounds follow one another as long as they get somewhere; each asks anew who holds what is left. It knows no tables.
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
from echo_node.net.blobs.download import Download, DownloadSettings, Progress
from echo_node.net.blobs.drafts import FileDraft, MemoryDraft, SmallFileDraft, held_in
from echo_node.net.blobs.holders import Holders, Holdings, Want
from echo_node.net.blobs.pieces import turns
from echo_node.net.blobs.reading import Reader
from echo_node.net.blobs.sources import Sources
from echo_node.net.blobs.wholes import Whole
from echo_node.net.throttle import Throttle
from protocol import limits

MEMORY_BYTES: Final = 1024**3
"""What may be fetched into memory at once, unless the caller knows better."""
LARGE_AT_ONCE: Final = 64
"""Blobs of several pieces that are fetched together: each has files open."""
LOOK_UP_FROM: Final = limits.READ_BYTES
"""Less than one read is had from those that the caller names, if they have it; for more, others are looked up meanwhile."""

MakeWhole: TypeAlias = Callable[[bytes, int], Awaitable[Whole]]


@dataclass(frozen=True, slots=True)
class _Asked:
    """What a caller said beside what it wants: whom to ask, where to look, whom to tell."""

    named: tuple[bytes, ...]
    under: tuple[bytes, ...]
    progress: Callable[[Progress], None]
    arrived: Callable[[bytes], None] = lambda _blob: None


class Blobs:
    """One node's downloads. They share what is known of sources, and the limit on the downlink."""

    def __init__(
        self,
        network: Network,
        *,
        sources: Sources | None = None,
        settings: DownloadSettings | None = None,
        downlink: Throttle | None = None,
        luck: random.Random | None = None,
    ) -> None:
        self._network = network
        self._luck = luck or random.Random()  # noqa: S311 - spreads load, keeps no secret
        self.sources = sources or Sources(self._luck)
        self._settings = settings or DownloadSettings()
        self.downlink = downlink or Throttle()
        self._reader = Reader(network, self.sources, self.downlink)
        self._holders = Holders(network, self.sources)
        self.asked_again = 0
        """Pieces that the end-game asked of a second source, so far."""

    async def fetch(
        self,
        wants: Iterable[Want],
        *,
        named: Collection[bytes] = (),
        under: Collection[bytes] = (),
        progress: Callable[[Progress], None] | None = None,
        most: int = MEMORY_BYTES,
    ) -> dict[bytes, bytes]:
        """The blobs, in memory, together of at most so many bytes.

        `named` are peers that should have them; others are looked up where it pays, by the blobs `under` which they are
        announced if it is not by each of them.
        """
        drafts: dict[bytes, MemoryDraft] = {}

        async def make(blob: bytes, size: int) -> Whole:
            if sum(len(draft.data) for draft in drafts.values()) + size > most:
                raise PeerError(
                    f"blobs of more than {most} bytes together", advice="fetch them into a folder"
                )
            await trio.lowlevel.checkpoint()
            drafts[blob] = MemoryDraft(size)
            return Whole(blob, size, drafts[blob])

        asked = _Asked(tuple(named), tuple(under), progress or _nobody_looks)
        await self._all(_distinct(wants), asked, make)
        return {blob: bytes(draft.data) for blob, draft in drafts.items()}

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
        """The blobs, each in a file of the folder that bears its id. What is there already is not fetched again.

        `arrived` is told of each that is whole, while others are still under way.
        """
        wanted = _distinct(wants)
        paths = {want.blob: folder / want.blob.hex() for want in wanted}

        def here() -> set[bytes]:
            folder.mkdir(parents=True, exist_ok=True)
            return {want.blob for want in wanted if held_in(folder, want.blob)}

        def begin(blob: bytes, size: int) -> Whole:
            small = size <= limits.READ_BYTES
            draft = SmallFileDraft(folder, blob, size) if small else FileDraft(folder, blob, size)
            whole = Whole(blob, size, draft)
            whole.resume()
            return whole

        async def make(blob: bytes, size: int) -> Whole:
            return await trio.to_thread.run_sync(begin, blob, size)

        found = await trio.to_thread.run_sync(here)
        left = [want for want in wanted if want.blob not in found]
        asked = _Asked(tuple(named), tuple(under), progress or _nobody_looks, arrived or _nobody_waits)
        await self._all(left, asked, make)
        return paths

    async def held(self, wants: Iterable[Want], named: Collection[bytes]) -> frozenset[bytes]:
        """Which of the blobs these peers say that they hold: one question to each, and nobody is looked up."""
        found = await self._holders.gather(_distinct(wants), named, look_up=False)
        return frozenset(found.sizes)

    async def _all(self, wants: list[Want], asked: _Asked, make: MakeWhole) -> None:
        """Chunk by chunk; who had some of the last is asked for the next as well."""
        known = dict.fromkeys(asked.named)
        look_up = not known
        total, done = sum(want.size or 0 for want in wants), 0

        def tell(progress: Progress) -> None:
            asked.progress(
                Progress(done + progress.done, max(total, done + progress.total), progress.sources)
            )

        for chunk in _chunks(wants):
            wholes: dict[bytes, Whole] = {}
            each = _Asked(tuple(known), asked.under, tell, asked.arrived)
            try:
                known |= dict.fromkeys(await self._chunk(chunk, each, make, wholes, look_up=look_up))
            finally:
                for whole in wholes.values():
                    whole.draft.close()
            done += sum(whole.size for whole in wholes.values())
            look_up = False

    async def _chunk(
        self,
        wants: list[Want],
        asked: _Asked,
        make: MakeWhole,
        wholes: dict[bytes, Whole],
        *,
        look_up: bool,
    ) -> set[bytes]:
        """Round after round, until all is here. Who helped."""
        left, helped = wants, set[bytes]()
        pauses = iter(self._settings.round_pauses)
        while left:
            before = self._standing(wholes)
            holdings = await self._holders.gather(
                left, (*asked.named, *helped), look_up=look_up, under=asked.under
            )
            helped |= holdings.by_peer.keys()
            for blob, size in holdings.sizes.items():
                await _prepare(wholes, blob, size, make)
            await self._round(wholes, holdings, asked)
            left = [want for want in left if want.blob not in wholes or not wholes[want.blob].settled]
            if left and look_up and self._standing(wholes) == before:
                if (pause := next(pauses, None)) is None:
                    raise PeerError(
                        f"{len(left)} of {len(wants)} blobs cannot be had from anybody now",
                        advice="what did arrive in a folder is kept there; try again later",
                    )
                await trio.sleep(pause * self._luck.uniform(0.5, 1.5))
            look_up = True
        return helped

    async def _round(
        self,
        wholes: dict[bytes, Whole],
        holdings: Holdings,
        asked: _Asked,
    ) -> None:
        here = sum(whole.size for whole in wholes.values() if whole.settled)
        download = Download(
            self._network,
            self.sources,
            self._reader,
            self._settings,
            [whole for whole in wholes.values() if not whole.settled],
            holdings.by_peer,
            luck=self._luck,
            progress=lambda now: asked.progress(Progress(here + now.done, here + now.total, now.sources)),
            arrived=asked.arrived,
        )
        try:
            if len(wholes) > 1:
                download.board.turn = turns(wholes, self._network.public, holdings.asked)
            if download.board.left_bytes > LOOK_UP_FROM and (asked.named or len(wholes) > 1):
                await download.run(lambda: self._renew(download, wholes, asked, holdings.asked))
            else:
                await download.run()
        finally:
            self.asked_again += download.board.asked_again

    async def _renew(
        self, download: Download, wholes: dict[bytes, Whole], asked: _Asked, peers: tuple[bytes, ...]
    ) -> None:
        """Look up further holders, and ask again and again who has what is left: others are downloading it, too."""
        look_up = bool(asked.named)  # else it was done before
        while True:
            if not look_up:
                await trio.sleep(self._settings.renew_seconds * self._luck.uniform(0.75, 1.25))
            left = [Want(whole.blob, whole.size) for whole in wholes.values() if not whole.settled]
            try:
                holdings = await self._holders.gather(left, peers, look_up=look_up, under=asked.under)
            except RequestError:
                return  # this node has left the network, which the download notices by itself
            download.renew(holdings.by_peer)
            peers, look_up = tuple(dict.fromkeys((*peers, *holdings.asked))), False

    def _standing(self, wholes: dict[bytes, Whole]) -> tuple[int, ...]:
        """What a round changes if it gets anywhere: what is here, what is proven, and who is known to lie."""
        lies = sum(faults.get("wrong-blob", 0) for faults in self.sources.faults().values())
        here = sum(len(whole.pieces) - len(whole.missing()) for whole in wholes.values())
        return here, sum(whole.settled for whole in wholes.values()), lies


async def _prepare(wholes: dict[bytes, Whole], blob: bytes, size: int, make: MakeWhole) -> None:
    """Have a draft for a blob, of the size that it seems to have, with what is there from earlier."""
    known = wholes.get(blob)
    if known is not None and known.size == size:
        return
    if known is not None:
        known.draft.close()
    wholes[blob] = await make(blob, size)


def _chunks(wants: list[Want]) -> Iterator[list[Want]]:
    """Wants in lists that one question may carry, with as many large ones as there may be files open."""
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


def _nobody_looks(_progress: Progress) -> None:
    return


def _nobody_waits(_blob: bytes) -> None:
    return
