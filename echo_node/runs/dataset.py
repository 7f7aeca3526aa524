"""Make a run's data set: checked rows, cut into train and held-out, one blob.

A row is held out by a hash of its normalised problem alone, salted by the run's nonce: the same
problem never stands on both sides, whatever its answer, its place or its spelling.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, Field

from echo_node.errors import ConfigError, boundary
from protocol import blob_id, limits
from protocol.digest import derive
from protocol.manifest import DataSet

FILE: Final = "data.jsonl"
_PROBLEM_CHARACTERS: Final = 64 * 1024
_ANSWER_CHARACTERS: Final = 4096
_SPACE: Final = re.compile(r"\s+")


class DataTable(BaseModel):
    """Source of a run's data, and the names of its fields."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, strict=True)

    source: str = Field(min_length=1, max_length=4096)
    """A .jsonl, .json, .csv or .parquet file, or a hub's owner/name."""
    split: str = "train"
    """Which files of a hub's data set; a single file is taken whole."""
    problem: str = "problem"
    """Field of the problem."""
    answer: str = "answer"
    """Field of the answer."""
    pattern: str = ""
    """Regular expression whose group is the answer within its field, such as `#### (.+)`."""
    held_out: float = Field(default=0.1, ge=0.0, lt=1.0)
    """Share of the problems that training never sees; at least one row."""


@dataclass(frozen=True, slots=True)
class Row:
    """One problem with its answer; `worked` is the answer's field with its steps."""

    problem: str
    answer: str
    worked: str


def check_rows(found: Iterable[tuple[str, Any]], table: DataTable) -> list[Row]:
    """Return the rows by the table's fields; refuse the first bad one by its place."""
    pattern = _pattern(table.pattern)
    rows: list[Row] = []
    seen: dict[str, str] = {}
    for where, given in found:
        row = _row(where, given, table, pattern)
        same = normalise(row.problem)
        if same in seen:
            raise ConfigError(
                f"{where} has the same problem as {seen[same]}: {row.problem[:60]!r}",
                advice="leave one of the two out: equal rows would count twice",
            )
        seen[same] = where
        rows.append(row)
    if not rows:
        raise ConfigError(f"{table.source} holds no row", advice="give a file with rows")
    return rows


def normalise(problem: str) -> str:
    """Return a problem's normal form for comparison, without case and spacing."""
    return _SPACE.sub(" ", unicodedata.normalize("NFKC", problem)).strip().casefold()


def is_held_out(problem: str, nonce: bytes, share: float) -> bool:
    """Decide by the normalised problem and the run's nonce whether a row is held out."""
    draw = int.from_bytes(derive("held-out row", nonce, normalise(problem).encode())[:8], "big")
    return draw < share * 2.0**64


def cut(rows: Iterable[Row], nonce: bytes, share: float) -> tuple[list[Row], list[Row]]:
    """Return training rows and held-out rows, split and ordered by problem hash."""
    ordered = sorted(rows, key=lambda row: derive("held-out row", nonce, normalise(row.problem).encode()))
    held = [row for row in ordered if is_held_out(row.problem, nonce, share)]
    if not held and share > 0 and len(ordered) > 1:
        held = ordered[:1]  # the lowest hash: the first that a larger share would hold out
    return ordered[len(held) :], held


def write_rows(train: Iterable[Row], held_out: Iterable[Row]) -> bytes:
    """Return the blob: JSON lines, the held-out rows last."""
    return b"".join(_line(row) for part in (train, held_out) for row in part)


def describe(data: bytes, held_out: int) -> DataSet:
    """Return the manifest's entry for a data set."""
    if len(data) > limits.DATA_BYTES:
        raise ConfigError(
            f"the data set has {len(data):,} bytes, and {limits.DATA_BYTES:,} may travel with a run",
            advice="give fewer rows",
        )
    with boundary(ConfigError, "describing the data set", advice="hold out less with data.held_out"):
        return DataSet(blob=blob_id(data), held_out=held_out, rows=data.count(b"\n"), size=len(data))


def _line(row: Row) -> bytes:
    return json.dumps({"answer": row.answer, "problem": row.problem}, ensure_ascii=False).encode() + b"\n"


def _row(where: str, given: Any, table: DataTable, pattern: re.Pattern[str] | None) -> Row:
    if not isinstance(given, dict):
        raise ConfigError(f"{where} is no table of fields", advice="each row has named fields")
    problem, worked = (_text(where, given, name) for name in (table.problem, table.answer))
    answer = worked
    if pattern is not None:
        found = pattern.search(worked)
        if found is None:
            raise ConfigError(
                f"{where}: data.pattern {table.pattern!r} finds no answer in {worked[-60:]!r}",
                advice="mend the pattern or the row",
            )
        answer = found.group(1) or ""
    answer = answer.strip()
    if not problem.strip():
        raise ConfigError(f"{where}: the field {table.problem!r} is empty", advice="leave that row out")
    if not answer:
        raise ConfigError(f"{where}: the answer is empty", advice="leave that row out, or mend data.pattern")
    if len(problem) > _PROBLEM_CHARACTERS or len(answer) > _ANSWER_CHARACTERS:
        raise ConfigError(
            f"{where}: a problem has at most {_PROBLEM_CHARACTERS:,} characters and an answer {_ANSWER_CHARACTERS:,}",
            advice="with data.pattern the answer can be taken out of a longer field",
        )
    return Row(problem.strip(), answer, worked.strip())


def _text(where: str, given: dict[str, Any], name: str) -> str:
    if name not in given or given[name] is None:
        known = ", ".join(map(str, list(given)[:8]))
        raise ConfigError(
            f"{where} has no field {name!r}; it has {known}",
            advice="name its fields with data.problem and data.answer",
        )
    value = given[name]
    if type(value) in (int, float):
        return json.dumps(value)
    if type(value) is not str:
        raise ConfigError(f"{where}: the field {name!r} is a {type(value).__name__}, not a text or a number")
    with boundary(ConfigError, f"{where}: the field {name!r}"):
        value.encode()
    return value


def _pattern(text: str) -> re.Pattern[str] | None:
    if not text:
        return None
    with boundary(ConfigError, f"reading data.pattern {text!r}", advice="write it like '#### (.+)'"):
        found = re.compile(text)
    if found.groups != 1:
        raise ConfigError(
            f"data.pattern {text!r} has {found.groups} groups, and the answer is one", advice="'#### (.+)'"
        )
    return found
