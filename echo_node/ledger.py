"""What was sent, admitted, refused, verified and credited, and why: in SQLite, on disk before a call returns.

Credit is counted in verified tokens: those of groups that a verifier found honest and that no two found dishonest. What
a group stands at follows from all that was heard of it, so that news may come in any order and any number of times.
Calls block for a disk's sync and may come from any thread. It checks no signature and knows no network.
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
from typing import IO, Any, Final, Self

from echo_node.errors import DefectError, StoreError, boundary, one_line
from protocol import Opened, TrajectoryGroup, Verdict

CONDEMNING: Final = 2
"""Verifiers whose finding takes a group's credit back."""
BUSY_SECONDS: Final = 5.0
"""How long to wait for another process that writes."""
MARK: Final = 0x4563_4C45
FORMAT: Final = 1
_SCHEMA: Final = (
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
    # What groups that were pruned stood at, and up to which version a group that is not here was one of them.
    """CREATE TABLE pruned (
        run BLOB NOT NULL, sampler BLOB NOT NULL, state TEXT NOT NULL, reason TEXT NOT NULL, groups INTEGER NOT NULL,
        tokens INTEGER NOT NULL, PRIMARY KEY (run, sampler, state, reason)
    ) WITHOUT ROWID""",
    "CREATE TABLE closed (run BLOB PRIMARY KEY, version INTEGER NOT NULL) WITHOUT ROWID",
)


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """A group as the ledger knows it. `version` is that of its head."""

    id: bytes
    run: bytes
    sampler: bytes
    head: bytes
    version: int
    slot: int
    tokens: int
    engine: str

    @classmethod
    def of(cls, group: Opened[TrajectoryGroup], version: int) -> Entry:
        told = group.message
        return cls(
            group.id,
            group.run,
            group.signer,
            told.heads[0],
            version,
            told.slot,
            told.token_count,
            told.engine,
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Credit:
    """What a sampler has earned: verified tokens and their groups; and, in groups, what came to nothing, and what a trainer
    has taken on which no verifier has decided.
    """

    tokens: int
    groups: int
    condemned: int
    refused: Mapping[str, int]
    """By reason."""
    admitted: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """What one verifier has found of a sampler's groups: honest ones and their tokens, dishonest ones, and since when."""

    tokens: int
    honest: int
    dishonest: int
    since: float | None


class Ledger:
    """The ledger of one node, opened once. Other processes may read the file meanwhile."""

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.time) -> None:
        self._path = path
        self._clock = clock
        self._lock = threading.RLock()
        self._file: sqlite3.Connection | None = self._open()

    def sent(self, group: Entry) -> bool:
        """A sampler has said this group. False: it is no news."""
        with self._writing() as file:
            return self._known(file, group)

    def admitted(self, id_: bytes, group: Entry | None = None) -> bool:
        """A trainer has taken it. False: it is no news, or of a group that the ledger does not know."""
        return self._answered(id_, group, "admitted", "")

    def refused(self, id_: bytes, reason: str, group: Entry | None = None) -> bool:
        """A trainer has not. That it came a second time says nothing against the first."""
        return self._answered(id_, group, "refused", one_line(reason))

    def verdict(self, found: Opened[Verdict], group: Entry | None = None) -> bool:
        """A verifier has looked, even before the group itself is known. False: it is no news.

        Of a verifier that says several things of one group the gravest counts, whichever came first.
        """
        told = found.message
        if group is not None and (group.id, group.run) != (told.group, found.run):
            raise DefectError("a verdict on another group than the one that it is written down for")
        row = (
            told.group,
            found.signer,
            told.result,
            one_line(told.reason),
            one_line(told.note),
            json.dumps(dataclasses.asdict(told.figures), sort_keys=True),
            self._clock(),
        )
        with self._writing() as file:
            new = group is not None and self._known(file, group)
            if file.execute(_VERDICT, row).rowcount:
                self._settle(file, told.group)
                new = True
            return new

    def state(self, id_: bytes) -> tuple[str, str] | None:
        """What a group stands at, sent, admitted, refused, verified or condemned, and why; None: it is not known."""
        with self._using() as file:
            found = file.execute("SELECT state, reason FROM groups WHERE id = ?", (id_,)).fetchone()
        return None if found is None else (found[0], found[1])

    def credit(self, sampler: bytes, run: bytes | None = None) -> Credit:
        """What a sampler has earned, in one run or in all."""
        with self._using() as file:
            return summed(file.execute(CREDIT, {"sampler": sampler, "run": run}).fetchall())

    def found_by(self, verifier: bytes, sampler: bytes, run: bytes) -> Found:
        """What one verifier has found itself, whatever others say. Of groups that were pruned, those that were verified count.

        There may be very many: whoever writes does not wait for it.
        """
        with self._explained("reading"), closing(self._connect()) as file:
            rows = file.execute(_FOUND, {"verifier": verifier, "sampler": sampler, "run": run}).fetchall()
        sums = {result: (groups, tokens) for result, groups, tokens, _ in rows}
        since = min((at for *_, at in rows if at is not None), default=None)
        honest, tokens = (sum(sums.get(each, (0, 0))[n] for each in ("honest", "pruned")) for n in (0, 1))
        return Found(tokens, honest, sums.get("dishonest", (0, 0))[0], since)

    def export(self, to: Path | IO[str]) -> int:
        """Everything, as one JSON object per line, sorted; returns how many. The ledger goes on meanwhile.

        A file is there whole or not at all.
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
        """Forget groups first heard of before this time, and keep their sums; returns how many.

        Whatever is heard of them later changes nothing: choose a time by which all has been said.
        """
        with self._writing() as file:
            file.execute(_KEEP_SUMS, (older_than,))
            file.execute(_CLOSE, (older_than,))
            file.execute(
                "DELETE FROM verdicts WHERE id IN (SELECT id FROM groups WHERE at < ?)", (older_than,)
            )
            file.execute(
                "DELETE FROM verdicts WHERE at < ? AND id NOT IN (SELECT id FROM groups)", (older_than,)
            )
            return file.execute("DELETE FROM groups WHERE at < ?", (older_than,)).rowcount

    @contextmanager
    def together(self) -> Generator[None]:
        """All that this thread writes down in the block is on disk at its end, at once; or, if it raises, nothing is."""
        with self._writing():
            yield

    def close(self) -> None:
        with self._lock:
            file, self._file = self._file, None
            if file is not None:
                with self._explained("closing"):
                    file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # Inside

    def _answered(self, id_: bytes, group: Entry | None, answer: str, why: str) -> bool:
        if group is not None and group.id != id_:
            raise DefectError("an answer to another group than the one that it is written down for")
        with self._writing() as file:
            new = group is not None and self._known(file, group)
            row = {"id": id_, "answer": answer, "why": why}
            if file.execute(_ANSWER, row).rowcount:
                self._settle(file, id_)
                new = True
            return new

    def _known(self, file: sqlite3.Connection, group: Entry) -> bool:
        """Have a row for a group, unless it has one or was pruned. True: it is a new one."""
        row = {**dataclasses.asdict(group), "engine": one_line(group.engine), "at": self._clock()}
        new = file.execute(_GROUP, row).rowcount > 0
        if new:
            self._settle(file, group.id)  # verdicts may have come first
        return new

    @staticmethod
    def _settle(file: sqlite3.Connection, id_: bytes) -> None:
        file.execute(_SETTLE, {"id": id_, "condemning": CONDEMNING})

    def _lines(self) -> Iterator[dict[str, Any]]:
        """A reader of its own sees one moment, and nobody waits for it."""
        with self._explained("reading"), closing(self._connect()) as file:
            file.row_factory = sqlite3.Row
            file.execute("BEGIN")
            for kind, question in _EXPORTED.items():
                for row in file.execute(question):
                    line = {name: _plain(row[name]) for name in row.keys()}  # noqa: SIM118 - a row is no mapping
                    if kind == "verdict":
                        line["figures"] = json.loads(line["figures"])
                    yield {"kind": kind, **line}

    @contextmanager
    def _using(self) -> Generator[sqlite3.Connection]:
        with self._lock, self._explained("using"):
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

    def _connect(self) -> sqlite3.Connection:
        return sqlite3.connect(
            self._path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False
        )

    def _open(self) -> sqlite3.Connection:
        with self._explained("opening"):
            file = self._connect()
            try:
                file.execute("BEGIN IMMEDIATE")
                self._check(file)
                file.execute("COMMIT")
                # Only now, when the file is known to be ours: this changes its header.
                file.execute("PRAGMA journal_mode = WAL")
                file.execute("PRAGMA synchronous = FULL")
            except BaseException:
                file.close()
                raise
            return file

    def _check(self, file: sqlite3.Connection) -> None:
        mark, version, tables = (
            file.execute(question).fetchone()[0]
            for question in (
                "PRAGMA application_id",
                "PRAGMA user_version",
                "SELECT count(*) FROM sqlite_schema",
            )
        )
        if (mark, version, tables) == (0, 0, 0):
            for statement in _SCHEMA:
                file.execute(statement)
            file.execute(f"PRAGMA application_id = {MARK}")
            file.execute(f"PRAGMA user_version = {FORMAT}")
        elif mark != MARK:
            raise StoreError(f"{self} is another program's file", advice="give this node a folder of its own")
        elif version != FORMAT:
            raise StoreError(
                f"{self} has version {version}, this program writes {FORMAT}",
                advice="run the echo-node that wrote it, or give this one another folder",
            )
        elif (found := file.execute("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
            raise self._damaged(found)

    @contextmanager
    def _explained(self, doing: str) -> Generator[None]:
        try:
            yield
        except sqlite3.Error as error:
            code = getattr(error, "sqlite_errorcode", 0) & 0xFF
            if code in {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}:
                raise self._damaged(error) from error
            advice = "free some space" if code == sqlite3.SQLITE_FULL else "check the folder and its disk"
            raise StoreError(f"{doing} {self}: {error}", advice=advice) from error

    def _damaged(self, how: object) -> StoreError:
        advice = "move the file away: what is in it is lost to this node, and a new one is made"
        return StoreError(f"{self} is damaged: {one_line(str(how))}", advice=advice)

    def __str__(self) -> str:
        return f"the ledger {self._path}"


def summed(rows: Iterable[tuple[str, str, int, int]]) -> Credit:
    """What the rows of `CREDIT` come to."""
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


_GROUP = """INSERT INTO groups
    SELECT :id, :run, :sampler, :head, :version, :slot, :tokens, :engine, :at, 'sent', '', 'sent', ''
    WHERE NOT EXISTS (SELECT 1 FROM closed WHERE run = :run AND version >= :version)
    ON CONFLICT DO NOTHING"""
_ANSWER = """UPDATE groups SET answer = :answer, why = :why WHERE id = :id AND (answer, why) != (:answer, :why)
    AND NOT (answer != 'sent' AND :why = 'duplicate')"""
_VERDICT = """INSERT INTO verdicts VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET
    result = excluded.result, reason = excluded.reason, note = excluded.note, figures = excluded.figures,
    at = excluded.at
    WHERE instr(' undecided honest dishonest', ' ' || excluded.result)
        > instr(' undecided honest dishonest', ' ' || verdicts.result)"""
_SETTLE = """UPDATE groups SET (state, reason) = (
        SELECT CASE WHEN dishonest >= :condemning THEN 'condemned' WHEN honest > 0 THEN 'verified' ELSE answer END,
            CASE WHEN dishonest >= :condemning THEN (SELECT reason FROM verdicts
                WHERE id = :id AND result = 'dishonest' ORDER BY verifier LIMIT 1) WHEN honest > 0 THEN '' ELSE why END
        FROM (SELECT count(*) FILTER (WHERE result = 'dishonest') AS dishonest,
            count(*) FILTER (WHERE result = 'honest') AS honest FROM verdicts WHERE id = :id)
    ) WHERE id = :id"""
CREDIT: Final = """SELECT state, reason, sum(groups), sum(tokens) FROM (
        SELECT run, state, reason, count(*) AS groups, sum(tokens) AS tokens FROM groups
            WHERE sampler = :sampler GROUP BY run, state, reason
        UNION ALL SELECT run, state, reason, groups, tokens FROM pruned WHERE sampler = :sampler
    ) WHERE :run IS NULL OR run = :run GROUP BY state, reason"""
_FOUND = """SELECT result, count(*), sum(tokens), min(verdicts.at) FROM groups JOIN verdicts USING (id)
        WHERE sampler = :sampler AND run = :run AND verifier = :verifier GROUP BY result
    UNION ALL SELECT 'pruned', sum(groups), sum(tokens), NULL FROM pruned
        WHERE sampler = :sampler AND run = :run AND state = 'verified' GROUP BY state"""
_KEEP_SUMS = """INSERT INTO pruned
    SELECT run, sampler, state, reason, count(*), sum(tokens) FROM groups WHERE at < ?
        GROUP BY run, sampler, state, reason
    ON CONFLICT DO UPDATE SET groups = groups + excluded.groups, tokens = tokens + excluded.tokens"""
_CLOSE = """INSERT INTO closed SELECT run, max(version) FROM groups WHERE at < ? GROUP BY run
    ON CONFLICT DO UPDATE SET version = max(version, excluded.version)"""
_EXPORTED = {
    "closed": "SELECT * FROM closed ORDER BY run",
    "group": "SELECT id, run, sampler, head, version, slot, tokens, engine, at, state, reason FROM groups ORDER BY id",
    "pruned": "SELECT * FROM pruned ORDER BY run, sampler, state, reason",
    "verdict": 'SELECT id AS "group", verifier, result, reason, note, figures, at FROM verdicts ORDER BY id, verifier',
}
