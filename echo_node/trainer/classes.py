"""What part of a batch each engine class may fill.

Some classes compute so roughly that a cheat could hide in them; the manifest bounds how much of a batch they make up. It is
arithmetic, and knows neither groups nor peers.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Final

from protocol.manifest import EngineTolerance

_ROUNDING: Final = 1e-9
"""So that 0.29 of 100 is 29, whatever floats make of it."""


class ClassShares:
    """The engine classes of a run that may fill only a part of a batch. A class that is not named has no bound."""

    def __init__(self, engines: Iterable[EngineTolerance] = ()) -> None:
        self._shares = {each.engine: each.share for each in engines if each.share < 1.0}

    @property
    def bounded(self) -> Collection[str]:
        """The classes that have a bound."""
        return self._shares.keys()

    def most(self, engine: str, batch: int) -> int:
        """How many groups of a class a batch of that size may have: whole ones, so that a small batch may have none."""
        return math.floor(self._shares.get(engine, 1.0) * batch + _ROUNDING)

    def usable(self, waiting: Mapping[str, int], batch: int) -> int:
        """How many groups a batch can have, if so many of each class wait."""
        return min(batch, sum(min(count, self.most(engine, batch)) for engine, count in waiting.items()))

    def can_fill(self, engines: Iterable[str], batch: int) -> bool:
        """Whether samplers of these classes can fill a batch between them."""
        return sum(self.most(engine, batch) for engine in {*engines}) >= batch

    def told(self, batch: int) -> str:
        """The bounds in words, for a person who wonders what a run waits for."""
        bounds = [f"{engine} may fill {self.most(engine, batch)}" for engine in sorted(self._shares)]
        return f"{' and '.join(bounds)} of the {batch} groups of a batch"
