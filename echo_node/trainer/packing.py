"""Groups of many lengths, laid out as tensors that a forward pass takes.

Completions of one group share a row and the prompt in it: each sees the prompt and itself, never a
neighbour, at the positions that it would have alone. The last token of a completion is only predicted, so it
takes no place. This module knows nothing of models and losses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from echo_node.errors import DefectError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

UNSEEN = torch.finfo(torch.float32).min  # added to the attention score of what a token must not see
PADDING = -1  # the segment of places that hold nothing; 0 is the prompt's, then one for each completion


class SampledCompletion(NamedTuple):
    """Token ids as drawn, the sampler's log-probability of each, and what the whole is worth."""

    ids: NDArray[np.integer]
    mu: NDArray[np.floating]
    reward: float


@dataclass(frozen=True, slots=True)
class TrainingGroup:
    """One prompt and all that was sampled from it."""

    prompt_ids: Sequence[int] | NDArray[np.integer]
    completions: Sequence[SampledCompletion | tuple[NDArray[np.integer], NDArray[np.floating], float]]


@dataclass(frozen=True, slots=True)
class Row:
    """A prompt and some completions of one group, each with its advantage, side by side."""

    prompt_ids: NDArray[np.integer]
    completions: tuple[tuple[NDArray[np.integer], NDArray[np.floating], float], ...]

    def __len__(self) -> int:
        return len(self.prompt_ids) + sum(max(len(ids) - 1, 0) for ids, _, _ in self.completions)


@dataclass(frozen=True, slots=True)
class PackedRows:
    """R rows of L places, and the B completions of at most T tokens that they hold.

    `ids` and `position_ids` are [R, L], `attention` is [R, 1, L, L] and added to the scores; `sources`, the
    flat place that each token is predicted from, `targets`, `mu` and `mask` are [B, T]; `advantage` is [B].
    """

    ids: Tensor
    position_ids: Tensor
    attention: Tensor
    sources: Tensor
    targets: Tensor
    mu: Tensor
    mask: Tensor
    advantage: Tensor


def rows_of(group: TrainingGroup, advantages: Sequence[float], row_tokens: int) -> Iterator[Row]:
    """Cut a group into rows of at most `row_tokens` places; a completion that is longer has its own."""
    prompt_ids = np.asarray(group.prompt_ids)
    if not len(prompt_ids):
        raise DefectError("a group came to training without a prompt")
    shared: list[tuple[NDArray[np.integer], NDArray[np.floating], float]] = []
    length = len(prompt_ids)
    for (ids, mu, _), advantage in zip(group.completions, advantages, strict=True):
        if len(ids) != len(mu) or not np.isfinite(mu).all():
            raise DefectError("a completion came to training without one log-probability for each token")
        if shared and length + len(ids) - 1 > row_tokens:
            yield Row(prompt_ids, tuple(shared))
            shared, length = [], len(prompt_ids)
        shared.append((ids, mu, advantage))
        length += max(len(ids) - 1, 0)
    if shared:
        yield Row(prompt_ids, tuple(shared))


def micro_batches(rows: Sequence[Row], tokens: int) -> Iterator[list[Row]]:
    """Rows of like length together, at most `tokens` places of them, padding included, or a single row."""
    together: list[Row] = []
    for row in sorted(rows, key=len):  # ascending: the newest is the longest
        if together and (len(together) + 1) * len(row) > tokens:
            yield together
            together = []
        together.append(row)
    if together:
        yield together


def pack(rows: Sequence[Row], device: torch.device) -> PackedRows:
    """Lay the rows out, padded at the end to the longest."""
    completions = [(place, *completion) for place, row in enumerate(rows) for completion in row.completions]
    shape = (len(rows), max(len(row) for row in rows))
    ids, position_ids = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    segments = np.full(shape, PADDING, np.int64)
    sampled = (len(completions), max(len(drawn) for _, drawn, _, _ in completions))
    sources, targets = np.zeros(sampled, np.int64), np.zeros(sampled, np.int64)
    mu, mask = np.zeros(sampled, np.float32), np.zeros(sampled, np.bool_)

    nth = 0
    for place, row in enumerate(rows):
        prompt = len(row.prompt_ids)
        ids[place, :prompt] = row.prompt_ids
        position_ids[place, :prompt] = np.arange(prompt)
        segments[place, :prompt] = 0
        start = prompt
        for segment, (drawn, claimed, _) in enumerate(row.completions, start=1):
            count = len(drawn)
            end = start + max(count - 1, 0)
            ids[place, start:end] = drawn[:-1]
            position_ids[place, start:end] = np.arange(prompt, prompt + end - start)
            segments[place, start:end] = segment
            sources[nth, :1] = place * shape[1] + prompt - 1
            sources[nth, 1:count] = place * shape[1] + np.arange(start, end)
            targets[nth, :count], mu[nth, :count], mask[nth, :count] = drawn, claimed, True
            start, nth = end, nth + 1

    same = segments[:, :, None] == segments[:, None, :]
    seen = (same | (segments == 0)[:, None, :]) & np.tri(shape[1], dtype=np.bool_)
    advantage = np.array([worth for _, _, _, worth in completions], np.float32)

    def there(array: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(array).to(device)

    return PackedRows(
        ids=there(ids),
        position_ids=there(position_ids),
        attention=there(np.where(seen, np.float32(0.0), np.float32(UNSEEN))[:, None]),
        sources=there(sources),
        targets=there(targets),
        mu=there(mu),
        mask=there(mask),
        advantage=there(advantage),
    )
