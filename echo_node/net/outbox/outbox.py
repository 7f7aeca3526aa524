"""What must arrive and may not have: items on disk from `put` until a receipt names them, and beyond a restart.

The outbox knows what is pending and not when to send it, so that no clock can freeze it. It knows nothing of peers, nor of
what the items mean. What was acknowledged is kept until `forget`, since a new leader may not have it (`revive`).
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import trio

from echo_node.errors import StoreError, one_line
from echo_node.net.outbox.durable import DurableFile, Kind, open_durable
from echo_node.net.outbox.item import Item

ITEMS: Final = 65_536
BYTES: Final = 256 * 1024 * 1024
REFUSALS: Final = 1_024
"""Refused items that are remembered, without their bytes, for whoever asks why."""
DELIVERED: Final = 65_536
"""Names of items that were acknowledged and let go, for whoever asks what became of them."""

_PENDING, _ACKNOWLEDGED, _REFUSED = 0, 1, 2
_KIND: Final = Kind(
    name="outbox",
    mark=0x4563_4F42,
    version=1,
    schema=(
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
)


class OutboxFullError(StoreError):
    """No room for another item: whoever produces them must wait (`wait_for_room`). Nothing was taken."""


@dataclass(frozen=True, slots=True)
class RefusedItem:
    """An item that was refused for good, and why. `added` is Unix time."""

    id: bytes
    topic: str
    reason: str
    added: float


class Outbox:
    """The items of one node. `open_outbox` makes it. Whatever changes it is on disk when the call returns."""

    def __init__(self, file: DurableFile, *, items: int, most_bytes: int) -> None:
        self._file = file
        self._most = (items, most_bytes)
        self._pending: dict[bytes, tuple[int, int]] = {}
        """Id to the mark at which it became pending and its size, the oldest first."""
        self._mark = 0
        self._items = 0
        self._bytes = 0
        self._news = trio.Event()

    async def put(self, items: Sequence[Item]) -> int:
        """Take items; returns how many were new. All of them or, when there is no room, none (`OutboxFullError`)."""
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
        """These have arrived; returns those that were pending here. Most ids of a receipt are about others' items."""
        mine = [each for each in dict.fromkeys(ids) if each in self._pending]
        if mine:
            rows = [(_ACKNOWLEDGED, time.time(), each) for each in mine]
            await self._file.transact(lambda file: file.executemany(_SETTLE, rows))
        return [each for each in mine if self._settle(each)]

    async def refuse(self, reasons: Mapping[bytes, str]) -> list[bytes]:
        """These will never be taken, and why; returns those that were pending here. They are sent no more.

        A reason that may pass (a buffer that is full) is none for this: an item that is left pending is sent again.
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
        """Send again what was acknowledged (these, or all): whoever acknowledged it leads no more. Returns which."""
        wanted = None if ids is None else set(ids)

        def wake(file: sqlite3.Connection) -> dict[bytes, int]:
            found = _those(file.execute(_KEPT).fetchall(), wanted)
            file.executemany(_REVIVE, [(each,) for each in found])
            return found

        found = await self._file.transact(wake)
        self._add(found)
        return list(found)

    async def forget(self, ids: Iterable[bytes] | None = None, *, older_than: float = 0.0) -> int:
        """Let go of what was acknowledged (of these, or of all) that many seconds ago; returns how many items.

        By the wall clock. What seems to have been acknowledged in the future, since the clock was set back, counts from now.
        """
        wanted = None if ids is None else set(ids)
        now = time.time()

        def drop(file: sqlite3.Connection) -> dict[bytes, int]:
            file.execute(_MEND, (now, now))
            found = _those(file.execute(_KEPT_SINCE, (now - older_than,)).fetchall(), wanted)
            file.executemany(_DELIVERED, [(each,) for each in found])
            file.executemany("DELETE FROM items WHERE id = ?", [(each,) for each in found])
            file.execute(_TRIM_DELIVERED, (DELIVERED,))
            return found

        found = await self._file.transact(drop)
        self._free(found.values())
        return len(found)

    async def read(self, ids: Sequence[bytes]) -> list[Item]:
        """Those of the items that are pending, in this order."""

        def select(file: sqlite3.Connection) -> list[Item]:
            rows = (file.execute(_READ, (each,)).fetchone() for each in ids if each in self._pending)
            return [Item(*row) for row in rows if row]

        return await self._file.transact(select)

    async def refusals(self) -> list[RefusedItem]:
        """The refused items that are remembered, the newest first."""
        rows = await self._file.transact(lambda file: file.execute(_REFUSED_ITEMS).fetchall())
        return [RefusedItem(*row) for row in rows]

    # What follows looks at memory only.

    @property
    def pending(self) -> int:
        """How many items wait for a receipt."""
        return len(self._pending)

    @property
    def kept(self) -> int:
        """How many were acknowledged and not yet forgotten."""
        return self._items - len(self._pending)

    def is_pending(self, item: bytes) -> bool:
        return item in self._pending

    def size(self, item: bytes) -> int:
        """The bytes of a pending item; 0 for any other."""
        return self._pending.get(item, (0, 0))[1]

    def since(self, mark: int) -> tuple[list[bytes], int]:
        """What is pending and became so after this mark, oldest first, and the mark to ask with next. All have come since 0."""
        newer = []
        for each in reversed(self._pending):
            if self._pending[each][0] <= mark:
                break
            newer.append(each)
        return newer[::-1], self._mark

    async def wait(self, mark: int) -> None:
        """Until something has become pending after this mark. The caller sets the deadline, if it wants one."""
        while self._mark <= mark:
            await self._news.wait()

    async def wait_for_room(self, items: int, size: int) -> None:
        """Until so many items of so many bytes together have room. The caller sets the deadline."""
        while self._lacks_room(items, size):
            await self._news.wait()

    async def load(self) -> None:
        """Remember what is on disk."""

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
        self._tell()

    def _settle(self, item: bytes) -> int:
        """The size of the item, if it was pending; it no longer is."""
        return self._pending.pop(item, (0, 0))[1]

    def _free(self, sizes: Iterable[int]) -> None:
        gone = list(sizes)
        self._items -= len(gone)
        self._bytes -= sum(gone)
        self._tell()

    def _tell(self) -> None:
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
async def open_outbox(path: Path, *, items: int = ITEMS, most_bytes: int = BYTES) -> AsyncGenerator[Outbox]:
    """The outbox in this file, made if there is none. One process at a time (`StoreError`)."""
    async with open_durable(path, _KIND) as file:
        outbox = Outbox(file, items=items, most_bytes=most_bytes)
        await outbox.load()
        yield outbox


def _those(rows: Sequence[tuple[bytes, int]], wanted: set[bytes] | None) -> dict[bytes, int]:
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
_MEND = "UPDATE items SET settled = ? WHERE state = 1 AND settled > ?"
_READ = "SELECT id, topic, data FROM items WHERE id = ? AND state = 0"
_REFUSED_ITEMS = "SELECT id, topic, reason, added FROM items WHERE state = 2 ORDER BY seq DESC"
_WAITING = "SELECT id, size FROM items WHERE state = 0 ORDER BY seq"
_SUMS = "SELECT count(*), coalesce(sum(size), 0) FROM items WHERE state != 2"
