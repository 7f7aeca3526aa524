"""Durable outbox: items stay on disk from `put` until a receipt names them.

Survives restarts. The outbox knows what is pending and not when to send it, so that no clock can
stall it. Acknowledged items are kept until `forget`, since a new leader may lack them (`revive`).
"""

from __future__ import annotations

import sqlite3
import tempfile
import time
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import trio

from echo_node.errors import DefectError, StoreError, boundary, one_line
from echo_node.storage.sqlite import DatabaseSpec, SqliteFile, open_sqlite
from protocol import Delivery, limits
from protocol.digest import DIGEST_BYTES

LONGEST: Final = limits.GOSSIP_BYTES - 16
"""Most bytes of one item: with the headers of a batch it must fit one gossip message."""


@dataclass(frozen=True, slots=True)
class Item:
    """A sealed message. Receipts name it by its id, the same however often it is sent."""

    id: bytes
    topic: str
    data: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if type(self.id) is not bytes or len(self.id) != DIGEST_BYTES:
            raise DefectError(f"an item is named by {DIGEST_BYTES} bytes")
        if type(self.data) is not bytes or not 1 <= len(self.data) <= LONGEST:
            raise DefectError(
                f"an item has 1 to {LONGEST} bytes", advice="send a reference to what is longer"
            )
        with boundary(DefectError, "an item for a topic"):
            Delivery.on(self.topic, self.data)


ITEMS: Final = 65_536
BYTES: Final = 256 * 1024 * 1024
REFUSALS: Final = 1_024
"""Refused items that are remembered, without their data, to show why."""
DELIVERED: Final = 65_536
"""Ids of acknowledged and forgotten items that are remembered, to show their fate."""

_PENDING, _ACKNOWLEDGED, _REFUSED = 0, 1, 2
_DATABASE: Final = DatabaseSpec(
    name="outbox",
    mark=0x4563_4F42,
    exclusive=True,
    busy_seconds=0.5,  # for a process that is about to end
    migrations={
        0: (
            """CREATE TABLE items (
                seq INTEGER PRIMARY KEY,
                id BLOB NOT NULL UNIQUE,
                topic TEXT NOT NULL,
                size INTEGER NOT NULL,
                added REAL NOT NULL,
                state INTEGER NOT NULL,
                settled REAL,
                reason TEXT NOT NULL,
                data BLOB NOT NULL
            )""",
            "CREATE INDEX settled_items ON items (state, seq) WHERE state != 0",
        ),
    },
)


class OutboxFullError(StoreError):
    """No room for another item: producers must wait (`wait_for_room`). None was added."""


@dataclass(frozen=True, slots=True)
class RefusedItem:
    """An item that was refused for good, and why. `added` is Unix time."""

    id: bytes
    topic: str
    reason: str
    added: float


