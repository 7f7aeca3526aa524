"""Problems with exact answers from JSON lines, `{"problem": …, "answer": …}`.

A run names the file and pins it by its BLAKE3 hash; the file lies in `folder()`, or beside this
module for the sample.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from blake3 import blake3

from echo_node.errors import ContractError, boundary

VARIABLE: Final = "ECHO_NODE_DATA"
"""Environment variable with the folder, for processes that have another home."""
SAMPLE: Final = "sample.jsonl"
SAMPLE_HASH: Final = "ce4c4c823d364e02ec3d52b4f9a7935928ff330b81d53df426d4a873ecea96f0"
LARGEST: Final = 256 * 2**20  # bytes of a file
LONGEST: Final = 16 * 1024  # characters of a problem
_NAME: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}")
_HASH: Final = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem and its exact answer."""

    text: str
    answer: str


def folder() -> Path:
    """Return the folder of problem files; a jail gets it by environment variable."""
    named = os.environ.get(VARIABLE)
    return Path(named) if named else Path.home() / ".cache" / "echo-node" / "data"


def read_problems(name: str, wanted: str) -> list[Problem]:
    """Return the problems of the file with this name and hash.

    The error for a missing file says where to put it.
    """
    if not _NAME.fullmatch(name):
        raise ContractError(
            f"{name!r} is no plain name of a file", advice="folders are this machine's matter"
        )
    if not _HASH.fullmatch(wanted):
        raise ContractError(
            f"{name} is pinned by its BLAKE3 hash, 64 hex digits, not {wanted!r}",
            advice=f"`b3sum {name}` prints it; give it as the parameter blake3",
        )
    for place in (folder(), Path(__file__).parent):
        path = place / name
        if path.is_file():
            return _read(path, wanted)
    raise ContractError(f"this machine has no {name}", advice=f"put it into {folder()}")


def _read(path: Path, wanted: str) -> list[Problem]:
    with boundary(ContractError, f"reading {path}"):
        if path.stat().st_size > LARGEST:
            raise ValueError(f"it has more than {LARGEST} bytes")
        data = path.read_bytes()
    if (found := blake3(data).hexdigest()) != wanted:
        raise ContractError(
            f"{path} is not the file that the run names: its BLAKE3 hash is {found}, not {wanted}",
            advice="whoever runs this run can tell where the right one is",
        )
    with boundary(ContractError, f"reading {path}"):
        problems = [_problem(line) for line in data.decode("utf-8").split("\n") if line.strip()]
        if not problems:
            raise ValueError("it holds no problem")
    return problems


def _problem(line: str) -> Problem:
    row = json.loads(line)
    text, answer = row["problem"], row["answer"]
    if type(text) is not str or type(answer) is not str or not answer or len(line) > LONGEST:
        raise ValueError(f"this is no problem with an answer: {line[:80]!r}")
    return Problem(text, answer)
