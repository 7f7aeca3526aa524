"""Per-engine-class tolerances: the evidence that an honest sampler may give.

The manifest states, per class, bounds for the mean of 64 tokens and for a single token. Fewer
tokens scatter more and many scatter less, so the bound narrows as a peer's evidence adds up. A
single token within its own bound is honest however few stand beside it: nearly all of an honest
engine's distance lies in such single tokens. Log-probabilities have a bound per token too, and the
mean gaps of end tokens and of rare tokens, signed and unsigned, have bounds of their own.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from dataclasses import dataclass, replace
from typing import Final

from echo_node.verifier.evidence import Evidence, GapSum
from protocol.manifest import EngineTolerance

REFERENCE_TOKENS: Final = 64
"""Number of tokens whose mean the manifest's bounds are stated for."""
FLOOR: Final = 0.4
"""Share of the bound that remains for infinitely many tokens: the part that is not scatter."""
GAP: Final = 40.0
"""Bound of the mean log-probability gap, as a multiple of `d_mean`: 5 to 13 in honest classes."""
GAP_FLOOR: Final = 1e-4
"""Smallest bound of the mean log-probability gap: log-probabilities travel in steps of 2^-18."""
FEW_FLOOR: Final = 0.05
"""Share of `gap_most` that the mean unsigned gap of infinitely many end or rare tokens may have."""
SIGNED_FLOOR: Final = 0.02
"""The same for the signed mean: what is rounding goes both ways."""
WIDE: Final = 1e-3
"""Classes with a larger `d_mean` than this are checked for their temperature too."""
CONTRAST: Final = 0.5
"""Share of the `d_mean` bound by which another temperature may fit better."""
WINDOW: Final = 256
"""Newest groups of a peer whose evidence is summed."""
PEERS: Final = 10_000
"""Pairs of peer and engine class whose evidence is kept; the least recently seen is dropped."""


@dataclass(frozen=True, slots=True)
class Breach:
    """Evidence outside the tolerance: the verdict's reason, and a detail.

    The detail is a sentence.
    """

    reason: str
    what: str
    sure: bool = True
    """Whether the peer is to blame; otherwise the verdict is "undecided"."""
    over: float = math.inf
    """Largest multiple of its bound that any figure is; infinite where there is no bound."""


