"""The training journal in SQLite: acknowledged groups and what became of them.

A batch is written, in its order and with its rewards, before anything is learnt from it. So after
`kill -9` the same batches can be learnt from again and give the same bits, and no group is lost or
used twice. Once a checkpoint covers a batch, only the facts of its groups and their signatures
stay, which is what `echo-node weights provenance` reads; so the signatures of all that was ever
learnt from can be checked again. A standby trainer writes what the leader has learnt from, and what
it acknowledged.
"""

from __future__ import annotations

import sqlite3
import struct
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from echo_node.credit.statement_server import Sums
from echo_node.errors import StoreError
from echo_node.rollouts.record import RolloutRecord
from echo_node.storage.sqlite import DatabaseSpec, SqliteFile, open_reader, open_sqlite
from echo_node.trainer import journal_totals
from echo_node.trainer.journal_totals import NO_ADVANTAGE
from protocol import limits

BATCHES_KEPT: Final = 100_000
"""Batches whose groups can be named; older ones leave only Merkle roots in heads."""
DROPPED_KEPT: Final = 65_536
"""Newest arrivals for which the reason of a drop is kept."""
VERDICTS_KEPT: Final = 65_536
JOURNAL_MARK: Final = 0x4563_544A
_IN_MEMORY: Final = Path(":memory:")
_WAITING, _DRAWN, _DROPPED = 0, 1, 2
_ANY: Final = limits.SAFE_INTEGER
"""Upper bound of versions: no version is later."""
_LAST_NUMBER: Final = "SELECT coalesce(max(number), 0) FROM batches WHERE version <= ?"
_ADDED: Final = (
    ("groups", "signature", "BLOB"),
    ("verdicts", "after", "INTEGER"),
    ("batches", "passed_over", "INTEGER NOT NULL DEFAULT 0"),
    ("batches", "passed_reward", "REAL NOT NULL DEFAULT 0.0"),
)
"""Columns that journals of earlier programs lack.

`after` is the number of the newest batch when a finding came.
"""


def _add_columns(file: sqlite3.Connection) -> None:
    for table, column, kind in _ADDED:
        if column not in {row[1] for row in file.execute(f"PRAGMA table_info({table})")}:
            file.execute(f"ALTER TABLE {table} ADD COLUMN {column} {kind}")
    journal_totals.begin(file)


_DATABASE: Final = DatabaseSpec(
    name="training journal",
    mark=JOURNAL_MARK,
    migrations={
        0: (
            "CREATE TABLE run (id BLOB PRIMARY KEY) WITHOUT ROWID",
            """CREATE TABLE groups (
                seq INTEGER PRIMARY KEY, id BLOB NOT NULL UNIQUE, sampler BLOB NOT NULL, slot INTEGER NOT NULL,
                head BLOB NOT NULL, step INTEGER NOT NULL, state INTEGER NOT NULL, why TEXT NOT NULL,
                batch INTEGER, place INTEGER, rewards BLOB, sealed BLOB, signature BLOB
            )""",
            "CREATE INDEX groups_waiting ON groups (seq) WHERE state = 0",
            "CREATE INDEX groups_dropped ON groups (step) WHERE state = 2",
            "CREATE INDEX groups_of_heads ON groups (head)",
            "CREATE INDEX groups_of_batches ON groups (batch, place) WHERE batch IS NOT NULL",
            "CREATE INDEX groups_whole ON groups (batch) WHERE sealed IS NOT NULL AND batch IS NOT NULL",
            """CREATE TABLE batches (
                number INTEGER PRIMARY KEY, policy_step INTEGER NOT NULL, version INTEGER NOT NULL, tip BLOB NOT NULL
            )""",
            "CREATE INDEX batches_of_versions ON batches (version)",
            "CREATE TABLE joins (key BLOB PRIMARY KEY, sealed BLOB NOT NULL)",
            """CREATE TABLE verdicts (
                seq INTEGER PRIMARY KEY, id BLOB NOT NULL, sampler BLOB NOT NULL, verifier BLOB NOT NULL, result TEXT NOT NULL,
                reason TEXT NOT NULL, at REAL NOT NULL, after INTEGER, UNIQUE (id, verifier)
            )""",
        ),
    },
    additions=_add_columns,
    exclusive=True,
    busy_seconds=0.5,  # wait for a process that is about to end
)


@dataclass(frozen=True, slots=True)
class Batch:
    """The groups that one step learns from, in order.

    `version` is that of the head that commits to the batch, `tip` the newest head when it was
    drawn. `passed_over` groups without advantage were drawn and left out, with the mean reward
    `passed_reward`.
    """

    number: int
    policy_step: int
    version: int
    groups: tuple[RolloutRecord, ...]
    tip: bytes = b""
    passed_over: int = 0
    passed_reward: float = 0.0

    @property
    def is_whole(self) -> bool:
        """Return whether the batch can be learnt from again."""
        return all(group.sealed is not None for group in self.groups)


