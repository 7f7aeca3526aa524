"""What has arrived, once: items on disk from `take` until whoever uses them is `done`, and their names for long after.

When `take` returns, all that it was given may be acknowledged: after `kill -9` it is still `waiting`, each item once, so
nothing is lost between a receipt and the use of what it names. It knows nothing of peers, nor of what the items mean.
"""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from echo_node.errors import StoreError
from echo_node.net.outbox.durable import DurableFile, Kind, open_durable
from echo_node.net.outbox.item import Item

ITEMS: Final = 65_536
BYTES: Final = 512 * 1024 * 1024
NAMES: Final = 262_144
"""Names of items that are done with. The oldest go first: what comes again after so many others must be refused by its
age, which its own contents tell."""

_KIND: Final = Kind(
    name="record of arrivals",
    mark=0x4563_4152,
    version=1,
    schema=(
        """CREATE TABLE arrivals (
            seq INTEGER PRIMARY KEY,
            id BLOB NOT NULL UNIQUE,
            topic TEXT NOT NULL,
            size INTEGER NOT NULL,
            data BLOB
        )""",
        "CREATE INDEX names ON arrivals (seq) WHERE data IS NULL",
    ),
)


class ArrivalsFullError(StoreError):
    """Too much waits to be used: nothing was taken, and nothing may be acknowledged. Its sender will come again."""


class Arrivals:
    """The arrivals of one node. `open_arrivals` makes it. Whatever changes it is on disk when the call returns."""

    def __init__(self, file: DurableFile, *, items: int, most_bytes: int, names: int) -> None:
        self._file = file
        self._most = (items, most_bytes)
        self._names_kept = names
        self._items = 0
        self._bytes = 0
        self._names = 0

    async def take(self, items: Sequence[Item]) -> list[Item]:
        """Take items that are in order; returns those that were not here before, each once. All of them or none."""

        def insert(file: sqlite3.Connection) -> list[Item]:
            new = [item for item in items if file.execute(_INSERT, _row(item)).rowcount]
            if new:
                self._check_room(new)
            return new

        new = await self._file.transact(insert)
        self._items += len(new)
        self._bytes += _size(new)
        return new

    async def waiting(self) -> list[Item]:
        """What was taken and is not done with, in the order in which it came: where to go on after a restart."""
        rows = await self._file.transact(lambda file: file.execute(_WAITING).fetchall())
        return [Item(*row) for row in rows]

    async def done(self, ids: Iterable[bytes]) -> None:
        """What these led to is safe by other means: only their names are kept."""
        named = list(dict.fromkeys(ids))

        def let_go(file: sqlite3.Connection) -> tuple[int, int, int]:
            sizes = [file.execute(_SIZE, (each,)).fetchone() for each in named]
            file.executemany(_DONE, [(each,) for each in named])
            gone = [size for found in sizes if found for size in found]
            excess = max(0, self._names + len(gone) - self._names_kept)
            file.execute(_TRIM, (excess,))
            return len(gone), sum(gone), excess

        count, size, excess = await self._file.transact(let_go)
        self._items -= count
        self._bytes -= size
        self._names += count - excess

    def __len__(self) -> int:
        """How many items wait to be used."""
        return self._items

    async def load(self) -> None:
        """Remember what is on disk."""

        def look(file: sqlite3.Connection) -> tuple[int, int, int]:
            count, size = file.execute(_SUMS).fetchone()
            return count, size, file.execute(_NAMES).fetchone()[0]

        self._items, self._bytes, self._names = await self._file.transact(look)

    def _check_room(self, new: Sequence[Item]) -> None:
        if self._items + len(new) > self._most[0] or self._bytes + _size(new) > self._most[1]:
            raise ArrivalsFullError(
                f"no room for {len(new)} more items: {self._items} of {self._bytes} bytes wait to be used"
            )


@asynccontextmanager
async def open_arrivals(
    path: Path, *, items: int = ITEMS, most_bytes: int = BYTES, names: int = NAMES
) -> AsyncGenerator[Arrivals]:
    """The arrivals in this file, made if there is none. One process at a time (`StoreError`)."""
    async with open_durable(path, _KIND) as file:
        arrivals = Arrivals(file, items=items, most_bytes=most_bytes, names=names)
        await arrivals.load()
        yield arrivals


def _row(item: Item) -> tuple[bytes, str, int, bytes]:
    return item.id, item.topic, len(item.data), item.data


def _size(items: Sequence[Item]) -> int:
    return sum(len(item.data) for item in items)


_INSERT = "INSERT OR IGNORE INTO arrivals (id, topic, size, data) VALUES (?, ?, ?, ?)"
_WAITING = "SELECT id, topic, data FROM arrivals WHERE data IS NOT NULL ORDER BY seq"
_SIZE = "SELECT size FROM arrivals WHERE id = ? AND data IS NOT NULL"
_DONE = "UPDATE arrivals SET data = NULL WHERE id = ?"
_TRIM = "DELETE FROM arrivals WHERE seq IN (SELECT seq FROM arrivals WHERE data IS NULL ORDER BY seq LIMIT ?)"
_SUMS = "SELECT count(*), coalesce(sum(size), 0) FROM arrivals WHERE data IS NOT NULL"
_NAMES = "SELECT count(*) FROM arrivals WHERE data IS NULL"
