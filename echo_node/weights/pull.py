"""Follow the chain: from the state that is held to the one that is wanted, by the cheapest way that somebody can give.

Heads are heard (`hearing`), a way is planned over them (`routes`), its tables and frames are fetched straight into the
store's folder from whoever has them (`net/blobs`), the store proves and takes each step, and what was fetched is
offered to others while the rest is still under way (`offering`). What is too old goes (`settling`). It knows no engine, and
no rule of the chain.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Final, TypeVar

import trio

from echo_node.errors import PeerError, StoreError
from echo_node.net.base import Network
from echo_node.net.blobs.blobs import Blobs
from echo_node.net.blobs.bulk import BulkPort
from echo_node.net.blobs.download import DownloadSettings
from echo_node.net.blobs.download import Progress as Fetched
from echo_node.net.blobs.holders import Want
from echo_node.net.blobs.shelf import InFile
from echo_node.net.throttle import Throttle, Uplink
from echo_node.weights.blobfolder import DamagedBlobError
from echo_node.weights.handing import opened
from echo_node.weights.hearing import Hearing
from echo_node.weights.journal import Head
from echo_node.weights.leased import Leased
from echo_node.weights.offering import Offering
from echo_node.weights.planning import TABLE_ROW_BYTES, Planning
from echo_node.weights.progress import Pulling, Pulls
from echo_node.weights.refusal import UnprovenError
from echo_node.weights.routes import Step, Way
from echo_node.weights.settling import Settling
from echo_node.weights.store import WeightsStore
from echo_node.weights.taking import take_way
from echo_node.weights.truth import OffChainError
from protocol import Roster, Route, decode, limits, peer_id

log = logging.getLogger(__name__)
T = TypeVar("T")

SMALL_BYTES: Final = limits.READ_BYTES
"""A step of at most so many bytes is fetched in one go, through memory."""
PEERS_NAMED: Final = 12
"""Connected peers that are asked for something large."""
FALLBACKS: Final = 8
"""Versions before the newest that are tried where that one cannot be had."""
LONG_WAY: Final = 3
"""Steps from which on a way is asked about before anything of it is fetched: who follows closely needs one or two."""
TABLE_REST_BYTES: Final = 256
"""What a table has beside its rows, more than enough."""
SETTINGS: Final = DownloadSettings(
    sources=7, span=SMALL_BYTES, least_span=SMALL_BYTES, renew_seconds=0.5, round_pauses=(0.2, 1.0)
)
"""Sources are asked for half a frame at a time: the sooner a frame is whole, the sooner it is passed on."""
VERSIONS: Final = limits.STALENESS + 2
"""As many as are of use in any run: those that groups may be drawn under, the newest, and one to spare."""
QUICK: Final = DownloadSettings(round_pauses=())


class Puller:
    """One node's view of the chain, and its way along it."""

    def __init__(
        self,
        network: Network,
        store: WeightsStore,
        *,
        blobs: Blobs | None = None,
        named: Collection[bytes] = (),
        uplink: Uplink | None = None,
        downlink: Throttle | None = None,
        port: BulkPort | None = None,
        tell: Callable[[Pulling], None] | None = None,
        files: Mapping[bytes, InFile] | None = None,
        versions: int = VERSIONS,
    ) -> None:
        """`named` are peers that may have weights, besides the leader and those who announce them; `files` are given too.

        The last `versions` can be built from what is kept.
        """
        self._network = network
        self.store = store
        self._blobs = blobs or Blobs(network, settings=SETTINGS, downlink=downlink)
        self._quick = Blobs(
            network, sources=self._blobs.sources, settings=QUICK, downlink=self._blobs.downlink
        )
        self._named = tuple(named)
        self._tell = tell or (lambda _now: None)
        self._one = trio.Lock()
        self._settling = Settling(store, versions)
        self._moved = trio.Event()
        self._moved.set()  # an earlier process may have left more than is needed
        self._planning = Planning(store)
        self.hearing = Hearing(network, store)
        self.offering = Offering(network, store, uplink=uplink, port=port, files=files or {})
        self.pulls = Pulls()
        """For metrics: what was pulled so far."""

    @asynccontextmanager
    async def work(self) -> AsyncGenerator[None]:
        """Hear, ask and serve until the context is left."""
        async with self.offering.serve(), trio.open_nursery() as nursery:
            nursery.start_soon(self.hearing.follow)
            nursery.start_soon(self._settle)
            yield
            nursery.cancel_scope.cancel()

    @property
    def held(self) -> Head | None:
        """The head whose weights are here."""
        return self.store.tip

    async def pull(self, to: bytes | None = None) -> Head:
        """Hold the state of a head of the chain, or of the newest: all of it, proven, or an error and what was held before.

        A way that nobody can give, or that lies, is planned again without it.
        """
        async with self._one:
            target = self.hearing.tip if to is None else self.hearing.find(to)
            if target is None:
                raise PeerError(
                    "no head of the chain has been heard yet" if to is None else "that head was not heard of",
                    advice="ask a peer that knows it",
                )
            self._check_forwards(target)
            try:
                await self._reach(target)
            except PeerError:
                if to is None:
                    await self._reach_before(target)
                raise
            return target

    async def _reach(self, target: Head) -> None:
        without = set[bytes]()
        while (held := self.held) is None or held.id != target.id:
            way = await self._possible(target, without)
            try:
                failed = await self._follow(way)
            except DamagedBlobError:
                continue  # it is gone, and fetched like all that is not here
            except OffChainError as error:
                what = f"version {target.message.version} was left by a grant while it was fetched"
                raise PeerError(what, advice="follow the newest head") from error
            if failed is not None:
                without.add(failed.table)
                self._check_worthwhile(target)

    async def _possible(self, target: Head, without: Collection[bytes]) -> Way:
        """The cheapest way whose tables somebody near says to have. Much of a long one may be pruned everywhere, and to
        search for each part of it takes so long that a fast chain is never caught up with.
        """
        way, gone = self._planning.plan(target, without), set[bytes]()
        while len(way) >= LONG_WAY and (missing := self._missing_tables(way)):
            lacking = await self._not_near(missing, target)
            gone |= lacking
            other = self._planning.find(target, {*without, *gone}) if lacking else None
            if other is None:  # it can be had; or every way has to be searched for
                break
            way = other
        return way

    def _missing_tables(self, way: Way) -> list[bytes]:
        """The tables of a way that are not here."""
        return [step.route.table for step in way if not self.store.blobs.has(step.route.table)]

    async def _not_near(self, tables: Collection[bytes], target: Head) -> set[bytes]:
        """Those that neither the leader has nor, failing that, anybody who is connected."""
        lacking, named = set(tables), self._sources(target)
        for peers in (named, self._wider(named)):
            if lacking:
                lacking -= await self._blobs.held([Want(table) for table in lacking], peers)
        return lacking

    def _check_worthwhile(self, target: Head) -> None:
        """Whether there is no version so much newer that nobody needs this one by the time it is here."""
        newest = self.hearing.tip
        if newest is not None and newest.message.version > target.message.version + FALLBACKS:
            raise PeerError(
                f"version {target.message.version} was overtaken by version {newest.message.version} while it was fetched",
                advice="follow the newest head",
            )

    async def _reach_before(self, target: Head) -> None:
        """The last good version, where the newest cannot be had."""
        newer = self.store.follower.heads[-1 - FALLBACKS : -1]
        if self.held is not None:
            newer = tuple(head for head in newer if head.message.version > self.held.message.version)
        for head in reversed(newer):
            with suppress(PeerError):
                await self._reach(head)
                return
        log.warning("version %d cannot be had, nor one shortly before it", target.message.version)

    async def buildable(self, heads: Sequence[Head]) -> list[Head]:
        """Those of these heads whose states are here, or can be built from what is."""

        def is_here(head: Head) -> bool:
            return head == self.held or self.store.truth.can_build(head.id)

        async with self._one:
            return await trio.to_thread.run_sync(lambda: [*filter(is_here, heads)])

    async def use(self, head: Head, take: Callable[[Leased], T]) -> T:
        """Have the state of a head, and give it to `take`, in a thread. It is good only within that call."""

        def held() -> T:
            with opened(self.store, head.id) as lease:
                return take(lease)

        if not self._is_past(head):
            await self.pull(head.id)
        return await trio.to_thread.run_sync(held)

    async def roster(self, head: Head) -> Roster:
        """Who may sample under a head."""
        return decode(Roster, await self.named(head, head.message.roster, limits.ROSTER_BYTES))

    async def named(self, head: Head, blob: bytes, most: int) -> bytes:
        """A blob of at most so many bytes that a head names; from now on it is in the store."""
        with suppress(DamagedBlobError):
            if self.store.blobs.has(blob):
                return await trio.to_thread.run_sync(self.store.blobs.read, blob, most)
        await self._fetch([Want(blob, most=most)], head, ())
        return await trio.to_thread.run_sync(self.store.blobs.read, blob, most)

    def _is_past(self, head: Head) -> bool:
        """Whether a later version of the chain is held: one of a branch that was left leads back to nothing of the new one."""
        held = self.held
        return held is not None and held.message.version > head.message.version and self._is_on_chain(held)

    def _check_forwards(self, target: Head) -> None:
        if self._is_past(target) and self.held is not None:
            raise StoreError(
                f"version {self.held.message.version} is held, which follows version {target.message.version}",
                advice="an older state is built beside it, by `use`",
            )

    def _is_on_chain(self, head: Head) -> bool:
        return any(head.id == each.id for each in reversed(self.store.follower.heads))

    # Fetching

    async def _follow(self, way: Way) -> Route | None:
        """Fetch what a way needs, and take its steps. The route that failed, if one did."""
        self._say("tables", way[-1].head, 0, 0)
        tables = self._missing_tables(way)
        most = TABLE_ROW_BYTES * len(self.store.flat.chunks) + TABLE_REST_BYTES
        wants = [Want(table, most=most) for table in tables]
        missing = await self._fetched(wants, way[-1].head, tables)
        for step in way:
            if missing and not self.store.blobs.has(step.route.table):
                return step.route
            if not await self._table_is_honest(step):
                return step.route
            self.offering.announce(step.route.table)
        frames = await trio.to_thread.run_sync(self._frames, way)
        missing = await self._fetched(frames, way[-1].head, [step.route.table for step in way])
        for step in way:
            if missing and self.store.missing(step.route):
                return step.route
        return await self._advance(way)

    def _frames(self, way: Way) -> list[Want]:
        return [Want(blob, size) for step in way for blob, size in self.store.missing(step.route)]

    async def _fetched(self, wants: Sequence[Want], head: Head, tables: Sequence[bytes]) -> bool:
        """Fetch blobs. True, if some cannot be had."""
        if wants:
            try:
                await self._fetch(wants, head, tables)
            except PeerError as error:
                log.warning("on the way to version %d: %s", head.message.version, error)
                return True
        return False

    async def _fetch(self, wants: Sequence[Want], head: Head, tables: Sequence[bytes]) -> None:
        """Little is had from the leader and whoever else was named, in one go; much, from everybody who has some."""
        named = self._sources(head)
        size = sum(want.size or 0 for want in wants)
        if size <= SMALL_BYTES:
            try:
                found = await self._quick.fetch(wants, named=named)
            except PeerError:
                found = await self._blobs.fetch(wants, named=self._wider(named), under=tables)
            await trio.to_thread.run_sync(self._put, list(found.values()))
            self.pulls.bytes += sum(map(len, found.values()))
            return
        await self._blobs.fetch_to(
            self.store.blobs.folder,
            wants,
            named=self._wider(named),
            under=tables,
            progress=lambda now: self._say_fetched(head, now),
        )
        self.pulls.bytes += size

    def _put(self, blobs: list[bytes]) -> None:
        for data in blobs:
            self.store.blobs.put(data)
        self.store.blobs.sync()

    def _sources(self, head: Head) -> list[bytes]:
        """The leader, and whoever else was named."""
        return [peer for peer in dict.fromkeys((head.signer, *self._named)) if peer != self._network.public]

    def _wider(self, named: Sequence[bytes]) -> list[bytes]:
        """Whom to ask before those who announced it are found: who was named, and some who are connected."""
        connected = [peer for peer in self._network.peers() if peer not in named]
        return [*named, *connected[: max(0, PEERS_NAMED - len(named))]]

    # Taking

    async def _table_is_honest(self, step: Step) -> bool:
        """Whether a table that is here is the one that the head describes: checked before its frames are fetched."""

        def check() -> None:
            try:
                self.store.truth.passage(step)
            except UnprovenError as error:
                if error.reason != "missing-blob":
                    raise

        return await self._proven(step, check)

    async def _advance(self, way: Way) -> Route | None:
        """Take a way as one step, so that what is held never goes back on the way forwards. The route that lied, if any."""
        self._say("applying", way[-1].head, 0, 0)
        lied: list[Step] = []
        if await self._proven(way[-1], lambda: take_way(self.store, way, lied), lied):
            self.pulls.versions += 1
            self._moved.set()
            for route in way[-1].head.message.routes:
                self.offering.announce_held(route.table)
            return None
        return (lied or way)[-1].route

    async def _proven(self, step: Step, check: Callable[[], None], lied: Sequence[Step] = ()) -> bool:
        """Run a check of the store. What it refuses was signed: the lie is the signer's, whoever sent the bytes."""
        try:
            await trio.to_thread.run_sync(check)
        except UnprovenError as error:
            step = lied[0] if lied else step
            version = step.head.message.version
            self._planning.refused[step.route.table] = error
            self.pulls.refused[error.reason] += 1
            self._network.score(step.head.signer, error.reason)
            log.warning(
                "version %d, signed by %s, is not what its head says: %s",
                version,
                peer_id(step.head.signer),
                error,
            )
            return False
        return True

    async def _settle(self) -> None:
        """After each version: let go of what is too old. Meanwhile nothing is pulled, and what is held can be used."""
        while True:
            await self._moved.wait()
            self._moved = trio.Event()
            async with self._one:
                try:
                    await trio.to_thread.run_sync(self._settling.settle)
                except (StoreError, UnprovenError) as error:
                    log.warning("old versions stay on disk for now: %s", error)

    # Telling

    def _say_fetched(self, head: Head, now: Fetched) -> None:
        self._say("fetching", head, now.done, now.total, now.sources)

    def _say(self, what: str, head: Head, done: int, total: int, sources: int = 0) -> None:
        self._tell(Pulling(what, head.message.version, done, total, sources))
