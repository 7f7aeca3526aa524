"""Other layouts of weight deltas that ours is measured against.

XOR + zstd-1; COO as PULSE has it (row steps as u8, columns as u16, absolute values) + zstd-1; TRL's
int32 + bf16. They only write: sizes are compared, and how long writing takes.
"""

from __future__ import annotations

import numpy as np
import zstandard
from numpy.typing import NDArray

from benchmarks.training_diff import Patterns, TrainingDiff
from protocol.limits import CHUNK_ELEMENTS


def _zstd1(data: bytes) -> int:
    return len(zstandard.ZstdCompressor(level=1).compress(data))


def xor_bytes(diff: TrainingDiff) -> int:
    """Return the XOR of both states, chunk by chunk."""
    starts = range(0, diff.before.size, CHUNK_ELEMENTS)
    places = [slice(start, start + CHUNK_ELEMENTS) for start in starts]
    return sum(_zstd1((diff.before[place] ^ diff.after[place]).tobytes()) for place in places)


def pulse_bytes(diff: TrainingDiff) -> int:
    """Return COO per tensor, with each column of all tensors compressed as one."""
    rows: list[NDArray[np.uint8]] = []
    columns: list[NDArray[np.uint16]] = []
    values: list[Patterns] = []
    start = 0
    for elements, width in diff.tensors:
        place = slice(start, start + elements)
        changed = np.flatnonzero(diff.before[place] != diff.after[place])
        row, column = np.divmod(changed, width)
        steps = np.diff(row, prepend=0)
        assert not steps.size or int(steps.max()) < 256, "a row step that u8 does not hold"
        rows.append(steps.astype(np.uint8))
        columns.append(column.astype(np.uint16))
        values.append(diff.after[place][changed])
        start += elements
    parts = (np.concatenate(rows), np.concatenate(columns), np.concatenate(values))
    return _zstd1(b"".join(part.tobytes() for part in parts))


def trl_bytes(diff: TrainingDiff) -> int:
    """Flat positions and values as they are."""
    changed = np.flatnonzero(diff.before != diff.after)
    return len(changed.astype(np.int32).tobytes()) + len(diff.after[changed].tobytes())
