"""SQLite files: the only place that opens them, with marks, migrations and locks.

Each owner describes its file by a `DatabaseSpec`: the mark in the header, the table of migrations
and how the file is used. Errors of SQLite become a `StoreError` that says what to do.
"""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncGenerator, Callable, Generator, Mapping
from contextlib import asynccontextmanager, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias, TypeVar

import trio

from echo_node.errors import StoreError, one_line

T = TypeVar("T")
Migration: TypeAlias = tuple[str, ...] | Callable[[sqlite3.Connection], None]
"""SQL statements, or a function that runs them, from one version of a file to the next."""
WAL_BYTES: Final = 16 * 1024 * 1024
"""Most bytes of a write-ahead log left on disk after a checkpoint."""
_MARKS: Final = ("PRAGMA application_id", "PRAGMA user_version")
_TABLES: Final = "SELECT count(*) FROM sqlite_schema"


@dataclass(frozen=True, slots=True)
class DatabaseSpec:
    """Description of one kind of SQLite file: marks, migrations and use."""

    name: str
    """Noun for error messages."""
    mark: int
    """`application_id` in the header, which keeps out files of other programs; 0: never set."""
    migrations: Mapping[int, Migration]
    """Version n to what brings a file to n + 1; 0 makes the tables of a new file."""
    additions: Callable[[sqlite3.Connection], None] | None = None
    """Repeatable changes that older programs accept, run at each opening, under one version."""
    exclusive: bool = False
    """Whether one process has the file to itself. If not, others may read it meanwhile."""
    durable: bool = True
    """Whether a transaction is synced to disk. If not, a power cut may cost the last ones."""
    checked: bool = True
    """Whether the pages are checked at each opening, which reads all of the file."""
    busy_seconds: float = 5.0
    """Longest wait for another process that holds a lock."""
    expendable: str = ""
    """Why the file may be moved away without loss, for advice; empty where that is not so."""

    @property
    def version(self) -> int:
        """Return the newest version, which this program writes."""
        return len(self.migrations)


class UnusableFileError(StoreError):
    """A file that is damaged, of another program, or of another version."""


def connect(path: Path, spec: DatabaseSpec) -> sqlite3.Connection:
    """Connect without any check, as a second reader of an open file.

    Raises `sqlite3.Error`.
    """
    return sqlite3.connect(path, timeout=spec.busy_seconds, isolation_level=None, check_same_thread=False)


def open_database(path: Path, spec: DatabaseSpec) -> sqlite3.Connection:
    """Open or make the file, check its marks and bring it to the newest version.

    Blocks.
    """
    with explain_errors(path, spec, "opening"):
        connection = connect(path, spec)
        try:
            if spec.exclusive:
                # SQLite's own lock, held from the first use until the process ends in any way.
                connection.execute("PRAGMA locking_mode = EXCLUSIVE")
            connection.execute("BEGIN EXCLUSIVE" if spec.exclusive else "BEGIN IMMEDIATE")
            _prepare(connection, path, spec)
            connection.execute("COMMIT")
            # After the checks, since it changes the header, also of another program's file.
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute(f"PRAGMA synchronous = {'FULL' if spec.durable else 'NORMAL'}")
            connection.execute(f"PRAGMA journal_size_limit = {WAL_BYTES}")
        except BaseException:
            connection.close()
            raise
        return connection


@contextmanager
def open_reader(path: Path, spec: DatabaseSpec, *, live: bool = False) -> Generator[sqlite3.Connection]:
    """Open an existing file of the newest version to read it. Blocks.

    `live`: another process may write the file meanwhile. Otherwise nothing in it is changed.
    """
    how = connect if live else _connect_read_only
    with explain_errors(path, spec, "reading"), closing(how(path, spec)) as connection:
        mark, version = (connection.execute(question).fetchone()[0] for question in _MARKS)
        _check_marks(mark, version, path, spec, oldest=spec.version)
        yield connection


@contextmanager
def explain_errors(path: Path, spec: DatabaseSpec, doing: str) -> Generator[None]:
    """Turn errors of SQLite into a `StoreError` that says what to do."""
    file = describe(path, spec)
    try:
        yield
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code in {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}:
            raise _damaged(path, spec, str(error)) from error
        if code == sqlite3.SQLITE_BUSY:
            raise StoreError(
                f"{file} is in use by another process",
                advice="stop that one, or give this one another folder",
            ) from error
        advice = "free some space" if code == sqlite3.SQLITE_FULL else "check the folder and its disk"
        raise StoreError(f"{doing} {file}: {error}", advice=_advice(advice, spec)) from error


def describe(path: Path, spec: DatabaseSpec) -> str:
    """Return the file's noun and path, for messages."""
    return f"the {spec.name} {path}"