@dataclass(frozen=True, slots=True)
class Finding:
    """A verifier's finding on a group, as the trainer took it. `at` is Unix time."""

    group: bytes
    sampler: bytes
    verifier: bytes
    result: str
    reason: str
    at: float


class TrainingJournal:
    """The journal of one trainer and run, made by `open_journal`.

    What a call changes is on disk when it returns.
    """

    def __init__(self, file: SqliteFile) -> None:
        self._file = file

    async def keep(self, groups: Sequence[RolloutRecord]) -> frozenset[bytes]:
        """Write waiting groups; from now on they may be acknowledged.

        Return those that were used or dropped before.
        """
        rows = [(*_facts(group), _WAITING, group.sealed) for group in groups]

        def write(file: sqlite3.Connection) -> frozenset[bytes]:
            file.executemany(_KEEP, rows)
            return frozenset(each.id for each in groups if file.execute(_IS_PAST, (each.id,)).fetchone())

        return await self._file.transact(write)

    async def expire(self, step: int) -> int:
        """Drop waiting groups sampled before a step; return how many still wait."""

        def write(file: sqlite3.Connection) -> int:
            file.execute(_EXPIRE, (step,))
            return int(file.execute("SELECT count(*) FROM groups WHERE state = 0").fetchone()[0])

        return await self._file.transact(write)

    async def drop(self, why: Mapping[bytes, str]) -> None:
        """Mark waiting groups as dropped, with reasons. Groups of a batch do not change."""
        rows = [(reason, group) for group, reason in why.items()]
        await self._file.transact(lambda file: file.executemany(_DROP, rows))

    async def draw(
        self,
        batch: Batch,
        left_out: Mapping[bytes, str] | None = None,
        passed_over: Sequence[RolloutRecord] = (),
    ) -> frozenset[bytes]:
        """Write a batch, and what was left out of it, in one transaction.

        Its groups may be new to the journal, and so may those without advantage that were passed
        over. A batch with groups that were found dishonest
        meanwhile is not written; these are returned.
        """

        def write(file: sqlite3.Connection) -> frozenset[bytes]:
            ids = [group.id for group in batch.groups]
            if condemned := frozenset(each for each in ids if file.execute(_CONDEMNED, (each,)).fetchone()):
                return condemned
            file.executemany(_DROP, [(reason, group) for group, reason in (left_out or {}).items()])
            for group in passed_over:
                file.execute(_KEEP, (*_facts(group), _WAITING, None))
                file.execute(_DROP, (NO_ADVANTAGE, group.id))
            _insert(file, batch, batch.number)
            for place, group in enumerate(batch.groups):
                file.execute(_KEEP, (*_facts(group), _WAITING, group.sealed))
                rewards = _packed(group.rewards or ())
                if not file.execute(_DRAW, (batch.number, place, rewards, group.id)).rowcount:
                    raise StoreError(f"group {group.id.hex()[:16]} was used before, or dropped")
            return frozenset()

        return await self._file.transact(write)

    async def follow(self, batches: Sequence[Batch]) -> frozenset[bytes]:
        """Write batches that another trainer has learnt from, in one transaction.

        Numbers are this journal's own. Whatever was decided on their groups here, they were used.
        Where some are in batches already, nothing is written, and these are returned.
        """

        def write(file: sqlite3.Connection) -> frozenset[bytes]:
            ids = [group.id for batch in batches for group in batch.groups]
            if twice := frozenset(each for each in ids if file.execute(_IS_USED, (each,)).fetchone()):
                return twice
            for batch in batches:
                number = max(batch.number, file.execute(_LAST_NUMBER, (_ANY,)).fetchone()[0] + 1)
                _insert(file, batch, number)
                for place, group in enumerate(batch.groups):
                    file.execute(_KEEP, (*_facts(group), _WAITING, None))
                    rewards = _packed(group.rewards or ())
                    values = (number, place, rewards, group.sealed, group.signature, group.id)
                    file.execute(_FOLLOW, values)
            return frozenset()

        return await self._file.transact(write)

    async def settle(self, number: int, *, step: int, kept: int = BATCHES_KEPT) -> None:
        """Prune what a checkpoint covers: batches up to this number keep only signatures.

        Groups that were dropped under policies before `step`, which nobody may sample under any
        more, are pruned once many others have come.
        """

        def let_go(file: sqlite3.Connection) -> None:
            file.execute(_EMPTY, (number,))
            file.execute(_FORGET_DROPPED, (step, DROPPED_KEPT))
            file.execute("DELETE FROM groups WHERE batch <= ?", (number - kept,))
            file.execute("DELETE FROM batches WHERE number <= ?", (number - kept,))
            file.execute(_TRIM_VERDICTS, (VERDICTS_KEPT,))

        await self._file.transact(let_go)

    async def disown(self, numbers: Sequence[int]) -> None:
        """Remove batches of a branch of the chain that was left."""
        rows = [(number,) for number in numbers]

        def forget(file: sqlite3.Connection) -> None:
            file.executemany(_DISOWN, rows)
            file.executemany("DELETE FROM batches WHERE number = ?", rows)

        await self._file.transact(forget)

    async def waiting(self) -> list[RolloutRecord]:
        """Return the acknowledged groups that are in no batch, in order of arrival."""
        return [_group(row) for row in await self._rows(f"{_GROUPS} WHERE state = {_WAITING} ORDER BY seq")]

    async def filled(self, heads: Collection[bytes]) -> list[RolloutRecord]:
        """Return the used or dropped groups of these heads, whose slots are filled."""
        named = ", ".join("?" * len(heads))
        query = f"{_GROUPS} WHERE head IN ({named}) AND state != {_WAITING} ORDER BY slot, seq"
        return [_group(row) for row in await self._rows(query, tuple(heads))]

    async def passed_over(self, heads: Collection[bytes]) -> list[bytes]:
        """Return the groups of these heads that were accepted and passed over."""
        named = ", ".join("?" * len(heads))
        query = f"{_GROUPS} WHERE head IN ({named}) AND state = {_DROPPED} AND why = ?"
        return [row[0] for row in await self._rows(query, (*heads, NO_ADVANTAGE))]

    async def batches(self, *, after: int = 0, version: int | None = None) -> list[Batch]:
        """Return the batches beyond a number, or those of one version, oldest first."""

        def read(file: sqlite3.Connection) -> list[Batch]:
            if version is None:
                found = file.execute(f"{_BATCHES} WHERE number > ? ORDER BY number", (after,)).fetchall()
            else:
                found = file.execute(f"{_BATCHES} WHERE version = ? ORDER BY number", (version,)).fetchall()
            return [
                Batch(
                    number,
                    step,
                    batch_version,
                    tuple(_group(each) for each in file.execute(_OF_BATCH, (number,))),
                    *rest,
                )
                for number, step, batch_version, *rest in found
            ]

        return await self._file.transact(read)

    async def last_number(self, version: int = _ANY) -> int:
        """Return the number of the newest batch of versions up to one, or 0."""
        return int((await self._rows(_LAST_NUMBER, (version,)))[0][0])

    async def states(self) -> dict[bytes, str]:
        """Return the state of each group, `waiting` or `drawn`, or why it was dropped."""
        names = {_WAITING: "waiting", _DRAWN: "drawn"}
        rows = await self._rows("SELECT id, state, why FROM groups ORDER BY seq")
        return {row[0]: names.get(row[1], row[2]) for row in rows}

    async def sums(self, sampler: bytes) -> Sums:
        """Return the totals of a sampler's groups, since they are counted."""
        return await self._file.transact(lambda file: journal_totals.sums(file, sampler))

    async def join(self, key: bytes, sealed: bytes) -> None:
        """Write a sampler's join; the last join of a key counts."""
        row = (key, sealed)
        await self._file.transact(
            lambda file: file.execute("INSERT OR REPLACE INTO joins VALUES (?, ?)", row)
        )

    async def joins(self) -> list[bytes]:
        """Return every join, sealed."""
        return [row[0] for row in await self._rows("SELECT sealed FROM joins ORDER BY key")]

    async def find(self, findings: Sequence[Finding]) -> None:
        """Write findings; of several by one verifier on one group, the gravest is kept."""
        rows = [
            (each.group, each.sampler, each.verifier, each.result, each.reason, each.at) for each in findings
        ]
        await self._file.transact(lambda file: file.executemany(_FIND, rows))

    async def findings(self) -> list[Finding]:
        """Return the findings in the order in which they were found."""
        rows = await self._rows(
            "SELECT id, sampler, verifier, result, reason, at FROM verdicts ORDER BY at, seq"
        )
        return [Finding(*row) for row in rows]

    async def belongs_to(self, run: bytes) -> None:
        """Raise unless the journal is of this run; a new one is claimed for it."""

        def claim(file: sqlite3.Connection) -> bytes:
            file.execute("INSERT INTO run SELECT ? WHERE NOT EXISTS (SELECT 1 FROM run)", (run,))
            found: bytes = file.execute("SELECT id FROM run").fetchone()[0]
            return found

        if await self._file.transact(claim) != run:
            raise StoreError(
                f"{self._file} is of another run", advice="give this trainer a folder of its own"
            )

    async def _rows(self, query: str, values: Sequence[object] = ()) -> list[Any]:
        return await self._file.transact(lambda file: file.execute(query, values).fetchall())


