"""How much evidence is still honest: the bands of an engine class, for any number of tokens.

The manifest says, per class, what the mean of 64 tokens may be and what a single token may be. Fewer tokens scatter more
and many scatter less, so the band narrows as evidence of a peer adds up. One token that is within its own reach is honest
however few there are beside it: nearly all of an honest engine's distance lies in such single tokens. It knows no group and
no peer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from echo_node.verifier.evidence import Evidence
from protocol.manifest import EngineTolerance

USUAL: Final = 64
"""Tokens whose mean the manifest's bands are for."""
FLOOR: Final = 0.4
"""What is left of the band when tokens are without number: the part of it that is no scatter."""
GAP: Final = 40.0
"""The mean gap of log-probabilities that goes with a mean distance: five to thirteen in honest classes."""
GAP_FLOOR: Final = 1e-4
"""Log-probabilities travel in steps of 2^-18."""
WIDE: Final = 1e-3
"""Classes of a wider band than this are looked at for their temperature too."""
CONTRAST: Final = 0.5
"""The share of its own band by which another temperature may be nearer."""


@dataclass(frozen=True, slots=True)
class Breach:
    """Evidence that no honest engine of the class gives: a reason for the verdict, and a sentence."""

    reason: str
    what: str
    sure: bool = True
    """Whether it is the peer's doing; else the verdict is that there is none."""


class Bands:
    """The bands of one class."""

    def __init__(self, tolerance: EngineTolerance) -> None:
        self._told = tolerance

    @property
    def wide(self) -> bool:
        """Whether another temperature could hide in the band."""
        return self._told.d_mean > WIDE

    def breach(self, found: Evidence) -> Breach | None:
        """What is dishonest about it, if anything."""
        if not found.tokens:
            return None
        told, part = self._told, self.part(found.tokens)
        if found.d_most > told.d_most or found.z_most > told.z_most:
            return Breach(
                "token-out-of-reach",
                f"a token lies {found.d_most:.3g} (scaled {found.z_most:.3g}) from its luck,"
                f" and {told.d_most:.3g} ({told.z_most:.3g}) is the most",
            )
        for name, mean, usual, single in (
            ("", found.d_mean, told.d_mean, told.d_most),
            ("scaled ", found.z_mean, told.z_mean, told.z_most),
        ):
            most = max(part * usual, single / found.tokens)
            if mean > most:
                return Breach(
                    "luck-not-its-own",
                    f"{found.tokens} tokens lie {mean:.3g} {name}from their luck in the mean,"
                    f" and {most:.3g} is the most",
                )
        if self.wide and found.contrast > CONTRAST * part * told.d_mean:
            return Breach("wrong-temperature", f"another temperature is nearer by {found.contrast:.3g}")
        gap = max(GAP * told.d_mean, GAP_FLOOR) * part
        if found.gap_mean > gap:
            return Breach(
                "wrong-logprobs",
                f"log-probabilities are {found.gap_mean:.3g} off in the mean, and {gap:.3g} is the most",
            )
        return None

    @staticmethod
    def part(tokens: int) -> float:
        """How wide the band is for so many tokens, compared with that for 64."""
        return FLOOR + (1 - FLOOR) * math.sqrt(USUAL / tokens)