def _connect_read_only(path: Path, spec: DatabaseSpec) -> sqlite3.Connection:
    # A process that ended in order leaves one file, and an immutable reader makes none beside it.
    # Otherwise SQLite has to merge the log; and only it sees the lock on an exclusive file.
    ended = not any(Path(f"{path}{suffix}").exists() for suffix in ("-wal", "-journal"))
    closed = ended and not spec.exclusive
    uri = f"{path.resolve().as_uri()}?mode=ro{'&immutable=1' if closed else ''}"
    return sqlite3.connect(uri, uri=True, timeout=min(spec.busy_seconds, 0.5), isolation_level=None)


def _prepare(connection: sqlite3.Connection, path: Path, spec: DatabaseSpec) -> None:
    """Check a file's marks, or create its tables; run missing migrations."""
    mark, version, tables = (connection.execute(each).fetchone()[0] for each in (*_MARKS, _TABLES))
    if (mark, version, tables) != (0, 0, 0):
        # A file without a mark may have been cut off between its tables and its version.
        _check_marks(mark, version, path, spec, oldest=1 if spec.mark else 0)
        if spec.checked and (result := connection.execute("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
            raise _damaged(path, spec, str(result))
    for number in range(version, spec.version):
        _apply(connection, spec.migrations[number])
        connection.execute(f"PRAGMA application_id = {spec.mark}")
        connection.execute(f"PRAGMA user_version = {number + 1}")
    if spec.additions is not None:
        spec.additions(connection)


def _apply(connection: sqlite3.Connection, migration: Migration) -> None:
    if callable(migration):
        migration(connection)
        return
    for statement in migration:
        connection.execute(statement)


def _check_marks(mark: int, version: int, path: Path, spec: DatabaseSpec, *, oldest: int) -> None:
    if mark != spec.mark:
        raise UnusableFileError(
            f"{describe(path, spec)} is another program's file",
            advice=_advice("give this node a folder of its own", spec),
        )
    if not oldest <= version <= spec.version:
        raise UnusableFileError(
            f"{describe(path, spec)} has version {version}, this program writes {spec.version}",
            advice=_advice("run the echo-node that wrote it, or give this one another folder", spec),
        )


def _damaged(path: Path, spec: DatabaseSpec, how: str) -> UnusableFileError:
    loss = spec.expendable or "what is in it is lost to this node"
    return UnusableFileError(
        f"{describe(path, spec)} is damaged: {one_line(how)}",
        advice=f"move the file away: {loss}, and a new one is made",
    )


def _advice(text: str, spec: DatabaseSpec) -> str:
    return f"{text}, or move the file away: {spec.expendable}" if spec.expendable else text


class SqliteFile:
    """One open file whose transactions run in a thread. `open_sqlite` makes it."""

    def __init__(self, path: Path, spec: DatabaseSpec) -> None:
        self._path = path
        self._spec = spec
        self._turn = trio.Lock()
        self._connection: sqlite3.Connection | None = None

    async def transact(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Run `work` in a thread as one transaction.

        All of it is on disk when this returns, and nothing of it when this raises. One transaction
        runs at a time, in the order of the calls; a cancellation waits for the end of a begun one.
        """
        async with self._turn:
            return await in_thread(lambda: self._transact(work))

    async def start(self) -> None:
        async with self._turn:
            self._connection = await in_thread(lambda: open_database(self._path, self._spec))

    async def close(self) -> None:
        """Close the file, even when cancelled, so that its lock is released."""
        with trio.CancelScope(shield=True):
            async with self._turn:
                connection, self._connection = self._connection, None
                if connection is not None:
                    with explain_errors(self._path, self._spec, "closing"):
                        await in_thread(connection.close)

    def _transact(self, work: Callable[[sqlite3.Connection], T]) -> T:
        if (connection := self._connection) is None:
            raise StoreError(f"{self} is closed")
        with explain_errors(self._path, self._spec, "using"):
            connection.execute("BEGIN IMMEDIATE")
            try:
                result = work(connection)
                connection.execute("COMMIT")
            finally:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
            return result

    def __str__(self) -> str:
        return describe(self._path, self._spec)


async def in_thread(work: Callable[[], T]) -> T:
    """Run a call that blocks for the disk in a thread."""
    return await trio.to_thread.run_sync(work)


@asynccontextmanager
async def open_sqlite(path: Path, spec: DatabaseSpec) -> AsyncGenerator[SqliteFile]:
    """Open or make the file in an existing folder.

    Raises `StoreError` if it cannot be used.
    """
    file = SqliteFile(path, spec)
    try:
        await file.start()
        yield file
    finally:
        await file.close()
