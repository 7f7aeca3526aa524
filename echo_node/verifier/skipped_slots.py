"""Detection of slots that a sampler skipped because their rewards were low.

Draws are fixed by the slot's key, so a verifier can generate a skipped slot itself. A gap may be a
loss of the network: only gaps that are many, and worth less than what was sent, count against a
peer.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

import numpy as np

MANY: Final = 0.1
"""Share of its slots that a peer may skip without an audit."""
ENOUGH: Final = 24
"""Slots under one head before gaps are considered."""
AUDITED: Final = 16
"""Skipped slots that are generated for an audit."""
SURE: Final = 4.0
"""Standard errors by which skipped slots must be worth less."""
HEADS: Final = 4_096
"""Pairs of head and peer whose slots are kept."""


class SkippedSlots:
    """Slots seen per head and peer, with the mean rewards of those that were checked."""

    def __init__(self) -> None:
        self._seen: OrderedDict[tuple[bytes, bytes], dict[int, float | None]] = OrderedDict()

    def record(self, head: bytes, peer: bytes, slot: int, reward: float | None) -> None:
        """Record a group that filled a slot, with its mean reward once known."""
        key = (head, peer)
        seen = self._seen.setdefault(key, {})
        seen[slot] = reward if reward is not None else seen.get(slot)
        self._seen.move_to_end(key)
        if len(self._seen) > HEADS:
            self._seen.popitem(last=False)

    def suspicious(self, head: bytes, peer: bytes) -> list[int]:
        """Return skipped slots to audit, spread evenly over all; none if few were skipped."""
        seen = self._seen.get((head, peer), {})
        if not seen:
            return []
        last = max(seen)
        skipped = [slot for slot in range(last) if slot not in seen]
        if last + 1 < ENOUGH or len(skipped) <= MANY * (last + 1):
            return []
        indices = np.linspace(0, len(skipped) - 1, min(AUDITED, len(skipped))).astype(int)
        return [skipped[index] for index in indices]

    def worth_less(self, head: bytes, peer: bytes, rewards: Sequence[float]) -> str | None:
        """Return a sentence if skipped slots have lower rewards than the sent ones."""
        sent = [each for each in self._seen.get((head, peer), {}).values() if each is not None]
        if len(sent) < 2 or len(rewards) < 2:
            return None
        difference = float(np.mean(sent) - np.mean(rewards))
        # Slots lost by chance are like all others, so the variance is that of both sets together:
        # a few skipped slots of equal reward prove nothing.
        error = math.sqrt(float(np.var([*sent, *rewards])) * (1 / len(sent) + 1 / len(rewards)))
        if difference <= SURE * max(error, 1e-6):
            return None
        return (
            f"{len(rewards)} slots that were left out have a mean reward of {np.mean(rewards):.3g},"
            f" those that were sent {np.mean(sent):.3g}"
        )
