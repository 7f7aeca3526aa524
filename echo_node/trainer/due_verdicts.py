"""Due verdicts: groups that verifiers drew, and what waits for them.

A verifier says which groups it drew. Until its verdict on one of them has come, neither that group
nor a later one of its sampler is used on trust: else all that a sampler sends from the moment it
turns dishonest is learnt from until somebody has had the time to look. How slow verifiers are then
costs time, and lets nothing in. Only the verdict on the group itself ends its wait: a sampler
chooses which of its groups verifiers see first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from typing import Final

BLOCKING_SECONDS: Final = 30.0
"""Seconds for which a drawn group holds up later ones: a verifier without time drops what it drew.

The group itself waits on, until there is a verdict or no room for it.
"""
OF_ONE: Final = 256
"""Most drawn groups of one sampler and verifier; the oldest are forgotten first."""
SAMPLERS: Final = 8_192
"""Most samplers with drawn groups; those that were drawn longest ago are forgotten first."""


class DueVerdicts:
    """Drawn groups without a verdict, by sampler and verifier.

    Groups are named by their order of arrival. Times are seconds of one clock.
    """

    def __init__(self) -> None:
        self._due: OrderedDict[bytes, dict[bytes, dict[int, float]]] = OrderedDict()

    def drew(self, sampler: bytes, verifier: bytes, order: int, now: float) -> None:
        """Record that a verifier drew a group."""
        due = self._due.setdefault(sampler, {}).setdefault(verifier, {})
        self._due.move_to_end(sampler)
        due.setdefault(order, now)
        if len(due) > OF_ONE:
            del due[next(iter(due))]
        if len(self._due) > SAMPLERS:
            self._due.popitem(last=False)

    def judged(self, sampler: bytes, verifier: bytes, order: int) -> None:
        """Record a verdict on a group."""
        by_verifier = self._due.get(sampler, {})
        if (due := by_verifier.get(verifier)) is not None:
            due.pop(order, None)
            if not due:
                del by_verifier[verifier]
            if not by_verifier:
                del self._due[sampler]

    def holds_back(self, sampler: bytes, order: int, verifiers: Collection[bytes], now: float) -> bool:
        """Return whether a group waits for a verdict of one of these verifiers."""
        return any(
            drawn == order or (drawn < order and now - since <= BLOCKING_SECONDS)
            for verifier, due in self._due.get(sampler, {}).items()
            if verifier in verifiers
            for drawn, since in due.items()
        )
