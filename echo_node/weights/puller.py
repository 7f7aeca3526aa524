"""Pull versions of the chain: plan the cheapest way, fetch it, apply it.

Heads come from `chain_follower`, ways from `route_planner`; tables and frames are fetched into the
store's folder (`net/blobs`), the store proves and applies each step, and what was fetched is served
to others while the rest is under way (`seeding`). Old blobs are removed (`retention`).
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Final, TypeVar

import trio

from echo_node.errors import PeerError, StoreError
from echo_node.net.base import Network
from echo_node.net.blobs.blob_registry import InFile
from echo_node.net.blobs.client import BlobClient
from echo_node.net.blobs.multi_source_download import DownloadSettings
from echo_node.net.blobs.multi_source_download import Progress as Fetched
from echo_node.net.blobs.providers import Want
from echo_node.net.rate_limit import Throttle, UploadLimit
from echo_node.storage.blob_dir import DamagedBlobError
from echo_node.weights.chain_follower import ChainFollower
from echo_node.weights.chain_log import Head
from echo_node.weights.engine_sync import opened
from echo_node.weights.errors import UnprovenError
from echo_node.weights.progress import PullProgress, PullTotals
from echo_node.weights.retention import Retention
from echo_node.weights.route_graph import Step, Way
from echo_node.weights.route_planner import TABLE_ROW_BYTES, RoutePlanner
from echo_node.weights.seeding import WeightsSeeder
from echo_node.weights.store import WeightsStore
from echo_node.weights.version_archive import OffChainError
from echo_node.weights.weights_view import WeightsView
from protocol import Roster, Route, decode, limits, peer_id

log = logging.getLogger(__name__)
T = TypeVar("T")

SMALL_BYTES: Final = limits.READ_BYTES
"""Most bytes of a step that is fetched in one go, through memory."""
PEERS_NAMED: Final = 12
"""Connected peers that are asked for something large."""
FALLBACKS: Final = 8
"""Versions before the newest that are tried where that one cannot be fetched."""
LONG_WAY: Final = 3
"""Steps from which on peers are asked for a way before any of it is fetched.

A node that follows closely needs one or two.
"""
TABLE_REST_BYTES: Final = 256
"""Upper bound of a table's bytes besides its rows."""
SETTINGS: Final = DownloadSettings(
    sources=7, span=SMALL_BYTES, least_span=SMALL_BYTES, renew_seconds=0.5, round_pauses=(0.2, 1.0)
)
"""Sources are asked for half a frame at a time: the sooner it is whole, the sooner it is served."""
VERSIONS: Final = limits.STALENESS + 2
"""Versions of use in any run: those that groups may be sampled under, the newest, one to spare."""
QUICK: Final = DownloadSettings(round_pauses=())


