"""Step records and their groups in SQLite, for people and plots.

Any number of programs may read the file while it grows. It is not synced at every step: the
trainer's journal is the durable record.
"""

from __future__ import annotations

import dataclasses
import json
import sqlite3
from pathlib import Path
from typing import Any, Final

from echo_node.storage.sqlite import DatabaseSpec, explain_errors, open_database, open_reader
from echo_node.telemetry.evaluations import Evaluation
from echo_node.telemetry.metrics import StepRecord, TrainedGroup

_APART: Final = ("groups", "dropped")
_PLAIN: Final = tuple(field.name for field in dataclasses.fields(StepRecord) if field.name not in _APART)
_TYPES: Final = {"int": "INTEGER", "float": "REAL", "bytes": "BLOB", "str": "TEXT"}
_COLUMNS: Final = ", ".join(
    f"{field.name} {_TYPES[str(field.type)]} NOT NULL{' PRIMARY KEY' if field.name == 'number' else ''}"
    for field in dataclasses.fields(StepRecord)
    if field.name not in _APART
)
_MEASURED: Final = tuple(field.name for field in dataclasses.fields(Evaluation))


def _add_evaluations(file: sqlite3.Connection) -> None:
    columns = ", ".join(
        f"{field.name} {_TYPES[str(field.type)]} NOT NULL{' PRIMARY KEY' if field.name == 'version' else ''}"
        for field in dataclasses.fields(Evaluation)
    )
    file.execute(f"CREATE TABLE IF NOT EXISTS evaluations ({columns})")


_DATABASE: Final = DatabaseSpec(
    name="records",
    mark=0x4563_5245,
    migrations={
        0: (
            f"CREATE TABLE steps ({_COLUMNS}, staleness TEXT NOT NULL, dropped TEXT NOT NULL)",
            """CREATE TABLE trained (
                number INTEGER NOT NULL, place INTEGER NOT NULL, id BLOB NOT NULL, sampler BLOB NOT NULL, slot INTEGER NOT NULL,
                head BLOB NOT NULL, step INTEGER NOT NULL, PRIMARY KEY (number, place)
            ) WITHOUT ROWID""",
            "CREATE INDEX trained_of_samplers ON trained (sampler)",
            """CREATE VIEW samplers AS
                SELECT hex(sampler) AS sampler, count(*) AS groups, count(DISTINCT number) AS steps FROM trained GROUP BY sampler""",
        ),
    },
    additions=_add_evaluations,
    durable=False,  # a process that is killed loses nothing; a power cut may cost steps that the journal has
    checked=False,
    expendable="training does not need it",
)


class StepDb:
    """Writer of one database file; a rewritten step replaces its earlier row."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = open_database(path, _DATABASE)

    def write(self, record: StepRecord) -> None:
        values = [getattr(record, name) for name in _PLAIN]
        ages = json.dumps({str(age): count for age, count in sorted(record.staleness.items())})
        marks = ", ".join("?" * (len(values) + 2))
        with explain_errors(self._path, _DATABASE, "using"), self._file:
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

    def write_evaluation(self, found: Evaluation) -> None:
        with explain_errors(self._path, _DATABASE, "using"), self._file:
            self._file.execute(
                f"INSERT OR REPLACE INTO evaluations VALUES ({', '.join('?' * len(_MEASURED))})",  # noqa: S608 - only marks
                [getattr(found, name) for name in _MEASURED],
            )

    def close(self) -> None:
        with explain_errors(self._path, _DATABASE, "closing"):
            self._file.close()


def read_records(path: Path, *, after: int = -1) -> list[StepRecord]:
    """Return the records after that number, in order; the writer may go on meanwhile.

    Without a file there are none.
    """
    if not path.is_file() or not path.stat().st_size:
        return []  # an empty one is what is left where a start was cut off
    with open_reader(path, _DATABASE, live=True) as file:
        file.execute("BEGIN")
        groups: dict[int, list[TrainedGroup]] = {}
        for number, *columns in file.execute(
            "SELECT number, id, sampler, slot, head, step FROM trained WHERE number > ? ORDER BY number, place",
            (after,),
        ):
            groups.setdefault(number, []).append(TrainedGroup(*columns))
        question = f"SELECT {', '.join(_PLAIN)}, dropped FROM steps WHERE number > ? ORDER BY number"  # noqa: S608 - names of our own fields
        return [_record(row, groups) for row in file.execute(question, (after,))]


def _record(row: tuple[Any, ...], groups: dict[int, list[TrainedGroup]]) -> StepRecord:
    fields = dict(zip(_PLAIN, row, strict=False))
    return StepRecord(**fields, groups=tuple(groups.get(fields["number"], ())), dropped=json.loads(row[-1]))