@asynccontextmanager
async def open_journal(path: Path | None, run: bytes) -> AsyncGenerator[TrainingJournal]:
    """Open the journal in this file, made if there is none; without a path, in memory."""
    async with open_sqlite(path or _IN_MEMORY, _DATABASE) as file:
        journal = TrainingJournal(file)
        await journal.belongs_to(run)
        yield journal


def read_trained(path: Path, version: int) -> list[RolloutRecord]:
    """Return the groups that a version was trained on, from a closed journal.

    Changes nothing. Raise `StoreError` while a trainer has the journal open.
    """
    with open_reader(path, _DATABASE) as file:
        return [_group(row) for row in file.execute(_OF_VERSION, (version,))]


def _insert(file: sqlite3.Connection, batch: Batch, number: int) -> None:
    row = (number, batch.policy_step, batch.version, batch.tip, batch.passed_over, batch.passed_reward)
    file.execute(_INSERT, row)


def _facts(group: RolloutRecord) -> tuple[bytes, bytes, int, bytes, int]:
    return group.id, group.sampler, group.slot, group.head, group.step


def _group(row: Sequence[Any]) -> RolloutRecord:
    id_, sampler, slot, head, step, sealed, rewards = row
    return RolloutRecord(
        id_, sampler, slot, head, step, sealed, None if rewards is None else _unpacked(rewards)
    )


