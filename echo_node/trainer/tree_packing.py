"""Tree packing: groups of many lengths as padded tensors for a forward pass.

A row is a tree of tokens: the prompt is its trunk, and prefixes that completions of the group share
are there, and computed, once. Each token attends to its own ancestors and has the position that it
would have alone, so the sharing changes no value; a family's sliding windows are cut from the tree.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from echo_node.errors import DefectError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class TrainingGroup:
    """One prompt and all completions that were sampled from it.

    `current` says that the version which sampled it is the one that is trained, `sigma` how far
    log-probabilities of its engine class spread from the trainer's own, `gap_cap` how far one may
    be off.
    """

    prompt_ids: Sequence[int] | NDArray[np.integer]
    ids: Sequence[NDArray[np.integer]]
    """Token ids of each completion."""
    mu: Sequence[NDArray[np.floating]]
    """The sampler's log-probability of each token of each completion."""
    rewards: Sequence[float]
    """Reward of each completion, as the trainer computed it."""
    current: bool = False
    sigma: float = 0.0
    gap_cap: float = math.inf


class Branch(NamedTuple):
    """A completion in its row: source place and target of each token; its advantage."""

    sources: list[int]
    targets: list[int]
    mu: NDArray[np.floating]
    advantage: float
    current: bool
    sigma: float
    gap_cap: float


class Row:
    """The token tree of one prompt and some completions, in order of insertion."""

    def __init__(
        self,
        prompt_ids: Sequence[int],
        *,
        current: bool = False,
        sigma: float = 0.0,
        gap_cap: float = math.inf,
    ) -> None:
        self.ids = list(prompt_ids)
        self._current = current
        self._sigma = sigma
        self._gap_cap = gap_cap
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
        self.branches.append(
            Branch(sources, list(ids), mu, advantage, self._current, self._sigma, self._gap_cap)
        )

    def ancestors(self) -> NDArray[np.bool_]:
        """Return [places, places]: true at the ancestors of each place, and at itself."""
        seen = np.eye(len(self), dtype=np.bool_)
        for place, parent in enumerate(self.parents[1:], start=1):
            seen[place] |= seen[parent]
        return seen


@dataclass(frozen=True, slots=True)
class PackedRows:
    """R rows of L places, and the B completions of at most T tokens that they hold.

    `ids` and `position_ids` are [R, L]; `seen` is [R, L, L], true where a place has another as its
    ancestor; `sources`, the flat place that each token is predicted from, `targets`, `mu` and
    `mask` are [B, T]; `advantage`, `current`, `sigma` and `gap_cap` are [B].
    """

    ids: Tensor
    position_ids: Tensor
    seen: Tensor
    sources: Tensor
    targets: Tensor
    mu: Tensor
    mask: Tensor
    advantage: Tensor
    current: Tensor
    sigma: Tensor
    gap_cap: Tensor


def rows_of(group: TrainingGroup, advantages: Sequence[float], row_tokens: int) -> Iterator[Row]:
    """Cut a group into rows of at most `row_tokens` places.

    A completion that is longer by itself gets its own row.
    """
    prompt_ids: list[int] = np.asarray(group.prompt_ids).tolist()
    if not prompt_ids:
        raise DefectError("a group came to training without a prompt")
    row = Row(prompt_ids, current=group.current, sigma=group.sigma, gap_cap=group.gap_cap)
    for ids, mu, advantage in zip(group.ids, group.mu, advantages, strict=True):
        if len(ids) != len(mu) or not np.isfinite(mu).all():
            raise DefectError("a completion came to training without one log-probability for each token")
        if row.branches and len(row) + len(ids) - 1 > row_tokens:
            yield row
            row = Row(prompt_ids, current=group.current, sigma=group.sigma, gap_cap=group.gap_cap)
        row.grow(np.asarray(ids).tolist(), mu, advantage)
    if row.branches:
        yield row


def micro_batches(rows: Sequence[Row], tokens: int) -> Iterator[list[Row]]:
    """Yield rows of like length, at most `tokens` padded places, or a single row."""
    micro_batch: list[Row] = []
    for row in sorted(rows, key=len):  # ascending, so each is the longest so far
        if micro_batch and (len(micro_batch) + 1) * len(row) > tokens:
            yield micro_batch
            micro_batch = []
        micro_batch.append(row)
    if micro_batch:
        yield micro_batch


def pack(rows: Sequence[Row], device: torch.device) -> PackedRows:
    """Lay the rows out, padded at the end.

    Padding attends only to itself, and is unseen.
    """
    branches = [(number, branch) for number, row in enumerate(rows) for branch in row.branches]
    places, tokens = max(len(row) for row in rows), max(len(branch.targets) for _, branch in branches)
    ids, position_ids = np.zeros((2, len(rows), places), np.int64)
    seen = np.broadcast_to(np.eye(places, dtype=np.bool_), (len(rows), places, places)).copy()
    for number, row in enumerate(rows):
        ids[number, : len(row)] = row.ids
        position_ids[number, : len(row)] = row.positions
        seen[number, : len(row), : len(row)] = row.ancestors()

    sources, targets = np.zeros((2, len(branches), tokens), np.int64)
    mu, mask = np.zeros(targets.shape, np.float32), np.zeros(targets.shape, np.bool_)
    for nth, (number, branch) in enumerate(branches):
        span = slice(len(branch.targets))
        sources[nth, span] = branch.sources
        sources[nth, span] += number * places
        targets[nth, span], mu[nth, span], mask[nth, span] = branch.targets, branch.mu, True
    advantage = np.array([branch.advantage for _, branch in branches], np.float32)
    current = np.array([branch.current for _, branch in branches], np.bool_)
    sigma = np.array([branch.sigma for _, branch in branches], np.float32)
    gap_cap = np.array([branch.gap_cap for _, branch in branches], np.float32)

    def to_device(array: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(array).to(device)

    return PackedRows(
        ids=to_device(ids),
        position_ids=to_device(position_ids),
        seen=to_device(seen),
        sources=to_device(sources),
        targets=to_device(targets),
        mu=to_device(mu),
        mask=to_device(mask),
        advantage=to_device(advantage),
        current=to_device(current),
        sigma=to_device(sigma),
        gap_cap=to_device(gap_cap),
    )
