"""Groups of many lengths, laid out as tensors that a forward pass takes.

A row is a tree of tokens: the prompt is its trunk, and whatever completions of the group have in common is
there, and computed, once. Each token sees its own ancestors and stands at the position that it would have
alone, so the sharing changes no value. This module knows nothing of models and losses.
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

UNSEEN = float(np.finfo(np.float32).min)  # added to the attention score of what a token must not see


class SampledCompletion(NamedTuple):
    """Token ids as drawn, the sampler's log-probability of each, and what the whole is worth."""

    ids: NDArray[np.integer]
    mu: NDArray[np.floating]
    reward: float


@dataclass(frozen=True, slots=True)
class TrainingGroup:
    """One prompt and all that was sampled from it.

    `current` says that the version which sampled it is the one that is trained, `sigma` how far log-probabilities of
    its engine class spread from the trainer's own.
    """

    prompt_ids: Sequence[int] | NDArray[np.integer]
    completions: Sequence[SampledCompletion]
    current: bool = False
    sigma: float = 0.0


class Branch(NamedTuple):
    """A completion in its row: the place that each token is predicted from, the token, and what it teaches."""

    sources: list[int]
    targets: list[int]
    mu: NDArray[np.floating]
    advantage: float
    current: bool
    sigma: float


class Row:
    """The tree of one prompt and some completions of its group, its places in the order of growth."""

    def __init__(self, prompt_ids: Sequence[int], *, current: bool = False, sigma: float = 0.0) -> None:
        self.ids = list(prompt_ids)
        self._current = current
        self._sigma = sigma
        self.parents = list(range(-1, len(self.ids) - 1))
        self.positions = list(range(len(self.ids)))
        self.branches: list[Branch] = []
        self._trunk = len(self.ids)
        self._children: dict[tuple[int, int], int] = {}

    def __len__(self) -> int:
        return len(self.ids)

    def grow(self, ids: Sequence[int], mu: NDArray[np.floating], advantage: float) -> None:
        """Add a completion; its last token is only predicted, so it takes no place."""
        sources, place = [], self._trunk - 1
        for position, token in enumerate(ids, start=self._trunk):
            sources.append(place)
            if len(sources) == len(ids):
                break
            parent, place = place, self._children.setdefault((place, token), len(self.ids))
            if place == len(self.ids):
                self.ids.append(token)
                self.parents.append(parent)
                self.positions.append(position)
        self.branches.append(Branch(sources, list(ids), mu, advantage, self._current, self._sigma))

    def sight(self) -> NDArray[np.bool_]:
        """Who sees whom, [places, places]: each its ancestors and itself."""
        seen = np.eye(len(self), dtype=np.bool_)
        for place, parent in enumerate(self.parents[1:], start=1):
            seen[place] |= seen[parent]
        return seen


@dataclass(frozen=True, slots=True)
class PackedRows:
    """R rows of L places, and the B completions of at most T tokens that they hold.

    `ids` and `position_ids` are [R, L], `attention` is [R, 1, L, L] and added to the scores; `sources`, the
    flat place that each token is predicted from, `targets`, `mu` and `mask` are [B, T]; `advantage`, `current` and
    `sigma` are [B].
    """

    ids: Tensor
    position_ids: Tensor
    attention: Tensor
    sources: Tensor
    targets: Tensor
    mu: Tensor
    mask: Tensor
    advantage: Tensor
    current: Tensor
    sigma: Tensor


def rows_of(group: TrainingGroup, advantages: Sequence[float], row_tokens: int) -> Iterator[Row]:
    """Cut a group into rows of at most `row_tokens` places; what is longer by itself has its own."""
    prompt_ids: list[int] = np.asarray(group.prompt_ids).tolist()
    if not prompt_ids:
        raise DefectError("a group came to training without a prompt")
    row = Row(prompt_ids, current=group.current, sigma=group.sigma)
    for (ids, mu, _), advantage in zip(group.completions, advantages, strict=True):
        if len(ids) != len(mu) or not np.isfinite(mu).all():
            raise DefectError("a completion came to training without one log-probability for each token")
        if row.branches and len(row) + len(ids) - 1 > row_tokens:
            yield row
            row = Row(prompt_ids, current=group.current, sigma=group.sigma)
        row.grow(np.asarray(ids).tolist(), mu, advantage)
    if row.branches:
        yield row


def micro_batches(rows: Sequence[Row], tokens: int) -> Iterator[list[Row]]:
    """Rows of like length together, at most `tokens` places of them, padding included, or a single row."""
    together: list[Row] = []
    for row in sorted(rows, key=len):  # ascending, so each is the longest so far
        if together and (len(together) + 1) * len(row) > tokens:
            yield together
            together = []
        together.append(row)
    if together:
        yield together


def pack(rows: Sequence[Row], device: torch.device) -> PackedRows:
    """Lay the rows out, padded at the end to the longest. Padding sees only itself, and nobody sees it."""
    branches = [(number, branch) for number, row in enumerate(rows) for branch in row.branches]
    places, tokens = max(len(row) for row in rows), max(len(branch.targets) for _, branch in branches)
    ids, position_ids = np.zeros((2, len(rows), places), np.int64)
    seen = np.broadcast_to(np.eye(places, dtype=np.bool_), (len(rows), places, places)).copy()
    for number, row in enumerate(rows):
        ids[number, : len(row)] = row.ids
        position_ids[number, : len(row)] = row.positions
        seen[number, : len(row), : len(row)] = row.sight()

    sources, targets = np.zeros((2, len(branches), tokens), np.int64)
    mu, mask = np.zeros(targets.shape, np.float32), np.zeros(targets.shape, np.bool_)
    for nth, (number, branch) in enumerate(branches):
        drawn = slice(len(branch.targets))
        sources[nth, drawn] = branch.sources
        sources[nth, drawn] += number * places
        targets[nth, drawn], mu[nth, drawn], mask[nth, drawn] = branch.targets, branch.mu, True
    advantage = np.array([branch.advantage for _, branch in branches], np.float32)
    current = np.array([branch.current for _, branch in branches], np.bool_)
    sigma = np.array([branch.sigma for _, branch in branches], np.float32)
    attention = np.where(seen, np.float32(0.0), np.float32(UNSEEN))[:, None]

    def there(array: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(array).to(device)

    return PackedRows(
        ids=there(ids),
        position_ids=there(position_ids),
        attention=there(attention),
        sources=there(sources),
        targets=there(targets),
        mu=there(mu),
        mask=there(mask),
        advantage=there(advantage),
        current=there(current),
        sigma=there(sigma),
    )
