"""The records of a run in SQLite, so that they outlive the process and can be asked: steps, and the groups of each.

Any number of programs may read the file while it grows. What a step was made of is the journal's to prove; this is for people
and plots, and is not synced at every step. It knows nothing of training.
"""

from __future__ import annotations

import dataclasses
import json
import sqlite3
from collections.abc import Generator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Final

from echo_node.errors import StoreError
from echo_node.metrics import StepRecord, TrainedGroup

BUSY_SECONDS: Final = 5.0
_MARK: Final = 0x4563_5245
_FORMAT: Final = 1
_APART: Final = ("groups", "dropped")
_PLAIN: Final = tuple(field.name for field in dataclasses.fields(StepRecord) if field.name not in _APART)
_TYPES: Final = {"int": "INTEGER", "float": "REAL", "bytes": "BLOB"}
_COLUMNS: Final = ", ".join(
    f"{field.name} {_TYPES[str(field.type)]} NOT NULL{' PRIMARY KEY' if field.name == 'number' else ''}"
    for field in dataclasses.fields(StepRecord)
    if field.name not in _APART
)
_SCHEMA: Final = (
    f"CREATE TABLE steps ({_COLUMNS}, staleness TEXT NOT NULL, dropped TEXT NOT NULL)",
    """CREATE TABLE trained (
        number INTEGER NOT NULL, place INTEGER NOT NULL, id BLOB NOT NULL, sampler BLOB NOT NULL, slot INTEGER NOT NULL,
        head BLOB NOT NULL, step INTEGER NOT NULL, PRIMARY KEY (number, place)
    ) WITHOUT ROWID""",
    "CREATE INDEX trained_of_samplers ON trained (sampler)",
    """CREATE VIEW samplers AS
        SELECT hex(sampler) AS sampler, count(*) AS groups, count(DISTINCT number) AS steps FROM trained GROUP BY sampler""",
)


class RecordsFile:
    """One file of records, opened by whoever writes it. A step that is written again replaces what was there."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with _explained(path):
            self._file = _connect(path)
            try:
                _check(self._file, path)
                # A process that is killed loses nothing; a power cut may cost the last steps, which the journal has.
                self._file.execute("PRAGMA journal_mode = WAL")
                self._file.execute("PRAGMA synchronous = NORMAL")
            except BaseException:
                self._file.close()
                raise

    def write(self, record: StepRecord) -> None:
        values = [getattr(record, name) for name in _PLAIN]
        ages = json.dumps({str(age): count for age, count in sorted(record.staleness.items())})
        marks = ", ".join("?" * (len(values) + 2))
        with _explained(self._path), self._file:
            self._file.execute("BEGIN IMMEDIATE")
            self._file.execute("DELETE FROM trained WHERE number = ?", (record.number,))
            self._file.execute(
                f"INSERT OR REPLACE INTO steps ({', '.join(_PLAIN)}, staleness, dropped) VALUES ({marks})",  # noqa: S608 - names of our own fields
                (*values, ages, json.dumps(record.dropped, sort_keys=True)),
            )
            self._file.executemany(
                "INSERT INTO trained VALUES (?, ?, ?, ?, ?, ?, ?)",
                [
                    (record.number, place, each.id, each.sampler, each.slot, each.head, each.step)
                    for place, each in enumerate(record.groups)
                ],
            )

    def close(self) -> None:
        with _explained(self._path):
            self._file.close()


def read_records(path: Path, *, after: int = -1) -> list[StepRecord]:
    """The steps in a file after that number, in order; none, if there is no such file. Whoever writes it may go on meanwhile."""
    if not path.is_file() or not path.stat().st_size:
        return []  # an empty one is what is left where a start was cut off
    with _explained(path), closing(_connect(path)) as file:
        _check_marks(path, *(file.execute(question).fetchone()[0] for question in _QUESTIONS[:2]))
        file.execute("BEGIN")
        groups: dict[int, list[TrainedGroup]] = {}
        for number, *told in file.execute(
            "SELECT number, id, sampler, slot, head, step FROM trained WHERE number > ? ORDER BY number, place",
            (after,),
        ):
            groups.setdefault(number, []).append(TrainedGroup(*told))
        question = f"SELECT {', '.join(_PLAIN)}, dropped FROM steps WHERE number > ? ORDER BY number"  # noqa: S608 - names of our own fields
        return [_record(row, groups) for row in file.execute(question, (after,))]


def _record(row: tuple[Any, ...], groups: dict[int, list[TrainedGroup]]) -> StepRecord:
    told = dict(zip(_PLAIN, row, strict=False))
    return StepRecord(**told, groups=tuple(groups.get(told["number"], ())), dropped=json.loads(row[-1]))


_QUESTIONS: Final = ("PRAGMA application_id", "PRAGMA user_version", "SELECT count(*) FROM sqlite_schema")


def _connect(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)


def _check(file: sqlite3.Connection, path: Path) -> None:
    mark, version, tables = (file.execute(question).fetchone()[0] for question in _QUESTIONS)
    if (mark, version, tables) == (0, 0, 0):
        for statement in ("BEGIN", *_SCHEMA):
            file.execute(statement)
        file.execute(f"PRAGMA application_id = {_MARK}")
        file.execute(f"PRAGMA user_version = {_FORMAT}")
        file.execute("COMMIT")
    else:
        _check_marks(path, mark, version)


def _check_marks(path: Path, mark: int, version: int) -> None:
    if (mark, version) != (_MARK, _FORMAT):
        raise StoreError(
            f"{path} is another program's file, or another version's",
            advice="run the echo-node that wrote it, or move the file away: training does not need it",
        )


@contextmanager
def _explained(path: Path) -> Generator[None]:
    try:
        yield
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        room = "free some space, or " if code == sqlite3.SQLITE_FULL else ""
        advice = f"{room}move the file away: a new one is made, and training does not need it"
        raise StoreError(f"using the records {path}: {error}", advice=advice) from error
