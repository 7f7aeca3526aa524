"""Tree packing: groups of many lengths, by tokens, as tensors for a forward pass.

A row is a tree of tokens: the prompt is its trunk, and prefixes that completions of the group share
are there, and computed, once. Each token attends to its own ancestors and has the position that it
would have alone, so the sharing changes no value; a family's sliding windows are cut from the tree.
Groups whose prompts begin alike (worked examples, a system prompt) become one tree.
Rows that together are no longer than the longest one are laid out one after another, as a forest,
so that little is padded.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import torch

from echo_node.errors import DefectError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

SAVED: Final = 0.25
"""Share of a row that must be in another one for the two to be joined."""


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
    truncated: Sequence[bool] = ()
    """Whether each completion was cut by the run's limit; empty: none was."""
    drawn: Sequence[NDArray[np.bool_]] | None = None
    """Which tokens of each completion the policy drew; None: all. Others have no loss."""


class Branch(NamedTuple):
    """A completion in its row: source place and target of each token; its advantage."""

    sources: list[int]
    targets: list[int]
    mu: NDArray[np.floating]
    advantage: float
    current: bool
    sigma: float
    gap_cap: float
    drawn: NDArray[np.bool_] | None = None
    """Which tokens have a loss; None: all."""


class Row:
    """Token tree of one or more prompts that begin alike, and completions.

    Places are in order of insertion.
    """

    def __init__(
        self,
        prompt_ids: Sequence[int],
        *,
        current: bool = False,
        sigma: float = 0.0,
        gap_cap: float = math.inf,
    ) -> None:
        self.prompt_ids = list(prompt_ids)
        self.ids = list(prompt_ids)
        self._current = current
        self._sigma = sigma
        self._gap_cap = gap_cap
        self.parents = list(range(-1, len(self.ids) - 1))
        self.positions = list(range(len(self.ids)))
        self.branches: list[Branch] = []
        self._trunk = len(self.ids)
        self._children = {(place - 1, token): place for place, token in enumerate(self.ids)}
        """Place by the place before it and its token."""

    def __len__(self) -> int:
        return len(self.ids)

    def grow(
        self,
        ids: Sequence[int],
        mu: NDArray[np.floating],
        advantage: float,
        drawn: NDArray[np.bool_] | None = None,
    ) -> None:
        """Add a completion; its last token is only predicted, so it takes no place."""
        sources, place = [], self._trunk - 1
        for token in ids:
            sources.append(place)
            if len(sources) == len(ids):
                break
            place = self._child(place, token)
        self.branches.append(
            Branch(sources, list(ids), mu, advantage, self._current, self._sigma, self._gap_cap, drawn)
        )

    def graft(self, other: Row) -> None:
        """Add all that another row holds, which begins with the same token."""
        places = [0]
        for parent, token in zip(other.parents[1:], other.ids[1:], strict=True):
            places.append(self._child(places[parent], token))
        for branch in other.branches:
            self.branches.append(branch._replace(sources=[places[source] for source in branch.sources]))

    def _child(self, parent: int, token: int) -> int:
        """Return the place of a token after a place; a new one if it is not there."""
        place = self._children.setdefault((parent, token), len(self.ids))
        if place == len(self.ids):
            self.ids.append(token)
            self.parents.append(parent)
            self.positions.append(self.positions[parent] + 1)
        return place

    def preorder(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return each token's preorder place, and the place after its descendants."""
        count = len(self)
        sizes = [1] * count
        for place in range(count - 1, 0, -1):  # a parent comes before its children
            sizes[self.parents[place]] += sizes[place]
        places, free = [0] * count, [1] * count
        for place in range(1, count):
            parent = self.parents[place]
            places[place] = free[parent]
            free[parent] += sizes[place]
            free[place] = places[place] + 1
        order = np.array(places, np.int64)
        return order, order + np.array(sizes, np.int64)


@dataclass(frozen=True, slots=True)
class PackedRows:
    """R rows of L places, and the B completions of at most T tokens that they hold.

    `ids`, `position_ids` and `ends`, the place after a place's last descendant, are [R, L];
    `sources`, the flat place that each token is predicted from, `targets`, `mu` and `mask` are
    [B, T]; `advantage`, `current`, `sigma` and `gap_cap` are [B].
    """

    ids: Tensor
    position_ids: Tensor
    ends: Tensor
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
    masks: Sequence[NDArray[np.bool_] | None] = group.drawn or [None] * len(group.ids)
    for ids, mu, advantage, drawn in zip(group.ids, group.mu, advantages, masks, strict=True):
        masked = len(ids) if drawn is None else len(drawn)
        if not len(ids) == len(mu) == masked or not np.isfinite(mu).all():
            raise DefectError("a completion came to training without one log-probability for each token")
        if row.branches and len(row) + len(ids) - 1 > row_tokens:
            yield row
            row = Row(prompt_ids, current=group.current, sigma=group.sigma, gap_cap=group.gap_cap)
        row.grow(np.asarray(ids).tolist(), mu, advantage, drawn)
    if row.branches:
        yield row


def share_prompts(rows: Sequence[Row], tokens: int) -> list[Row]:
    """Join rows whose prompts begin alike, to rows of at most `tokens` places.

    Rows are joined where that saves a quarter of the shorter one or more.
    """
    shared: list[Row] = []
    for row in sorted(rows, key=lambda each: each.prompt_ids):  # neighbours have most in common
        last = shared[-1] if shared else None
        common = 0 if last is None else _common(last.prompt_ids, row.prompt_ids)
        if (
            last is not None
            and common >= SAVED * min(len(last), len(row))
            and len(last) + len(row) - common <= tokens
        ):
            last.graft(row)
        else:
            shared.append(row)
    return shared


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the length of the common prefix."""
    pairs = zip(one, other, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def micro_batches(rows: Sequence[Row], tokens: int) -> Iterator[list[Row]]:
    """Yield rows that `pack` lays out on at most `tokens` places, or a single row."""
    left = sorted(rows, key=len, reverse=True)
    while left:
        longest = len(left[0])
        bins, taken = max(1, tokens // longest), _Bins(longest)
        rest: list[Row] = []
        for row in left:
            (taken.rows if taken.put(row, bins) else rest).append(row)
        yield taken.rows
        left = rest


class _Bins:
    """Rows laid out one after another, first fit, on lines of equal length."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.rows: list[Row] = []
        self.used: list[int] = []
        """Places taken of each line."""
        self.starts: list[tuple[int, int]] = []
        """Line and place at which each row begins."""

    def put(self, row: Row, most: int) -> bool:
        """Find room for a row on at most so many lines."""
        line = next(
            (at for at, used in enumerate(self.used) if used + len(row) <= self.width), len(self.used)
        )
        if line >= most:
            return False
        if line == len(self.used):
            self.used.append(0)
        self.starts.append((line, self.used[line]))
        self.used[line] += len(row)
        return True


def pack(rows: Sequence[Row], device: torch.device) -> PackedRows:
    """Lay rows out, each on the first line with room.

    Lines are as long as the longest row. Padding attends only to itself, and is unseen.
    """
    bins = _Bins(max(len(row) for row in rows))
    for row in rows:
        bins.put(row, len(rows))
    places = bins.width
    branches = [(number, branch) for number, row in enumerate(rows) for branch in row.branches]
    tokens = max(len(branch.targets) for _, branch in branches)
    ids, position_ids = np.zeros((2, len(bins.used), places), np.int64)
    ends = np.broadcast_to(np.arange(1, places + 1), ids.shape).copy()
    orders = []
    for row, (line, start) in zip(rows, bins.starts, strict=True):
        order, own_ends = row.preorder()
        order += start
        ids[line, order] = row.ids
        position_ids[line, order] = row.positions
        ends[line, order] = own_ends + start
        orders.append(order + line * places)

    sources, targets = np.zeros((2, len(branches), tokens), np.int64)
    mu, mask = np.zeros(targets.shape, np.float32), np.zeros(targets.shape, np.bool_)
    for nth, (number, branch) in enumerate(branches):
        span = slice(len(branch.targets))
        sources[nth, span] = orders[number][branch.sources]
        targets[nth, span], mu[nth, span] = branch.targets, branch.mu
        mask[nth, span] = True if branch.drawn is None else branch.drawn
    advantage = np.array([branch.advantage for _, branch in branches], np.float32)
    current = np.array([branch.current for _, branch in branches], np.bool_)
    sigma = np.array([branch.sigma for _, branch in branches], np.float32)
    gap_cap = np.array([branch.gap_cap for _, branch in branches], np.float32)

    def to_device(array: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(array).to(device)

    return PackedRows(
        ids=to_device(ids),
        position_ids=to_device(position_ids),
        ends=to_device(ends),
        sources=to_device(sources),
        targets=to_device(targets),
        mu=to_device(mu),
        mask=to_device(mask),
        advantage=to_device(advantage),
        current=to_device(current),
        sigma=to_device(sigma),
        gap_cap=to_device(gap_cap),
    )