def _packed(rewards: Sequence[float]) -> bytes:
    return struct.pack(f"<{len(rewards)}d", *rewards)


def _unpacked(data: bytes) -> tuple[float, ...]:
    return struct.unpack(f"<{len(data) // 8}d", data)


_BATCHES = "SELECT number, policy_step, version, tip, passed_over, passed_reward FROM batches"
_INSERT = """INSERT INTO batches (number, policy_step, version, tip, passed_over, passed_reward)
    VALUES (?, ?, ?, ?, ?, ?)"""
_GROUPS = "SELECT id, sampler, slot, head, step, sealed, rewards FROM groups"
_OF_BATCH = f"{_GROUPS} WHERE batch = ? ORDER BY place"
_OF_VERSION = """SELECT id, sampler, slot, head, step, NULL, rewards FROM groups
    JOIN batches ON groups.batch = batches.number WHERE version = ? ORDER BY batch, place"""
_KEEP = """INSERT OR IGNORE INTO groups (id, sampler, slot, head, step, state, why, sealed)
    VALUES (?, ?, ?, ?, ?, ?, '', ?)"""
_DRAW = "UPDATE groups SET state = 1, batch = ?, place = ?, rewards = ? WHERE id = ? AND state = 0"
_DROP = "UPDATE groups SET state = 2, why = ?, sealed = NULL WHERE id = ? AND state = 0"
_IS_PAST = "SELECT 1 FROM groups WHERE id = ? AND state != 0"
_EXPIRE = "UPDATE groups SET state = 2, why = 'stale', sealed = NULL WHERE state = 0 AND step < ?"
_FOLLOW = """UPDATE groups SET state = 1, why = '', batch = ?, place = ?, rewards = ?, sealed = coalesce(sealed, ?), signature = ?
    WHERE id = ?"""
_IS_USED = "SELECT 1 FROM groups WHERE id = ? AND batch IS NOT NULL"
_DISOWN = """UPDATE groups SET state = 2, why = 'forked-head', sealed = NULL, batch = NULL, place = NULL, rewards = NULL
    WHERE batch = ?"""
# A sealed message ends with its 64-byte signature over the id: the two suffice to check it.
_EMPTY = """UPDATE groups SET signature = substr(sealed, -64), sealed = NULL WHERE batch <= ? AND sealed IS NOT NULL"""
_FORGET_DROPPED = """DELETE FROM groups WHERE state = 2 AND step < ?
    AND seq <= (SELECT coalesce(max(seq), 0) FROM groups) - ?"""
_CONDEMNED = "SELECT 1 FROM verdicts WHERE id = ? AND result = 'dishonest'"
_FIND = """INSERT INTO verdicts (id, sampler, verifier, result, reason, at, after)
    VALUES (?, ?, ?, ?, ?, ?, (SELECT coalesce(max(number), 0) FROM batches))
    ON CONFLICT DO UPDATE SET result = excluded.result, reason = excluded.reason, at = excluded.at, after = excluded.after
    WHERE instr(' undecided honest dishonest', ' ' || excluded.result)
        > instr(' undecided honest dishonest', ' ' || verdicts.result)"""
_TRIM_VERDICTS = "DELETE FROM verdicts WHERE seq <= (SELECT coalesce(max(seq), 0) FROM verdicts) - ?"