class Tolerance:
    """Bounds of one engine class, scaled to the number of tokens."""

    def __init__(self, tolerance: EngineTolerance) -> None:
        self._tolerance = tolerance

    @property
    def wide(self) -> bool:
        """Return whether sampling at another temperature could stay within the bounds."""
        return self._tolerance.d_mean > WIDE

    def breach(self, found: Evidence) -> Breach | None:
        """Return the first bound that this evidence exceeds, if any; equality is honest."""
        first = self._first_breach(found)
        return None if first is None else replace(first, over=self._over(found))

    def _over(self, found: Evidence) -> float:
        """Return the largest multiple of its bound that any figure is."""
        bound, scale = self._tolerance, self.scale(found.tokens)
        pairs = [
            (found.d_most, bound.d_most),
            (found.z_most, bound.z_most),
            (found.d_mean, max(scale * bound.d_mean, bound.d_most / found.tokens)),
            (found.z_mean, max(scale * bound.z_mean, bound.z_most / found.tokens)),
            (found.gap_mean, max(GAP * bound.d_mean, GAP_FLOOR) * scale),
            (found.gap_most, bound.gap_most),
            (few_gap_share(found.ends), bound.gap_most),
            (few_gap_share(found.rare), bound.gap_most),
        ]
        if self.wide:
            pairs.append((found.contrast, CONTRAST * scale * bound.d_mean))
        return max(figure / most if most > 0 else math.inf for figure, most in pairs if figure > 0)

    def _first_breach(self, found: Evidence) -> Breach | None:
        if not found.tokens:
            return None
        bound, scale = self._tolerance, self.scale(found.tokens)
        if found.d_most > bound.d_most or found.z_most > bound.z_most:
            return Breach(
                "token-out-of-reach",
                f"a token is {found.d_most:.3g} (scaled {found.z_most:.3g}) from its seeded draw;"
                f" the bound is {bound.d_most:.3g} ({bound.z_most:.3g})",
            )
        for name, mean, usual, single in (
            ("", found.d_mean, bound.d_mean, bound.d_most),
            ("scaled ", found.z_mean, bound.z_mean, bound.z_most),
        ):
            most = max(scale * usual, single / found.tokens)
            if mean > most:
                return Breach(
                    "luck-not-its-own",
                    f"the mean {name}distance of {found.tokens} tokens from their seeded draws is"
                    f" {mean:.3g}; the bound is {most:.3g}",
                )
        if self.wide and found.contrast > CONTRAST * scale * bound.d_mean:
            return Breach("wrong-temperature", f"another temperature fits better by {found.contrast:.3g}")
        gap = max(GAP * bound.d_mean, GAP_FLOOR) * scale
        if found.gap_mean > gap:
            return Breach(
                "wrong-logprobs",
                f"log-probabilities are off by {found.gap_mean:.3g} on average; the bound is {gap:.3g}",
            )
        return self._few_gaps(found)

    def _few_gaps(self, found: Evidence) -> Breach | None:
        """Return the breach of the bounds on single, end or rare tokens, if any."""
        most = self._tolerance.gap_most
        if found.gap_most > most:
            return Breach(
                "wrong-logprobs",
                f"a log-probability is off by {found.gap_most:.3g}; the bound is {most:.3g}",
            )
        for name, gaps in (("end", found.ends), ("rare", found.rare)):
            share = few_gap_share(gaps)
            if share > most:
                mean = gaps.signed / gaps.tokens
                return Breach(
                    "wrong-logprobs",
                    f"log-probabilities of {gaps.tokens} {name} tokens are off by {mean:+.3g} on average"
                    f" ({gaps.absolute / gaps.tokens:.3g} without sign): more than the class's"
                    f" {most:.3g} for one token allows of so many",
                )
        return None

    @staticmethod
    def scale(tokens: int) -> float:
        """Return the width of the bound for this many tokens, relative to that for 64."""
        return FLOOR + (1 - FLOOR) * math.sqrt(REFERENCE_TOKENS / tokens)


def few_gap_share(gaps: GapSum) -> float:
    """Return the smallest `gap_most` that finds these gaps honest.

    The gaps are of end or rare tokens. The bound of a mean is `gap_most` for one token and falls
    with the root of their number, to `FEW_FLOOR` of it, or signed to `SIGNED_FLOOR`.
    """
    if not gaps.tokens:
        return 0.0
    scatter = 1.0 / math.sqrt(gaps.tokens)
    return max(
        mean / (floor + (1.0 - floor) * scatter)
        for mean, floor in (
            (gaps.absolute / gaps.tokens, FEW_FLOOR),
            (abs(gaps.signed) / gaps.tokens, SIGNED_FLOOR),
        )
    )


class CumulativeEvidence:
    """Evidence summed over a peer's newest groups, per engine class.

    A sampler at a slightly wrong temperature, or with slightly wrong weights, is within the bounds
    of one group and outside of those of a hundred.
    """

    def __init__(self) -> None:
        self._peers: OrderedDict[tuple[bytes, str], deque[Evidence]] = OrderedDict()

    def add(self, peer: bytes, engine_class: str, found: Evidence, tolerance: Tolerance) -> Breach | None:
        """Add evidence of a group that passed alone; return the sum's breach, if any."""
        key = (peer, engine_class)
        groups = self._peers.setdefault(key, deque(maxlen=WINDOW))
        self._peers.move_to_end(key)
        groups.append(found)
        if len(self._peers) > PEERS:
            self._peers.popitem(last=False)
        total = Evidence()
        for each in reversed(groups):  # the newest first: a change is seen before it is diluted
            total += each
            breach = tolerance.breach(total)
            if breach is not None:
                return replace(breach, what=f"over {total.tokens} tokens: {breach.what}")
        return None

    def forget(self, peer: bytes) -> None:
        """Drop a peer's evidence once it was condemned, so that later groups count afresh."""
        for key in [key for key in self._peers if key[0] == peer]:
            del self._peers[key]