class Puller:
    """Keeps one node's store at versions of the chain."""

    def __init__(
        self,
        network: Network,
        store: WeightsStore,
        *,
        blobs: BlobClient | None = None,
        named: Collection[bytes] = (),
        uplink: UploadLimit | None = None,
        downlink: Throttle | None = None,
        on_progress: Callable[[PullProgress], None] | None = None,
        files: Mapping[bytes, InFile] | None = None,
        versions: int = VERSIONS,
    ) -> None:
        """Set up; `named` are further peers that may have weights.

        `files` are served too. The last `versions` can be built from what is kept.
        """
        self._network = network
        self.store = store
        self._blobs = blobs or BlobClient(network, settings=SETTINGS, downlink=downlink)
        self._quick = BlobClient(
            network, sources=self._blobs.sources, settings=QUICK, downlink=self._blobs.downlink
        )
        self._named = tuple(named)
        self._on_progress = on_progress or (lambda _now: None)
        self._one = trio.Lock()
        self._retention = Retention(store, versions)
        self._moved = trio.Event()
        self._moved.set()  # an earlier process may have left more than is needed
        self._planner = RoutePlanner(store)
        self.chain = ChainFollower(network, store)
        self.seeder = WeightsSeeder(network, store, uplink=uplink, files=files or {})
        self.pulls = PullTotals()
        """Totals for metrics."""

    @asynccontextmanager
    async def work(self) -> AsyncGenerator[None]:
        """Follow the chain, pull on request and serve until the context is left."""
        async with self.seeder.serve(), trio.open_nursery() as nursery:
            nursery.start_soon(self.chain.follow)
            nursery.start_soon(self._settle)
            yield
            nursery.cancel_scope.cancel()

    @property
    def held(self) -> Head | None:
        """Return the head whose weights are here."""
        return self.store.tip

    async def pull(self, to: bytes | None = None) -> Head:
        """Bring the store to a head of the chain, or to the newest: proven, or an error.

        After an error the version from before stays. A way that nobody can give, or that does not
        match its heads, is planned again without it.
        """
        async with self._one:
            target = self.chain.tip if to is None else self.chain.find(to)
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
        """Return the cheapest way whose tables some nearby peer has.

        Much of a long way may be pruned everywhere, and searching for each part takes so long that
        a fast chain is never caught up with.
        """
        way, gone = self._planner.plan(target, without), set[bytes]()
        while len(way) >= LONG_WAY and (missing := self._missing_tables(way)):
            lacking = await self._not_near(missing, target)
            gone |= lacking
            other = self._planner.find(target, {*without, *gone}) if lacking else None
            if other is None:  # it can be had; or every way has to be searched for
                break
            way = other
        return way

    def _missing_tables(self, way: Way) -> list[bytes]:
        """Return the tables of a way that are not here."""
        return [step.route.table for step in way if not self.store.blobs.has(step.route.table)]

    async def _not_near(self, tables: Collection[bytes], target: Head) -> set[bytes]:
        """Return the tables that neither the leader nor a connected peer has."""
        lacking, named = set(tables), self._sources(target)
        for peers in (named, self._wider(named)):
            if lacking:
                lacking -= await self._blobs.held([Want(table) for table in lacking], peers)
        return lacking

    def _check_worthwhile(self, target: Head) -> None:
        """Raise if a much newer version exists, so that nobody will need this one."""
        newest = self.chain.tip
        if newest is not None and newest.message.version > target.message.version + FALLBACKS:
            raise PeerError(
                f"version {target.message.version} was overtaken by version {newest.message.version} while it was fetched",
                advice="follow the newest head",
            )

    async def _reach_before(self, target: Head) -> None:
        """Go to the last version that can be fetched, where the newest cannot."""
        newer = self.store.follower.heads[-1 - FALLBACKS : -1]
        if self.held is not None:
            newer = tuple(head for head in newer if head.message.version > self.held.message.version)
        for head in reversed(newer):
            with suppress(PeerError):
                await self._reach(head)
                return
        log.warning("version %d cannot be had, nor one shortly before it", target.message.version)

    async def buildable(self, heads: Sequence[Head]) -> list[Head]:
        """Return the heads whose states are here or can be built."""

        def is_here(head: Head) -> bool:
            return head == self.held or self.store.archive.can_build(head.id)

        async with self._one:
            return await trio.to_thread.run_sync(lambda: [*filter(is_here, heads)])

    async def use(self, head: Head, take: Callable[[WeightsView], T]) -> T:
        """Bring the store to a head and call `take` with its state, in a thread.

        The state is valid only within that call.
        """

        def held() -> T:
            with opened(self.store, head.id) as lease:
                return take(lease)

        if not self._is_past(head):
            await self.pull(head.id)
        return await trio.to_thread.run_sync(held)

    async def roster(self, head: Head) -> Roster:
        """Return the roster of a head."""
        return decode(Roster, await self.named(head, head.message.roster, limits.ROSTER_BYTES))

    async def named(self, head: Head, blob: bytes, most: int) -> bytes:
        """Fetch a blob that a head names into the store and return it."""
        with suppress(DamagedBlobError):
            if self.store.blobs.has(blob):
                return await trio.to_thread.run_sync(self.store.blobs.read, blob, most)
        await self._fetch([Want(blob, most=most)], head, ())
        return await trio.to_thread.run_sync(self.store.blobs.read, blob, most)

    def _is_past(self, head: Head) -> bool:
        """Return whether a later version of the chain is held.

        A version of an abandoned branch does not count: it leads to nothing on the new one.
        """
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
        """Fetch what a way needs and apply it; return the route that failed, if any."""
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
            self.seeder.announce(step.route.table)
        frames = await trio.to_thread.run_sync(self._frames, way)
        missing = await self._fetched(frames, way[-1].head, [step.route.table for step in way])
        for step in way:
            if missing and self.store.missing(step.route):
                return step.route
        return await self._advance(way)

    def _frames(self, way: Way) -> list[Want]:
        return [Want(blob, size) for step in way for blob, size in self.store.missing(step.route)]

    async def _fetched(self, wants: Sequence[Want], head: Head, tables: Sequence[bytes]) -> bool:
        """Fetch blobs; return True if some cannot be fetched."""
        if wants:
            try:
                await self._fetch(wants, head, tables)
            except PeerError as error:
                log.warning("on the way to version %d: %s", head.message.version, error)
                return True
        return False

    async def _fetch(self, wants: Sequence[Want], head: Head, tables: Sequence[bytes]) -> None:
        """Fetch small parts from leader and named peers, large ones from all holders."""
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
        """Return the leader and the named peers."""
        return [peer for peer in dict.fromkeys((head.signer, *self._named)) if peer != self._network.public]

    def _wider(self, named: Sequence[bytes]) -> list[bytes]:
        """Return peers to ask before announcers are found: named and some connected ones."""
        connected = [peer for peer in self._network.peers() if peer not in named]
        return [*named, *connected[: max(0, PEERS_NAMED - len(named))]]

    # Taking

    async def _table_is_honest(self, step: Step) -> bool:
        """Return whether a table matches its head; checked before its frames are fetched."""

        def check() -> None:
            try:
                self.store.archive.reader(step)
            except UnprovenError as error:
                if error.reason != "missing-blob":
                    raise

        return await self._proven(step, check)

    async def _advance(self, way: Way) -> Route | None:
        """Apply a way in one swap; return a refused route.

        With one swap the store never goes back.
        """
        self._say("applying", way[-1].head, 0, 0)
        refused: list[Step] = []
        if await self._proven(way[-1], lambda: self.store.walk(way, refused=refused), refused):
            self.pulls.versions += 1
            self._moved.set()
            for route in way[-1].head.message.routes:
                self.seeder.announce_held(route.table)
            return None
        return (refused or way)[-1].route

    async def _proven(self, step: Step, check: Callable[[], None], refused: Sequence[Step] = ()) -> bool:
        """Run a check of the store; return whether it passed.

        What is refused was signed: its signer is blamed, whoever sent the bytes.
        """
        try:
            await trio.to_thread.run_sync(check)
        except UnprovenError as error:
            step = refused[0] if refused else step
            version = step.head.message.version
            self._planner.refused[step.route.table] = error
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
        """Remove old blobs after each version.

        Meanwhile nothing is pulled; reading goes on.
        """
        while True:
            await self._moved.wait()
            self._moved = trio.Event()
            async with self._one:
                try:
                    await trio.to_thread.run_sync(self._retention.settle)
                except (StoreError, UnprovenError) as error:
                    log.warning("old versions stay on disk for now: %s", error)

    # Telling

    def _say_fetched(self, head: Head, now: Fetched) -> None:
        self._say("fetching", head, now.done, now.total, now.sources)

    def _say(self, what: str, head: Head, done: int, total: int, sources: int = 0) -> None:
        self._on_progress(PullProgress(what, head.message.version, done, total, sources))
