"""Sequences with a common prefix packed into one row, to compute the prefix once.

Each ending attends to the prefix and itself. So a group is scored for the price of one prompt and
its completions, and prompts that begin alike (worked examples, a system prompt) are filled in for
the price of their endings. The model must accept explicit attention masks and positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from echo_node.engine.base import Ids

LONGEST: Final = 4_096
"""Ids of a row: who sees whom is a square of it."""
SAVED: Final = 4
"""A prefix of prompts is worth sharing where it saves one id in so many."""


@dataclass(frozen=True, slots=True)
class SharedRow:
    """`wanted` are the places whose followers are asked for, sequence after sequence.

    `begin` places are common to all sequences.
    """

    begin: int
    ids: Ids
    positions: Ids
    seen: NDArray[np.bool_]
    wanted: Ids


def shared_row(sequences: Sequence[Ids], keep: Sequence[int]) -> SharedRow | None:
    """Pack sequences whose last `keep` ids are scored; None if it saves nothing."""
    begin = min(
        common_prefix(sequences), *(ids.size - last for ids, last in zip(sequences, keep, strict=True))
    )
    endings = [ids[begin:] for ids in sequences]
    total = begin + sum(ending.size for ending in endings)
    if len(sequences) < 2 or begin < 1 or total > LONGEST:
        return None
    row = np.concatenate((sequences[0][:begin], *endings)).astype(np.int64)
    positions = np.concatenate((np.arange(begin), *(np.arange(begin, ids.size) for ids in sequences)))
    seen = np.zeros((total, total), np.bool_)
    seen[:, :begin] = True
    seen[:begin, :begin] = np.tri(begin, dtype=np.bool_)
    wanted, start = [], begin
    for ending, last in zip(endings, keep, strict=True):
        end = start + ending.size
        seen[start:end, start:end] = np.tri(ending.size, dtype=np.bool_)
        wanted.append(np.arange(end - last, end))
        start = end
    return SharedRow(begin, row, positions, seen, np.concatenate(wanted))


def shared_prompt(prompts: Sequence[Ids]) -> int:
    """Return how many first ids of prompts to compute once.

    It is 0 where that saves too little. Each prompt has at least one id after them.
    """
    if len(prompts) < 2:
        return 0
    sizes = [prompt.size for prompt in prompts]
    begin = min(common_prefix(prompts), min(sizes) - 1)
    return begin if SAVED * begin * (len(prompts) - 1) >= sum(sizes) else 0


def common_prefix(sequences: Sequence[Ids]) -> int:
    """Return the length of the common prefix."""
    shortest = min(ids.size for ids in sequences)
    first = sequences[0][:shortest]
    same = np.logical_and.reduce([ids[:shortest] == first for ids in sequences])
    return int(shortest if same.all() else np.argmin(same))
