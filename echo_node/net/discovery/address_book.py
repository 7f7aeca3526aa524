"""Address book: peers that were reachable, kept across restarts in SQLite.

Lets a node rejoin when every seed is down. The caller adds only addresses at which a connection
was made, or which a connected peer signed. The file is a cache: a corrupt one is set aside and
begun anew; when the disk fails, that is logged once, and the book goes on in memory.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from echo_node.errors import StoreError
from echo_node.net.discovery.address_scope import subnet_of, usable
from echo_node.storage.sqlite import DatabaseSpec, UnusableFileError, open_database
from protocol import ProtocolError, limits
from protocol.identity import check_key

PEERS: Final = 512
PER_SUBNET: Final = 32
"""Most peers of one public network, so that an owner of many adjacent addresses cannot fill the
book."""
DIALLED: Final = 4
"""Most addresses of a peer, the newest, at which a dial succeeded; signed ones fill the rest."""
FAILURES_BEFORE_LAST: Final = 3
"""Failed dials in a row after which a peer ranks behind all that have fewer."""
_DATABASE: Final = DatabaseSpec(
    name="book of peers",
    mark=0,
    migrations={
        0: (
            (
                "CREATE TABLE IF NOT EXISTS peers (public BLOB PRIMARY KEY, dialled TEXT NOT NULL, signed TEXT NOT NULL,"
                " seen REAL NOT NULL, successes INTEGER NOT NULL, failures INTEGER NOT NULL) WITHOUT ROWID"
            ),
        ),
    },
    durable=False,
    busy_seconds=0.2,
)
_log = logging.getLogger("echo_node.net.discovery.address_book")


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """A known peer.

    `successes` counts dials that reached it, `failures` the failed dials since the last that did.
    """

    public: bytes
    dialled: tuple[str, ...]
    signed: tuple[str, ...]
    seen: float
    successes: int = 0
    failures: int = 0

    @property
    def addresses(self) -> tuple[str, ...]:
        """Addresses to dial, best first."""
        return tuple(dict.fromkeys((*self.dialled, *self.signed)))[: limits.ADDRESSES]

    @property
    def standing(self) -> tuple[bool, bool, int, float]:
        """Sort key; higher is better.

        Peers that were never reached rank behind all that were, however many there are.
        """
        return (self.successes > 0, self.failures < FAILURES_BEFORE_LAST, min(self.successes, 4), self.seen)


class _BrokenError(Exception):
    """The file is not an address book of this format."""


class AddressBook:
    """The address book of one node, held in memory; the file follows each change."""

    def __init__(
        self, path: Path | None, *, most: int = PEERS, clock: Callable[[], float] = time.time
    ) -> None:
        self._path = path
        self._most = most
        self._clock = clock
        self._entries: dict[bytes, Entry] = {}
        self._file = self._open() if path is not None else None

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(tuple(self._entries.values()))

    def get(self, public: bytes) -> Entry | None:
        return self._entries.get(public)

    def best(self, count: int) -> list[Entry]:
        """Return the `count` peers to try first."""
        return sorted(self._entries.values(), key=lambda entry: entry.standing, reverse=True)[:count]

    def reached(self, public: bytes, address: str) -> None:
        """Record that a dial of this address reached this peer."""
        entry = self._entry(public)
        dialled = usable((address, *entry.dialled), public, most=DIALLED)
        self._put(
            dataclasses.replace(entry, dialled=tuple(dialled), successes=entry.successes + 1, failures=0)
        )

    def signed(self, public: bytes, addresses: Sequence[str]) -> None:
        """Record the addresses that a connected peer signed for itself."""
        entry = self._entry(public)
        found = usable(addresses, public, most=limits.ADDRESSES)
        self._put(dataclasses.replace(entry, signed=tuple(found)))

    def failed(self, public: bytes) -> None:
        """Record a failed dial of a peer; forget one that was never reached after several."""
        if (entry := self._entries.get(public)) is None:
            return
        if not entry.successes and entry.failures + 1 >= FAILURES_BEFORE_LAST:
            self.forget(public)
        else:
            self._put(dataclasses.replace(entry, seen=entry.seen, failures=entry.failures + 1))

    def forget(self, public: bytes) -> None:
        if self._entries.pop(public, None) is not None:
            self._write("DELETE FROM peers WHERE public = ?", (public,))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _entry(self, public: bytes) -> Entry:
        known = self._entries.get(public) or Entry(public, (), (), 0.0)
        return dataclasses.replace(known, seen=self._clock())

    def _put(self, entry: Entry) -> None:
        if not entry.addresses:
            return
        self._entries[entry.public] = entry
        self._write(
            "INSERT OR REPLACE INTO peers VALUES (?, ?, ?, ?, ?, ?)",
            (
                entry.public,
                json.dumps(entry.dialled),
                json.dumps(entry.signed),
                entry.seen,
                min(entry.successes, limits.SAFE_INTEGER),
                min(entry.failures, limits.SAFE_INTEGER),
            ),
        )
        self._make_room(entry)

    def _make_room(self, newest: Entry) -> None:
        if (subnet := subnet_of(newest.addresses[0])) is not None:
            near = [each for each in self._entries.values() if subnet_of(each.addresses[0]) == subnet]
            if len(near) > PER_SUBNET:
                self.forget(min(near, key=lambda entry: entry.standing).public)
        while len(self._entries) > self._most:
            self.forget(min(self._entries.values(), key=lambda entry: entry.standing).public)

    def _write(self, statement: str, values: tuple[Any, ...]) -> None:
        if self._file is None:
            return
        try:
            self._file.execute(statement, values)
        except sqlite3.Error as error:
            _log.warning(
                "the book of peers %s can no longer be written (%s): it goes on in memory", self._path, error
            )
            self._file.close()
            self._file = None

    def _open(self) -> sqlite3.Connection | None:
        try:
            try:
                return self._load()
            except (_BrokenError, UnusableFileError, sqlite3.DatabaseError) as error:
                if isinstance(error, sqlite3.OperationalError):
                    raise
                aside = self._set_aside()
                _log.warning(
                    "the book of peers was broken (%s): it is set aside as %s and begun anew", error, aside
                )
                return self._load()
        except (_BrokenError, StoreError, sqlite3.Error, OSError) as error:
            _log.warning("the book of peers %s cannot be used (%s): it is kept in memory", self._path, error)
            return None

    def _load(self) -> sqlite3.Connection:
        """Open the file and read all of it.

        Writes survive a kill of the process; only a power failure can lose the last ones.
        """
        self._entries.clear()
        file = open_database(Path(str(self._path)), _DATABASE)
        try:
            for row in file.execute("SELECT * FROM peers ORDER BY seen DESC LIMIT ?", (4 * self._most,)):
                self._admit(row)
        except BaseException:
            file.close()
            raise
        return file

    def _admit(self, row: tuple[Any, ...]) -> None:
        public, dialled, signed, seen, successes, failures = row
        try:
            check_key(bytes(public))
            found = [
                tuple(usable(map(str, json.loads(text)), public, most=most))
                for text, most in ((dialled, DIALLED), (signed, limits.ADDRESSES))
            ]
            # A clock that was wrong must not keep a peer at the front for ever.
            entry = Entry(
                public, found[0], found[1], min(float(seen), self._clock()), int(successes), int(failures)
            )
        except (ProtocolError, TypeError, ValueError) as error:
            raise _BrokenError(f"a row that is none: {error}") from error
        if entry.addresses:
            self._entries[entry.public] = entry
            self._trim()

    def _trim(self) -> None:
        if len(self._entries) > self._most:
            del self._entries[min(self._entries.values(), key=lambda entry: entry.standing).public]

    def _set_aside(self) -> Path:
        path = Path(str(self._path))
        aside = path.with_name(f"{path.name}.broken")
        path.replace(aside)
        for tail in ("-wal", "-shm"):
            path.with_name(path.name + tail).unlink(missing_ok=True)
        return aside