class Outbox:
    """The items of one node, made by `open_outbox`.

    Every change is on disk when the call returns.
    """

    def __init__(self, file: SqliteFile, *, items: int, most_bytes: int) -> None:
        self._file = file
        self._most = (items, most_bytes)
        self._pending: dict[bytes, tuple[int, int]] = {}
        """Item id to the mark at which it became pending, and its size; oldest first."""
        self._mark = 0
        self._items = 0
        self._bytes = 0
        self._news = trio.Event()

    async def put(self, items: Sequence[Item]) -> int:
        """Add items; return how many were new.

        Adds all of them or, when there is no room, none (`OutboxFullError`).
        """
        added = time.time()

        def insert(file: sqlite3.Connection) -> dict[bytes, int]:
            new: dict[bytes, int] = {}
            for item in items:
                row = (item.id, item.topic, len(item.data), added, _PENDING, "", item.data)
                if file.execute(_INSERT, row).rowcount:
                    new[item.id] = len(item.data)
            if new:
                self._check_room(len(new), sum(new.values()))
            return new

        new = await self._file.transact(insert)
        self._items += len(new)
        self._bytes += sum(new.values())
        self._add(new)
        return len(new)

    async def acknowledge(self, ids: Iterable[bytes]) -> list[bytes]:
        """Mark items as delivered; return those that were pending here.

        Most ids of a receipt are about other nodes' items.
        """
        mine = [each for each in dict.fromkeys(ids) if each in self._pending]
        if mine:
            rows = [(_ACKNOWLEDGED, time.time(), each) for each in mine]
            await self._file.transact(lambda file: file.executemany(_SETTLE, rows))
        return [each for each in mine if self._settle(each)]

    async def refuse(self, reasons: Mapping[bytes, str]) -> list[bytes]:
        """Mark items as refused for good; return those that were pending here.

        Refused items are not sent again. Not for temporary reasons (a full buffer): an item that
        is left pending is sent again.
        """
        mine = [each for each in reasons if each in self._pending]

        def settle(file: sqlite3.Connection) -> None:
            rows = [(_REFUSED, time.time(), one_line(reasons[each]), each) for each in mine]
            file.executemany(_REFUSE, rows)
            file.execute(_TRIM, (REFUSALS,))

        if mine:
            await self._file.transact(settle)
        sizes = {each: self._settle(each) for each in mine}
        self._free([size for size in sizes.values() if size])
        return [each for each, size in sizes.items() if size]

    async def revive(self, ids: Iterable[bytes] | None = None) -> list[bytes]:
        """Make acknowledged items (these, or all) pending again; return their ids."""
        wanted = None if ids is None else set(ids)

        def wake(file: sqlite3.Connection) -> dict[bytes, int]:
            found = _select(file.execute(_KEPT).fetchall(), wanted)
            file.executemany(_REVIVE, [(each,) for each in found])
            return found

        found = await self._file.transact(wake)
        self._add(found)
        return list(found)

    async def forget(
        self, ids: Iterable[bytes] | None = None, *, older_than: float = 0.0, record: bool = True
    ) -> int:
        """Drop items acknowledged at least `older_than` seconds ago; return how many.

        Of these ids, or of all; `record` keeps their ids as delivered. By the wall clock: an item
        that seems to have been acknowledged in the future, since the clock was set back, counts
        from now.
        """
        wanted = None if ids is None else set(ids)
        now = time.time()

        def drop(file: sqlite3.Connection) -> dict[bytes, int]:
            file.execute(_FIX_FUTURE_TIMES, (now, now))
            found = _select(file.execute(_KEPT_SINCE, (now - older_than,)).fetchall(), wanted)
            if record:
                file.executemany(_DELIVERED, [(each,) for each in found])
            file.executemany("DELETE FROM items WHERE id = ?", [(each,) for each in found])
            file.execute(_TRIM_DELIVERED, (DELIVERED,))
            return found

        found = await self._file.transact(drop)
        self._free(found.values())
        return len(found)

    async def read(self, ids: Sequence[bytes]) -> list[Item]:
        """Return those of the items that are pending, in this order."""

        def select(file: sqlite3.Connection) -> list[Item]:
            rows = (file.execute(_READ, (each,)).fetchone() for each in ids if each in self._pending)
            return [Item(*row) for row in rows if row]

        return await self._file.transact(select)

    async def refusals(self) -> list[RefusedItem]:
        """Return the refused items that are remembered, newest first."""
        rows = await self._file.transact(lambda file: file.execute(_REFUSED_ITEMS).fetchall())
        return [RefusedItem(*row) for row in rows]

    # The following use memory only.

    @property
    def pending(self) -> int:
        """Number of items that wait for a receipt."""
        return len(self._pending)

    @property
    def kept(self) -> int:
        """Number of items acknowledged and not yet forgotten."""
        return self._items - len(self._pending)

    def is_pending(self, item: bytes) -> bool:
        return item in self._pending

    def size(self, item: bytes) -> int:
        """Return the bytes of a pending item; 0 for any other."""
        return self._pending.get(item, (0, 0))[1]

    def since(self, mark: int) -> tuple[list[bytes], int]:
        """Return what became pending after a mark, oldest first, and the next mark.

        Mark 0 returns everything pending.
        """
        newer = []
        for each in reversed(self._pending):
            if self._pending[each][0] <= mark:
                break
            newer.append(each)
        return newer[::-1], self._mark

    async def wait(self, mark: int) -> None:
        """Wait until an item becomes pending after a mark. The caller sets any deadline."""
        while self._mark <= mark:
            await self._news.wait()

    async def wait_for_room(self, items: int, size: int) -> None:
        """Wait for room for so many items and bytes. The caller sets any deadline."""
        while self._lacks_room(items, size):
            await self._news.wait()

    async def load(self) -> None:
        """Load the state from disk."""

        def look(file: sqlite3.Connection) -> tuple[dict[bytes, int], int, int]:
            file.execute(_MAKE_DELIVERED)  # files of earlier programs have no such table
            count, size = file.execute(_SUMS).fetchone()
            return dict(file.execute(_WAITING).fetchall()), count, size

        pending, self._items, self._bytes = await self._file.transact(look)
        self._add(pending)

    def _add(self, sizes: Mapping[bytes, int]) -> None:
        for each, size in sizes.items():
            self._mark += 1
            self._pending[each] = (self._mark, size)
        self._notify()

    def _settle(self, item: bytes) -> int:
        """Remove an item from the pending ones; return its size, 0 if it was not pending."""
        return self._pending.pop(item, (0, 0))[1]

    def _free(self, sizes: Iterable[int]) -> None:
        gone = list(sizes)
        self._items -= len(gone)
        self._bytes -= sum(gone)
        self._notify()

    def _notify(self) -> None:
        self._news.set()
        self._news = trio.Event()

    def _lacks_room(self, items: int, size: int) -> bool:
        return self._items + items > self._most[0] or self._bytes + size > self._most[1]

    def _check_room(self, items: int, size: int) -> None:
        if self._lacks_room(items, size):
            raise OutboxFullError(
                f"the outbox is full: {self.pending} items wait for a receipt and {self.kept} are kept,"
                f" {self._bytes} bytes; {items} more of {size} bytes have no room",
                advice="produce no more until some are acknowledged and forgotten; is the trainer there?",
            )


