"""Audit of what a sampler left out: slots, tails and heads, over all heads.

Draws are fixed by head, key and slot, so a verifier can generate any slot of a sampler: those that
were announced and never came, those behind the last one, and the first ones of heads under which
nothing came. If a sampler chose what to send by its luck, what it sent differs from what it left
out. Reward, spread and length are tested, all computed by the verifier; both signs count. Under
each head the two sets are exchangeable for an honest sampler, whatever makes it stop, so volunteers
that sleep or die are not found. The test is a permutation test per head: z adds up over heads.

False alarms: three figures and about 25 looks at `SURE` standard errors, 1e-5 per sampler in all.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

SURE: Final = 5.0
"""Standard errors by which what was left out must differ."""
PER_HEAD: Final = 4
"""Slots that are generated under one head at most, of each kind."""
BUDGET: Final = 0.5
"""Slots generated per group of the same sampler that was checked."""
FIRST_BUDGET: Final = 16
"""Slots that are generated of a sampler before that counts."""
FEWEST: Final = 24
"""Sent groups of audited heads before anything is held against a sampler."""
LOOK_GROWTH: Final = 1.25
"""Factor by which the compared slots grow between two tests, so that tests are few."""
HEADS: Final = 512
"""Heads of one sampler that are remembered; the oldest are dropped."""
PEERS: Final = 1_024
"""Samplers that are remembered; the least recently seen are dropped."""
TAIL: Final = 1 << 20
"""First slot of the comparison under heads under which nothing came: nobody fills so many."""
NAMES: Final = ("reward", "spread of rewards", "length")


@dataclass(frozen=True, slots=True)
class SlotFigures:
    """Figures of one group: mean and deviation of rewards, mean length.

    The deviation is the standard deviation.
    """

    reward: float
    spread: float
    length: float

    @classmethod
    def of(cls, rewards: Sequence[float], lengths: Sequence[int]) -> SlotFigures:
        return cls(float(np.mean(rewards)), float(np.std(rewards)), float(np.mean(lengths)))


@dataclass(slots=True)
class _Head:
    """Slots kept and left out under one head."""

    kept: dict[int, SlotFigures] = field(default_factory=dict)
    left: dict[int, SlotFigures] = field(default_factory=dict)
    posted: bool = True
    """Whether anything came under it; otherwise its kept slots are the comparison of `TAIL`."""


@dataclass(slots=True)
class _Peer:
    heads: OrderedDict[bytes, _Head] = field(default_factory=OrderedDict)
    checked: int = 0
    generated: int = 0
    next_look: float = float(FEWEST)


class SelectionAudit:
    """Sent and left out slots of samplers, by head."""

    def __init__(self) -> None:
        self._peers: OrderedDict[bytes, _Peer] = OrderedDict()

    def record(self, head: bytes, peer: bytes, slot: int, figures: SlotFigures) -> None:
        """Record a group that was sent, and checked here."""
        known = self._of(peer)
        known.checked += 1
        under = self._head(known, head)
        if not under.posted:  # it came after all
            under.kept, under.posted = {}, True
        under.kept[slot] = figures
        under.left.pop(slot, None)

    def wanted(self, head: bytes, peer: bytes, holes: Sequence[int], until: int) -> list[int]:
        """Return slots to generate under a head with groups: holes first, then the tail."""
        under = self._head(self._of(peer), head)
        most = min(PER_HEAD, self._left_in_budget(peer))
        spread = np.linspace(0, len(holes) - 1, min(most, len(holes))).astype(int)
        slots = [holes[index] for index in spread] + [until + index for index in range(most)]
        missing = [slot for slot in dict.fromkeys(slots) if slot not in under.left and slot not in under.kept]
        return missing[: max(0, most - len(under.left))]

    def wanted_unposted(self, head: bytes, peer: bytes) -> tuple[list[int], list[int]]:
        """Return slots to generate under a head without groups: first, and others.

        There are as many others as first ones.
        """
        known = self._of(peer)
        half = self._left_in_budget(peer) // 2
        if head in known.heads or half < 1:
            return [], []
        count = min(PER_HEAD // 2, half)
        return list(range(count)), list(range(TAIL, TAIL + count))

    def left_out(self, head: bytes, peer: bytes, slots: Mapping[int, SlotFigures]) -> None:
        """Record slots that were left out and generated here."""
        known = self._of(peer)
        known.generated += len(slots)
        self._head(known, head).left.update(slots)

    def compared(self, head: bytes, peer: bytes, slots: Mapping[int, SlotFigures]) -> None:
        """Record the comparison of a head without groups, generated here."""
        known = self._of(peer)
        known.generated += len(slots)
        under = self._head(known, head)
        under.posted = False
        under.kept.update(slots)

    def breach(self, peer: bytes) -> str | None:
        """Return a sentence if what was left out differs from what was sent beyond chance."""
        known = self._of(peer)
        heads = [each for each in known.heads.values() if each.kept and each.left]
        sent = sum(len(each.kept) for each in heads if each.posted)
        compared = sent + sum(len(each.left) for each in heads)
        if sent < FEWEST or compared < known.next_look:
            return None
        known.next_look = compared * LOOK_GROWTH
        tested = z_scores([(_matrix(each.kept), _matrix(each.left)) for each in heads])
        worst = int(np.abs(tested).argmax())
        if abs(tested[worst]) <= SURE:
            return None
        return (
            f"over {len(heads)} heads the {NAMES[worst]} of {sent} groups differs from that of"
            f" {sum(len(each.left) for each in heads)} slots that were left out by {tested[worst]:+.1f}"
            " standard errors"
        )

    def forget(self, peer: bytes) -> None:
        """Drop what is known of a peer once it was condemned."""
        self._peers.pop(peer, None)

    def _left_in_budget(self, peer: bytes) -> int:
        known = self._of(peer)
        return max(0, int(FIRST_BUDGET + BUDGET * known.checked) - known.generated)

    def _of(self, peer: bytes) -> _Peer:
        known = self._peers.setdefault(peer, _Peer())
        self._peers.move_to_end(peer)
        if len(self._peers) > PEERS:
            self._peers.popitem(last=False)
        return known

    @staticmethod
    def _head(known: _Peer, head: bytes) -> _Head:
        under = known.heads.setdefault(head, _Head())
        if len(known.heads) > HEADS:
            known.heads.popitem(last=False)
        return under


def z_scores(heads: Sequence[tuple[NDArray[np.float64], NDArray[np.float64]]]) -> NDArray[np.float64]:
    """Return the kept − left difference per figure, in standard errors.

    It is summed over heads. Under each head a permutation of all its rows gives the variance. Heads
    weigh by how much they tell: a difference of means of n and m rows counts n·m/(n+m).
    """
    total, variance = np.zeros(len(NAMES)), np.zeros(len(NAMES))
    for kept, left in heads:
        both = np.concatenate((kept, left))
        weight = len(kept) * len(left) / len(both)
        total += weight * (kept.mean(axis=0) - left.mean(axis=0))
        variance += weight * both.var(axis=0, ddof=1)
    scores: NDArray[np.float64] = np.zeros(len(NAMES))
    varied = variance > 0
    scores[varied] = total[varied] / np.sqrt(variance[varied])
    return scores if math.isfinite(float(scores.sum())) else np.zeros(len(NAMES))


def _matrix(slots: Mapping[int, SlotFigures]) -> NDArray[np.float64]:
    return np.array([(each.reward, each.spread, each.length) for each in slots.values()], np.float64)
