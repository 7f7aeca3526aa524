"""A file that survives `kill -9` and the power cut: SQLite, with every commit synced, used by one process at a time.

It opens, locks, checks and versions the file and runs transactions in a thread, since syncing a disk may take long.
It knows nothing of what is in the tables.
"""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

import trio

from echo_node.errors import StoreError

T = TypeVar("T")
BUSY_SECONDS: Final = 0.5
"""How long to wait for a process that is about to end."""
WAL_BYTES: Final = 16 * 1024 * 1024
"""What is left of the log on disk once it has been written back."""


@dataclass(frozen=True, slots=True)
class Kind:
    """What a file is. `mark` stands in its header, so that nobody else's file is taken for it."""

    name: str
    mark: int
    version: int
    schema: tuple[str, ...]


class DurableFile:
    """One open file. `open_durable` makes it."""

    def __init__(self, path: Path, kind: Kind) -> None:
        self._path = path
        self._kind = kind
        self._turn = trio.Lock()
        self._connection: sqlite3.Connection | None = None

    async def transact(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Run `work` in a thread as one transaction: when this returns, all of it is on disk; when it raises, nothing is.

        One transaction at a time, in the order of the calls. A cancellation waits for the end of one that has begun.
        """
        async with self._turn:
            return await in_thread(lambda: self._transact(work))

    async def start(self) -> None:
        async with self._turn:
            await in_thread(self._start)

    async def close(self) -> None:
        """Close the file, even when cancelled: the lock on it must go."""
        with trio.CancelScope(shield=True):
            async with self._turn:
                connection, self._connection = self._connection, None
                if connection is not None:
                    with self._explained("closing"):
                        await in_thread(connection.close)

    def _transact(self, work: Callable[[sqlite3.Connection], T]) -> T:
        if (connection := self._connection) is None:
            raise StoreError(f"{self} is closed")
        with self._explained("using"):
            connection.execute("BEGIN IMMEDIATE")
            try:
                done = work(connection)
                connection.execute("COMMIT")
            finally:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
            return done

    def _start(self) -> None:
        with self._explained("opening"):
            connection = sqlite3.connect(
                self._path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False
            )
            try:
                # The lock is the file's own and is held from the first use on; it goes with the process, however that ends.
                connection.execute("PRAGMA locking_mode = EXCLUSIVE")
                connection.execute("BEGIN EXCLUSIVE")
                self._check(connection)
                connection.execute("COMMIT")
                # Only now, when the file is known to be ours: this changes its header.
                connection.execute("PRAGMA journal_mode = WAL")
                connection.execute("PRAGMA synchronous = FULL")
                connection.execute(f"PRAGMA journal_size_limit = {WAL_BYTES}")
            except BaseException:
                connection.close()
                raise
            self._connection = connection

    def _check(self, connection: sqlite3.Connection) -> None:
        mark, version, tables = (
            connection.execute(question).fetchone()[0]
            for question in (
                "PRAGMA application_id",
                "PRAGMA user_version",
                "SELECT count(*) FROM sqlite_schema",
            )
        )
        if (mark, version, tables) == (0, 0, 0):
            for statement in self._kind.schema:
                connection.execute(statement)
            connection.execute(f"PRAGMA application_id = {self._kind.mark}")
            connection.execute(f"PRAGMA user_version = {self._kind.version}")
            return
        if mark != self._kind.mark:
            raise StoreError(f"{self} is another program's file", advice="give this node a folder of its own")
        if version != self._kind.version:
            raise StoreError(
                f"{self} has version {version}, this program writes {self._kind.version}",
                advice="run the echo-node that wrote it, or give this one another folder",
            )
        found = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
        if found != "ok":
            raise self._damaged(str(found))

    @contextmanager
    def _explained(self, doing: str) -> Generator[None]:
        """SQLite's errors, in words for whoever has to do something about them."""
        try:
            yield
        except sqlite3.Error as error:
            code = getattr(error, "sqlite_errorcode", 0) & 0xFF
            if code in {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}:
                raise self._damaged(str(error)) from error
            if code == sqlite3.SQLITE_BUSY:
                raise StoreError(
                    f"{self} is in use by another process",
                    advice="stop that one, or give this one another folder",
                ) from error
            advice = "free some space" if code == sqlite3.SQLITE_FULL else "check the folder and its disk"
            raise StoreError(f"{doing} {self}: {error}", advice=advice) from error

    def _damaged(self, how: str) -> StoreError:
        advice = "move the file away: what is in it is lost to this node, and a new one is made"
        return StoreError(f"{self} is damaged: {how}", advice=advice)

    def __str__(self) -> str:
        return f"the {self._kind.name} {self._path}"


async def in_thread(work: Callable[[], T]) -> T:
    """Whatever touches the disk, which may take long."""
    return await trio.to_thread.run_sync(work)


@asynccontextmanager
async def open_durable(path: Path, kind: Kind) -> AsyncGenerator[DurableFile]:
    """The file at this path, made if there is none; its folder must be there. A `StoreError` if it cannot be used."""
    file = DurableFile(path, kind)
    try:
        await file.start()
        yield file
    finally:
        await file.close()