@asynccontextmanager
async def open_outbox(
    path: Path | None, *, items: int = ITEMS, most_bytes: int = BYTES
) -> AsyncGenerator[Outbox]:
    """Open or make the outbox file, for one process at a time (`StoreError`).

    Without a path it is temporary.
    """
    with tempfile.TemporaryDirectory(prefix="echo-outbox-") if path is None else nullcontext("") as folder:
        async with open_sqlite(path or Path(folder, "outbox.sqlite"), _DATABASE) as file:
            outbox = Outbox(file, items=items, most_bytes=most_bytes)
            await outbox.load()
            yield outbox


def _select(rows: Sequence[tuple[bytes, int]], wanted: set[bytes] | None) -> dict[bytes, int]:
    return {each: size for each, size in rows if wanted is None or each in wanted}


_INSERT = (
    "INSERT OR IGNORE INTO items (id, topic, size, added, state, reason, data) VALUES (?, ?, ?, ?, ?, ?, ?)"
)
_SETTLE = "UPDATE items SET state = ?, settled = ? WHERE id = ? AND state = 0"
_REFUSE = "UPDATE items SET state = ?, settled = ?, reason = ?, data = x'' WHERE id = ? AND state = 0"
_TRIM = (
    "DELETE FROM items WHERE state = 2 AND seq NOT IN"
    " (SELECT seq FROM items WHERE state = 2 ORDER BY seq DESC LIMIT ?)"
)
_KEPT = "SELECT id, size FROM items WHERE state = 1 ORDER BY seq"
_KEPT_SINCE = "SELECT id, size FROM items WHERE state = 1 AND settled <= ? ORDER BY seq"
_REVIVE = "UPDATE items SET state = 0, settled = NULL WHERE id = ?"
_MAKE_DELIVERED = """CREATE TABLE IF NOT EXISTS delivered (
    seq INTEGER PRIMARY KEY, id BLOB NOT NULL, added REAL NOT NULL, settled REAL NOT NULL)"""
_DELIVERED = "INSERT INTO delivered (id, added, settled) SELECT id, added, settled FROM items WHERE id = ?"
_TRIM_DELIVERED = "DELETE FROM delivered WHERE seq <= (SELECT coalesce(max(seq), 0) FROM delivered) - ?"
_FIX_FUTURE_TIMES = "UPDATE items SET settled = ? WHERE state = 1 AND settled > ?"
_READ = "SELECT id, topic, data FROM items WHERE id = ? AND state = 0"
_REFUSED_ITEMS = "SELECT id, topic, reason, added FROM items WHERE state = 2 ORDER BY seq DESC"
_WAITING = "SELECT id, size FROM items WHERE state = 0 ORDER BY seq"
_SUMS = "SELECT count(*), coalesce(sum(size), 0) FROM items WHERE state != 2"
