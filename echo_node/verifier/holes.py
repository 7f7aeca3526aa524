"""Slots that a sampler left out. Draws are fixed by the slot's key, so what was left out can be made and looked at.

A hole may be bad luck of the network: only holes that are many, and worth less than what was sent, are held against a peer.
It draws nothing itself.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

import numpy as np

MANY: Final = 0.1
"""The part of its slots that a peer may lose without a question."""
ENOUGH: Final = 24
"""Slots under one head, before their holes say anything."""
AUDITED: Final = 16
"""Holes that are made for a look."""
SURE: Final = 4.0
"""Standard errors by which holes must be worth less."""
HEADS: Final = 4_096


class Holes:
    """Which slots of which peer and head were seen, and what they were worth."""

    def __init__(self) -> None:
        self._seen: OrderedDict[tuple[bytes, bytes], dict[int, float]] = OrderedDict()

    def saw(self, head: bytes, peer: bytes, slot: int, reward: float) -> None:
        """A slot was filled, with completions worth so much in the mean."""
        key = (head, peer)
        self._seen.setdefault(key, {})[slot] = reward
        self._seen.move_to_end(key)
        if len(self._seen) > HEADS:
            self._seen.popitem(last=False)

    def suspicious(self, head: bytes, peer: bytes) -> list[int]:
        """Holes that should be looked at, spread over all of them; none, if there are few."""
        seen = self._seen.get((head, peer), {})
        if not seen:
            return []
        last = max(seen)
        holes = [slot for slot in range(last) if slot not in seen]
        if last + 1 < ENOUGH or len(holes) <= MANY * (last + 1):
            return []
        places = np.linspace(0, len(holes) - 1, min(AUDITED, len(holes))).astype(int)
        return [holes[place] for place in places]

    def worth_less(self, head: bytes, peer: bytes, rewards: Sequence[float]) -> str | None:
        """Whether the holes, which are worth this, are worth less than what was sent: a sentence, if so."""
        sent = list(self._seen.get((head, peer), {}).values())
        if len(sent) < 2 or len(rewards) < 2:
            return None
        difference = float(np.mean(sent) - np.mean(rewards))
        # Whoever lost them by chance has lost some like all others: a few holes that are equal prove nothing.
        error = math.sqrt(float(np.var([*sent, *rewards])) * (1 / len(sent) + 1 / len(rewards)))
        if difference <= SURE * max(error, 1e-6):
            return None
        return (
            f"{len(rewards)} slots that were left out are worth {np.mean(rewards):.3g} in the mean,"
            f" and those that were sent {np.mean(sent):.3g}"
        )
