"""Bounds on the part of a batch that each engine class may fill.

Some classes compute so imprecisely that a cheat could hide in their tolerance; the manifest
bounds how much of a batch they make up.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Final

from protocol.manifest import EngineTolerance

_ROUNDING: Final = 1e-9
"""Tolerance so that 0.29 of 100 is 29 despite floating-point error."""


class ClassShares:
    """Engine classes with a bounded share of a batch; other classes have no bound."""

    def __init__(self, engines: Iterable[EngineTolerance] = ()) -> None:
        self._shares = {each.engine: each.share for each in engines if each.share < 1.0}

    @property
    def bounded(self) -> Collection[str]:
        """Classes with a bound."""
        return self._shares.keys()

    def most(self, engine: str, batch: int) -> int:
        """Return the most groups of a class in a batch, rounded down, perhaps to 0."""
        return math.floor(self._shares.get(engine, 1.0) * batch + _ROUNDING)

    def usable(self, waiting: Mapping[str, int], batch: int) -> int:
        """Return how many of the waiting groups, counted by class, a batch can take."""
        return min(batch, sum(min(count, self.most(engine, batch)) for engine, count in waiting.items()))

    def can_fill(self, engines: Iterable[str], batch: int) -> bool:
        """Return whether samplers of these classes can fill a batch between them."""
        return sum(self.most(engine, batch) for engine in {*engines}) >= batch

    def describe(self, batch: int) -> str:
        """Describe the bounds in words."""
        bounds = [f"{engine} may fill {self.most(engine, batch)}" for engine in sorted(self._shares)]
        return f"{' and '.join(bounds)} of the {batch} groups of a batch"
