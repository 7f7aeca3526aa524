"""The training journal: every group that was acknowledged, and what became of it, on disk before anybody is told.

A batch is written down, in its order and with its rewards, before anything is learnt from it. So after `kill -9` the same
batches can be learnt from again and give the same bits, and no group is lost or used twice. Once a checkpoint covers a batch,
only the facts of its groups and their signatures stay, which is what `echo-node weights provenance` reads; so the signatures
of all that was ever learnt from can be checked again. A trainer that stands by writes down what the leader has learnt from, and
what it acknowledged. It knows no network and no model.
"""

from __future__ import annotations

import sqlite3
import struct
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from echo_node.attesting import Sums
from echo_node.errors import StoreError, boundary
from echo_node.net.outbox.durable import DurableFile, Kind, open_durable
from echo_node.trainer import tallying
from protocol import Opened, TrajectoryGroup, limits

BATCHES_KEPT: Final = 100_000
"""Batches whose groups can be named; of older ones the heads' Merkle roots are what is left."""
DROPPED_KEPT: Final = 65_536
"""Arrivals for which it can be said why a group was dropped."""
VERDICTS_KEPT: Final = 65_536
JOURNAL_MARK: Final = 0x4563_544A
_IN_MEMORY: Final = Path(":memory:")
_WAITING, _DRAWN, _DROPPED = 0, 1, 2
_ANY: Final = limits.SAFE_INTEGER
"""No version is later."""
_LAST_NUMBER: Final = "SELECT coalesce(max(number), 0) FROM batches WHERE version <= ?"
_KIND: Final = Kind(
    name="training journal",
    mark=JOURNAL_MARK,
    version=1,
    schema=(
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
)
_ADDED: Final = (("groups", "signature", "BLOB"), ("verdicts", "after", "INTEGER"))
"""Columns that journals of earlier programs lack. `after`: the newest batch when a finding came."""


@dataclass(frozen=True, slots=True)
class KeptGroup:
    """A group with the facts that outlive its bytes. `step` is that of the policy that drew it."""

    id: bytes
    sampler: bytes
    slot: int
    head: bytes
    step: int
    sealed: bytes | None
    rewards: tuple[float, ...] | None = None
    """Of its completions, as the trainer computed them; none, before that."""
    signature: bytes | None = None
    """Its sampler's, where its bytes were never here."""

    @classmethod
    def of(
        cls, group: Opened[TrajectoryGroup], step: int, rewards: Sequence[float] | None = None
    ) -> KeptGroup:
        told = group.message
        worth = None if rewards is None else tuple(rewards)
        return cls(group.id, group.signer, told.slot, told.heads[0], step, group.sealed, worth)


@dataclass(frozen=True, slots=True)
class Batch:
    """What one step learns from, in order. `version` is that of the head that commits to it, `tip` the newest head then."""

    number: int
    policy_step: int
    version: int
    groups: tuple[KeptGroup, ...]
    tip: bytes = b""

    @property
    def is_whole(self) -> bool:
        """Whether it can be learnt from again."""
        return all(group.sealed is not None for group in self.groups)


@dataclass(frozen=True, slots=True)
class Finding:
    """What a verifier found of a group, as the trainer took it. `at` is Unix time."""

    group: bytes
    sampler: bytes
    verifier: bytes
    result: str
    reason: str
    at: float


class TrainingJournal:
    """The journal of one trainer and run. `open_journal` makes it. What a call changes is on disk when it returns."""

    def __init__(self, file: DurableFile) -> None:
        self._file = file

    async def keep(self, groups: Sequence[KeptGroup]) -> frozenset[bytes]:
        """Have these groups wait; from now on they may be acknowledged. Returns those that were used or dropped before."""
        rows = [(*_facts(group), _WAITING, group.sealed) for group in groups]

        def write(file: sqlite3.Connection) -> frozenset[bytes]:
            file.executemany(_KEEP, rows)
            return frozenset(each.id for each in groups if file.execute(_IS_PAST, (each.id,)).fetchone())

        return await self._file.transact(write)

    async def expire(self, step: int) -> int:
        """Drop what waits and was drawn from policies before a step. How many groups still wait."""

        def write(file: sqlite3.Connection) -> int:
            file.execute(_EXPIRE, (step,))
            return int(file.execute("SELECT count(*) FROM groups WHERE state = 0").fetchone()[0])

        return await self._file.transact(write)

    async def drop(self, why: Mapping[bytes, str]) -> None:
        """These groups are not learnt from, and why. What a batch has is past changing."""
        rows = [(reason, group) for group, reason in why.items()]
        await self._file.transact(lambda file: file.executemany(_DROP, rows))

    async def draw(self, batch: Batch, left_out: Mapping[bytes, str] | None = None) -> frozenset[bytes]:
        """Write a batch down, and what was left out of it: all of it or nothing. Its groups may be new to the journal.

        A batch with groups that were found dishonest meanwhile is not written; these are returned.
        """

        def write(file: sqlite3.Connection) -> frozenset[bytes]:
            ids = [group.id for group in batch.groups]
            if condemned := frozenset(each for each in ids if file.execute(_CONDEMNED, (each,)).fetchone()):
                return condemned
            file.executemany(_DROP, [(reason, group) for group, reason in (left_out or {}).items()])
            file.execute(
                "INSERT INTO batches VALUES (?, ?, ?, ?)",
                (batch.number, batch.policy_step, batch.version, batch.tip),
            )
            for place, group in enumerate(batch.groups):
                file.execute(_KEEP, (*_facts(group), _WAITING, group.sealed))
                rewards = _packed(group.rewards or ())
                if not file.execute(_DRAW, (batch.number, place, rewards, group.id)).rowcount:
                    raise StoreError(f"group {group.id.hex()[:16]} was used before, or dropped")
            return frozenset()

        return await self._file.transact(write)

    async def follow(self, batches: Sequence[Batch]) -> frozenset[bytes]:
        """Write down batches that another trainer has learnt from: all of them or nothing. Numbers are this journal's own.

        Whatever was thought of their groups here, they were used. Where some are in batches already, nothing is written, and
        these are returned.
        """

        def write(file: sqlite3.Connection) -> frozenset[bytes]:
            ids = [group.id for batch in batches for group in batch.groups]
            if twice := frozenset(each for each in ids if file.execute(_IS_USED, (each,)).fetchone()):
                return twice
            for batch in batches:
                number = max(batch.number, file.execute(_LAST_NUMBER, (_ANY,)).fetchone()[0] + 1)
                row = (number, batch.policy_step, batch.version, batch.tip)
                file.execute("INSERT INTO batches VALUES (?, ?, ?, ?)", row)
                for place, group in enumerate(batch.groups):
                    file.execute(_KEEP, (*_facts(group), _WAITING, None))
                    rewards = _packed(group.rewards or ())
                    values = (number, place, rewards, group.sealed, group.signature, group.id)
                    file.execute(_FOLLOW, values)
            return frozenset()

        return await self._file.transact(write)

    async def settle(self, number: int, *, step: int, kept: int = BATCHES_KEPT) -> None:
        """A checkpoint covers the batches up to this one: the bytes of their groups may go, and their signatures stay.

        What was dropped under policies before `step`, which nobody may sample under any more, goes once much else has come.
        """

        def let_go(file: sqlite3.Connection) -> None:
            file.execute(_EMPTY, (number,))
            file.execute(_FORGET_DROPPED, (step, DROPPED_KEPT))
            file.execute("DELETE FROM groups WHERE batch <= ?", (number - kept,))
            file.execute("DELETE FROM batches WHERE number <= ?", (number - kept,))
            file.execute(_TRIM_VERDICTS, (VERDICTS_KEPT,))

        await self._file.transact(let_go)

    async def disown(self, numbers: Sequence[int]) -> None:
        """These batches led to a branch of the chain that was left: no version here was trained on them."""
        rows = [(number,) for number in numbers]

        def forget(file: sqlite3.Connection) -> None:
            file.executemany(_DISOWN, rows)
            file.executemany("DELETE FROM batches WHERE number = ?", rows)

        await self._file.transact(forget)

    async def waiting(self) -> list[KeptGroup]:
        """What was acknowledged and is in no batch, in the order in which it came."""
        return [_group(row) for row in await self._rows(f"{_GROUPS} WHERE state = {_WAITING} ORDER BY seq")]

    async def filled(self, heads: Collection[bytes]) -> list[KeptGroup]:
        """Groups under these heads that have been used or dropped: their slots are filled."""
        named = ", ".join("?" * len(heads))
        question = f"{_GROUPS} WHERE head IN ({named}) AND state != {_WAITING} ORDER BY slot, seq"
        return [_group(row) for row in await self._rows(question, tuple(heads))]

    async def batches(self, *, after: int = 0, version: int | None = None) -> list[Batch]:
        """The batches beyond a number, or those that one version was trained on, oldest first."""

        def read(file: sqlite3.Connection) -> list[Batch]:
            if version is None:
                found = file.execute(
                    "SELECT * FROM batches WHERE number > ? ORDER BY number", (after,)
                ).fetchall()
            else:
                found = file.execute(
                    "SELECT * FROM batches WHERE version = ? ORDER BY number", (version,)
                ).fetchall()
            return [
                Batch(
                    number,
                    step,
                    told,
                    tuple(_group(each) for each in file.execute(_OF_BATCH, (number,))),
                    tip,
                )
                for number, step, told, tip in found
            ]

        return await self._file.transact(read)

    async def last_number(self, version: int = _ANY) -> int:
        """The number of the newest batch, of versions up to one; 0, if there is none."""
        return int((await self._rows(_LAST_NUMBER, (version,)))[0][0])

    async def states(self) -> dict[bytes, str]:
        """What became of each group that is known: `waiting`, `drawn`, or why it was dropped."""
        names = {_WAITING: "waiting", _DRAWN: "drawn"}
        rows = await self._rows("SELECT id, state, why FROM groups ORDER BY seq")
        return {row[0]: names.get(row[1], row[2]) for row in rows}

    async def sums(self, sampler: bytes) -> Sums:
        """What became of a sampler's groups, ever since they are counted."""
        return await self._file.transact(lambda file: tallying.sums(file, sampler))

    async def join(self, key: bytes, sealed: bytes) -> None:
        """A sampler has joined; the last join of a key counts."""
        row = (key, sealed)
        await self._file.transact(
            lambda file: file.execute("INSERT OR REPLACE INTO joins VALUES (?, ?)", row)
        )

    async def joins(self) -> list[bytes]:
        """Every join, sealed."""
        return [row[0] for row in await self._rows("SELECT sealed FROM joins ORDER BY key")]

    async def find(self, findings: Sequence[Finding]) -> None:
        """Keep what verifiers found; of one that says several things of one group, the gravest."""
        rows = [
            (each.group, each.sampler, each.verifier, each.result, each.reason, each.at) for each in findings
        ]
        await self._file.transact(lambda file: file.executemany(_FIND, rows))

    async def findings(self) -> list[Finding]:
        """In the order in which they were found."""
        rows = await self._rows(
            "SELECT id, sampler, verifier, result, reason, at FROM verdicts ORDER BY at, seq"
        )
        return [Finding(*row) for row in rows]

    async def belongs_to(self, run: bytes) -> None:
        """Raise unless the journal is of this run; a new one becomes so."""

        def claim(file: sqlite3.Connection) -> bytes:
            for table, column, kind in _ADDED:
                if column not in {row[1] for row in file.execute(f"PRAGMA table_info({table})")}:
                    file.execute(f"ALTER TABLE {table} ADD COLUMN {column} {kind}")
            tallying.begin(file)
            file.execute("INSERT INTO run SELECT ? WHERE NOT EXISTS (SELECT 1 FROM run)", (run,))
            found: bytes = file.execute("SELECT id FROM run").fetchone()[0]
            return found

        if await self._file.transact(claim) != run:
            raise StoreError(
                f"{self._file} is of another run", advice="give this trainer a folder of its own"
            )

    async def _rows(self, question: str, values: Sequence[object] = ()) -> list[Any]:
        return await self._file.transact(lambda file: file.execute(question, values).fetchall())


@asynccontextmanager
async def open_journal(path: Path | None, run: bytes) -> AsyncGenerator[TrainingJournal]:
    """The journal in this file, made if there is none; without a path, one that is gone afterwards."""
    async with open_durable(path or _IN_MEMORY, _KIND) as file:
        journal = TrainingJournal(file)
        await journal.belongs_to(run)
        yield journal


def read_trained(path: Path, version: int) -> list[KeptGroup]:
    """The groups that a version was trained on, from a journal that no trainer has open (`StoreError`). Changes nothing."""
    place = f"{path.resolve().as_uri()}?mode=ro"
    with (
        boundary(StoreError, f"reading {path}", advice="a trainer that runs has it to itself"),
        closing(sqlite3.connect(place, uri=True, timeout=0.5)) as file,
    ):
        return [_group(row) for row in file.execute(_OF_VERSION, (version,))]


def _facts(group: KeptGroup) -> tuple[bytes, bytes, int, bytes, int]:
    return group.id, group.sampler, group.slot, group.head, group.step


def _group(row: Sequence[Any]) -> KeptGroup:
    id_, sampler, slot, head, step, sealed, rewards = row
    return KeptGroup(id_, sampler, slot, head, step, sealed, None if rewards is None else _unpacked(rewards))


def _packed(rewards: Sequence[float]) -> bytes:
    return struct.pack(f"<{len(rewards)}d", *rewards)


def _unpacked(data: bytes) -> tuple[float, ...]:
    return struct.unpack(f"<{len(data) // 8}d", data)


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
# A sealed message ends with the 64 bytes of its signature, which is over the id: the two are enough to check it.
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
