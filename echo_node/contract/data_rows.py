"""Rows of a run's data set, as contracts read them: JSON lines, parsed one by one.

    train = read_rows(path, rows, held_out, "train")
    train[0]["problem"], train[0]["answer"]

The file has the rows to train on first and the held-out ones last. Which part a contract gets is
decided by whoever loads it: it cannot draw a row of the other part.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, Literal, overload

from echo_node.errors import ContractError, boundary
from protocol import limits

Part = Literal["train", "held-out"]
FIELDS: Final = ("problem", "answer")
"""Fields that every row has."""


class Rows(Sequence[Mapping[str, str]]):
    """Some rows of a data set; a row is parsed when it is read."""

    def __init__(self, data: bytes, starts: Sequence[int]) -> None:
        self._data = data
        self._starts = starts

    def __len__(self) -> int:
        return len(self._starts)

    @overload
    def __getitem__(self, index: int) -> Mapping[str, str]: ...
    @overload
    def __getitem__(self, index: slice) -> Rows: ...
    def __getitem__(self, index: int | slice) -> Mapping[str, str] | Rows:
        if isinstance(index, slice):
            return Rows(self._data, self._starts[index])
        start = self._starts[index]
        return _row(self._data[start : self._data.index(b"\n", start)])

    def __iter__(self) -> Iterator[Mapping[str, str]]:
        return (self[index] for index in range(len(self)))


def read_rows(path: Path, rows: int, held_out: int, part: Part) -> Rows:
    """Return one part of the data set in a file of so many rows."""
    with boundary(ContractError, f"reading the data set {path.name}"):
        if path.stat().st_size > limits.DATA_BYTES:
            raise ValueError(f"it has more than {limits.DATA_BYTES} bytes")
        return rows_of(path.read_bytes(), rows, held_out, part)


def rows_of(data: bytes, rows: int, held_out: int, part: Part) -> Rows:
    """Return one part of a data set; raise `ValueError` if it has not so many rows."""
    starts, at = array("Q"), 0
    while at < len(data):
        starts.append(at)
        at = data.index(b"\n", at) + 1
    if len(starts) != rows or not 0 <= held_out < rows:
        raise ValueError(f"it has {len(starts)} rows, and the run names {rows}, {held_out} of them held out")
    cut = rows - held_out
    return Rows(data, starts[:cut] if part == "train" else starts[cut:])


def _row(line: bytes) -> Mapping[str, str]:
    found = json.loads(line)
    if not isinstance(found, dict) or not all(type(found.get(name)) is str for name in FIELDS):
        raise ValueError(f"a row without {' and '.join(FIELDS)}")
    return found
