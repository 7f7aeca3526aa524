"""Credit ledger: groups, receipts and verdicts, in SQLite.

Every write is synced. Credit is counted in verified tokens: those of groups that a verifier found
honest and that no two found dishonest. A group's state follows from everything recorded about it,
so records may come in any order and any number of times. Calls block for the disk's sync and may
come from any thread. Signatures are checked by the caller.
"""

from __future__ import annotations

import dataclasses
import json
import sqlite3
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, Final, Self

from echo_node.credit import ledger_sql as sql
from echo_node.errors import DefectError, StoreError, boundary, one_line
from echo_node.storage.sqlite import (
    DatabaseSpec,
    connect,
    describe,
    explain_errors,
    open_database,
)
from protocol import Opened, Verdict

if TYPE_CHECKING:
    from echo_node.rollouts.record import RolloutRecord

CONDEMNING: Final = 2
"""Number of verifiers whose "dishonest" verdicts revoke a group's credit."""
DATABASE: Final = DatabaseSpec(
    name="ledger",
    mark=0x4563_4C45,
    migrations={
        0: (
            """CREATE TABLE groups (
                id BLOB PRIMARY KEY, run BLOB NOT NULL, sampler BLOB NOT NULL, head BLOB NOT NULL, version INTEGER NOT NULL,
                slot INTEGER NOT NULL, tokens INTEGER NOT NULL, engine TEXT NOT NULL, at REAL NOT NULL,
                answer TEXT NOT NULL, why TEXT NOT NULL, state TEXT NOT NULL, reason TEXT NOT NULL
            ) WITHOUT ROWID""",
            "CREATE INDEX groups_of_samplers ON groups (sampler, run, state, reason, tokens)",
            "CREATE INDEX groups_by_time ON groups (at)",
            """CREATE TABLE verdicts (
                id BLOB NOT NULL, verifier BLOB NOT NULL, result TEXT NOT NULL, reason TEXT NOT NULL, note TEXT NOT NULL,
                figures TEXT NOT NULL, at REAL NOT NULL, PRIMARY KEY (id, verifier)
            ) WITHOUT ROWID""",
            "CREATE INDEX verdicts_by_time ON verdicts (at)",
            # Sums of pruned groups, and up to which version an unknown group counts as pruned.
            """CREATE TABLE pruned (
                run BLOB NOT NULL, sampler BLOB NOT NULL, state TEXT NOT NULL, reason TEXT NOT NULL, groups INTEGER NOT NULL,
                tokens INTEGER NOT NULL, PRIMARY KEY (run, sampler, state, reason)
            ) WITHOUT ROWID""",
            "CREATE TABLE closed (run BLOB PRIMARY KEY, version INTEGER NOT NULL) WITHOUT ROWID",
        ),
    },
)


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """A group's row; `version` is that of its head."""

    id: bytes
    run: bytes
    sampler: bytes
    head: bytes
    version: int
    slot: int
    tokens: int
    engine: str

    @classmethod
    def of(cls, group: RolloutRecord, run: bytes, version: int) -> Entry:
        """Make the entry of a sealed group of a run, drawn under this version."""
        message = group.message
        return cls(
            group.id, run, group.sampler, group.head, version, group.slot, message.token_count, message.engine
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Credit:
    """A sampler's verified tokens and their groups, and the groups in other states."""

    tokens: int
    groups: int
    condemned: int
    refused: Mapping[str, int]
    """Refused groups by reason."""
    admitted: int = 0
    """Groups that a trainer admitted and no verifier has decided on."""


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """One verifier's verdicts on a sampler's groups; `since` is the first Unix time."""

    tokens: int
    honest: int
    dishonest: int
    since: float | None


class Ledger:
    """The ledger file of one node, opened once; other processes may read it meanwhile."""

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.time) -> None:
        self._path = path
        self._clock = clock
        self._lock = threading.RLock()
        self._file: sqlite3.Connection | None = open_database(path, DATABASE)

    def sent(self, group: Entry) -> bool:
        """Record a sent group; return False if it was known."""
        with self._writing() as file:
            return self._insert(file, group)

    def admitted(self, id_: bytes, group: Entry | None = None) -> bool:
        """Record that a trainer admitted a group; return False if known or unlisted.

        A group is unlisted if it is not in the ledger and `group` is not given.
        """
        return self._answer(id_, group, "admitted", "")

    def refused(self, id_: bytes, reason: str, group: Entry | None = None) -> bool:
        """Record that a trainer refused a group.

        The reason "duplicate" does not undo an earlier answer.
        """
        return self._answer(id_, group, "refused", one_line(reason))

    def verdict(self, found: Opened[Verdict], group: Entry | None = None) -> bool:
        """Record a verdict, even before its group; return False if it was known.

        Of several verdicts by one verifier on one group the gravest counts, whichever came first.
        """
        message = found.message
        if group is not None and (group.id, group.run) != (message.group, found.run):
            raise DefectError("the verdict is on another group than the one it is recorded for")
        row = (
            message.group,
            found.signer,
            message.result,
            one_line(message.reason),
            one_line(message.note),
            json.dumps(dataclasses.asdict(message.figures), sort_keys=True),
            self._clock(),
        )
        with self._writing() as file:
            new = group is not None and self._insert(file, group)
            if file.execute(sql.UPSERT_VERDICT, row).rowcount:
                self._settle(file, message.group)
                new = True
            return new

    def state(self, id_: bytes) -> tuple[str, str] | None:
        """Return a group's state and reason.

        The state is sent, admitted, refused, verified or condemned. None if the group is not known.
        """
        with self._using() as file:
            found = file.execute("SELECT state, reason FROM groups WHERE id = ?", (id_,)).fetchone()
        return None if found is None else (found[0], found[1])

    def credit(self, sampler: bytes, run: bytes | None = None) -> Credit:
        """Return a sampler's credit, in one run or in all."""
        with self._using() as file:
            return sum_credit(file.execute(sql.CREDIT, {"sampler": sampler, "run": run}).fetchall())

    def found_by(self, verifier: bytes, sampler: bytes, run: bytes) -> Found:
        """Return the sums of one verifier's own verdicts.

        Pruned groups count if they were verified. Reads through a connection of its own, since
        there may be very many: writers do not wait.
        """
        with explain_errors(self._path, DATABASE, "reading"), closing(connect(self._path, DATABASE)) as file:
            rows = file.execute(
                sql.FOUND_BY_VERIFIER, {"verifier": verifier, "sampler": sampler, "run": run}
            ).fetchall()
        sums = {result: (groups, tokens) for result, groups, tokens, _ in rows}
        since = min((at for *_, at in rows if at is not None), default=None)
        honest, tokens = (sum(sums.get(each, (0, 0))[n] for each in ("honest", "pruned")) for n in (0, 1))
        return Found(tokens, honest, sums.get("dishonest", (0, 0))[0], since)

    def export(self, to: Path | IO[str]) -> int:
        """Export everything as sorted JSON lines, and return their number.

        A file is written whole or not at all, and the ledger stays usable meanwhile.
        """
        if not isinstance(to, Path):
            return _write_lines(self._lines(), to)
        part = to.with_name(f"{to.name}.part")
        with boundary(StoreError, f"writing {to}", advice="check the folder and its disk"):
            with part.open("w", encoding="utf-8") as stream:
                count = _write_lines(self._lines(), stream)
            part.replace(to)
        return count

    def prune(self, older_than: float) -> int:
        """Delete groups recorded before this Unix time; return their number.

        Their sums are kept. Later answers and verdicts on them are ignored: choose a time by which
        all have come.
        """
        with self._writing() as file:
            file.execute(sql.SUM_PRUNED, (older_than,))
            file.execute(sql.CLOSE_VERSIONS, (older_than,))
            file.execute(
                "DELETE FROM verdicts WHERE id IN (SELECT id FROM groups WHERE at < ?)", (older_than,)
            )
            file.execute(
                "DELETE FROM verdicts WHERE at < ? AND id NOT IN (SELECT id FROM groups)", (older_than,)
            )
            return file.execute("DELETE FROM groups WHERE at < ?", (older_than,)).rowcount

    @contextmanager
    def transaction(self) -> Generator[None]:
        """Commit all records of this thread in the block at once; none on error."""
        with self._writing():
            yield

    def close(self) -> None:
        with self._lock:
            file, self._file = self._file, None
            if file is not None:
                with explain_errors(self._path, DATABASE, "closing"):
                    file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # Inside

    def _answer(self, id_: bytes, group: Entry | None, answer: str, why: str) -> bool:
        if group is not None and group.id != id_:
            raise DefectError("the answer is to another group than the one it is recorded for")
        with self._writing() as file:
            new = group is not None and self._insert(file, group)
            row = {"id": id_, "answer": answer, "why": why}
            if file.execute(sql.SET_ANSWER, row).rowcount:
                self._settle(file, id_)
                new = True
            return new

    def _insert(self, file: sqlite3.Connection, group: Entry) -> bool:
        """Insert a group unless it is known or was pruned; return whether it is new."""
        row = {**dataclasses.asdict(group), "engine": one_line(group.engine), "at": self._clock()}
        new = file.execute(sql.INSERT_GROUP, row).rowcount > 0
        if new:
            self._settle(file, group.id)  # verdicts may have come first
        return new

    @staticmethod
    def _settle(file: sqlite3.Connection, id_: bytes) -> None:
        file.execute(sql.SETTLE_GROUP, {"id": id_, "condemning": CONDEMNING})

    def _lines(self) -> Iterator[dict[str, Any]]:
        """Yield the export from one snapshot.

        It has a connection of its own, so that no writer waits.
        """
        with explain_errors(self._path, DATABASE, "reading"), closing(connect(self._path, DATABASE)) as file:
            file.row_factory = sqlite3.Row
            file.execute("BEGIN")
            for kind, question in sql.EXPORTED.items():
                for row in file.execute(question):
                    line = {name: _plain(row[name]) for name in row.keys()}  # noqa: SIM118 - a row is no mapping
                    if kind == "verdict":
                        line["figures"] = json.loads(line["figures"])
                    yield {"kind": kind, **line}

    @contextmanager
    def _using(self) -> Generator[sqlite3.Connection]:
        with self._lock, explain_errors(self._path, DATABASE, "using"):
            if self._file is None:
                raise StoreError(f"{self} is closed")
            yield self._file

    @contextmanager
    def _writing(self) -> Generator[sqlite3.Connection]:
        """One transaction: the outermost block of this thread begins and ends it."""
        with self._using() as file:
            inner = file.in_transaction
            if not inner:
                file.execute("BEGIN IMMEDIATE")
            try:
                yield file
                if not inner:
                    file.execute("COMMIT")
            finally:
                if not inner and file.in_transaction:
                    file.execute("ROLLBACK")

    def __str__(self) -> str:
        return describe(self._path, DATABASE)


def sum_credit(rows: Iterable[tuple[str, str, int, int]]) -> Credit:
    """Sum the rows of `ledger_sql.CREDIT`."""
    sums = {(state, reason): (groups, tokens) for state, reason, groups, tokens in rows}
    verified = [sums[key] for key in sums if key[0] == "verified"]
    return Credit(
        tokens=sum(tokens for _, tokens in verified),
        groups=sum(groups for groups, _ in verified),
        condemned=sum(sums[key][0] for key in sums if key[0] == "condemned"),
        refused={key[1]: sums[key][0] for key in sorted(sums) if key[0] == "refused"},
        admitted=sum(sums[key][0] for key in sums if key[0] == "admitted"),
    )


def _write_lines(lines: Iterator[dict[str, Any]], stream: IO[str]) -> int:
    count = 0
    for line in lines:
        stream.write(json.dumps(line, sort_keys=True) + "\n")
        count += 1
    return count


def _plain(value: Any) -> Any:
    return value.hex() if isinstance(value, bytes) else value
