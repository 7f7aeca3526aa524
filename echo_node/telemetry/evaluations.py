"""Evaluations of versions on held-out prompts: record, file, best one."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from echo_node.errors import StoreError, boundary
from echo_node.storage import files

FILE: Final = "evaluations.jsonl"
_MOST_BYTES: Final = 64 * 1024 * 1024
"""Most bytes of the file; one line has about 250."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Mean reward of one version, with standard error and decoding settings."""

    version: int
    step: int
    prompts: int
    reward: float
    error: float
    head: str = ""
    """Id of the version's head, in hex."""
    temperature: float = 0.0
    max_tokens: int = 0
    engine: str = ""
    seconds: float = 0.0
    """How long it took inside a run; 0 by `echo-node run eval`."""

    @property
    def decoding(self) -> tuple[float, int]:
        """Return what must be the same for two rewards to be comparable."""
        return self.temperature, self.max_tokens

    def plain(self) -> dict[str, Any]:
        """Return the record for JSON."""
        return asdict(self)


def append_evaluation(folder: Path, found: Evaluation) -> None:
    """Append an evaluation to the run's folder, on disk before this returns."""
    file = folder / FILE
    with boundary(StoreError, f"writing to {file}"), file.open("a+b") as lines:
        size = lines.seek(0, os.SEEK_END)
        lines.seek(max(0, size - 1))
        torn = size and lines.read(1) != b"\n"
        lines.write((b"\n" if torn else b"") + json.dumps(found.plain()).encode() + b"\n")
        lines.flush()
        os.fsync(lines.fileno())


def read_evaluations(folder: Path) -> list[Evaluation]:
    """Read the evaluations of a run's folder, the newest of each version, by version.

    A line that a crash cut off is left out.
    """
    file = folder / FILE
    if not file.is_file():
        return []
    with boundary(StoreError, f"reading {file}", advice="remove it, and measure again"):
        lines = files.read_whole(file, _MOST_BYTES).decode("utf-8", "replace").splitlines()
        found = [each for line in lines if line.startswith("{") and (each := _read(line)) is not None]
    return [each for _, each in sorted({each.version: each for each in found}.items())]


def best_of(found: Iterable[Evaluation], decoding: tuple[float, int] | None = None) -> Evaluation | None:
    """Return the evaluation with the highest reward, the earliest of equals.

    None if there is none. Only those with the given decoding are compared, by default that of the
    newest version.
    """
    rows = sorted(found, key=lambda each: each.version)
    if not rows:
        return None
    wanted = decoding or rows[-1].decoding
    alike = [each for each in rows if each.decoding == wanted]
    return max(alike, key=lambda each: each.reward, default=None)


def _read(line: str) -> Evaluation | None:
    try:
        return Evaluation(**json.loads(line))
    except ValueError:
        return None
