"""Open disputes: samplers that a single verifier has condemned.

A single verifier may be wrong, or lie. While its condemnation stands alone, the sampler's groups
count only once another verifier or the trainer itself has found them honest, and the trainer looks
at the condemned group, if it still has it. The trainer's own finding on that group settles the
matter, and so do two other verifiers. A verifier that was overturned several times is named to the
operator, and its word alone neither disputes a sampler nor condemns a group.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from typing import Final

from protocol import peer_id

log = logging.getLogger(__name__)
OVERTURNS: Final = 3
"""Condemnations of a verifier that others refuted before its word alone counts no more."""
REFUTING: Final = 2
"""Other verifiers that together refute a condemnation."""
ACQUITTED_AFTER: Final = 16
"""Groups found honest by others, since the last condemnation, that end a sampler's dispute."""
SAMPLERS: Final = 4_096
"""Most disputed samplers; the oldest disputes are forgotten first."""


@dataclass(slots=True)
class _Dispute:
    accusers: set[bytes] = field(default_factory=set)
    honest: int = 0
    """Groups found honest by others than the accusers."""


class Disputes:
    """Open disputes by sampler, and overturned verifiers; `own` is our key."""

    def __init__(self, own: bytes, verifiers: frozenset[bytes]) -> None:
        self._own = own
        self._several = len(verifiers - {own}) > 1
        self._open: OrderedDict[bytes, _Dispute] = OrderedDict()
        self._refuted: set[tuple[bytes, bytes]] = set()
        """Pairs of group and verifier that were counted as overturned."""
        self.overturned: Counter[bytes] = Counter()
        """Condemnations that others refuted, by verifier."""

    def is_unreliable(self, verifier: bytes) -> bool:
        """Return whether a verifier was overturned too often for its word alone to count."""
        return self.overturned[verifier] >= OVERTURNS

    def is_disputed(self, sampler: bytes) -> bool:
        return sampler in self._open

    def vouches(self, sampler: bytes, honest: set[bytes]) -> bool:
        """Return whether anyone but the accusers found a group honest."""
        dispute = self._open.get(sampler)
        return dispute is None or bool(honest - dispute.accusers)

    def accused(self, sampler: bytes, verifier: bytes) -> None:
        """Open a dispute, where a verifier that is one of several condemns a group."""
        if not self._several or verifier == self._own or self.is_unreliable(verifier):
            return
        dispute = self._open.setdefault(sampler, _Dispute())
        dispute.accusers.add(verifier)
        dispute.honest = 0
        while len(self._open) > SAMPLERS:
            self._open.popitem(last=False)

    def acquitted(self, sampler: bytes, by: bytes) -> None:
        """Record that a group of a sampler was found honest; after some the dispute ends."""
        dispute = self._open.get(sampler)
        if dispute is not None and by not in dispute.accusers:
            dispute.honest += 1
            if dispute.honest >= ACQUITTED_AFTER:
                del self._open[sampler]

    def weigh(self, group: bytes, sampler: bytes, honest: set[bytes], dishonest: set[bytes]) -> bool:
        """Weigh the findings on one group; return whether its condemnation was refuted."""
        if len(dishonest) != 1 or self._own in dishonest:
            return False
        if self._own not in honest and len(honest) < REFUTING:
            return False
        (verifier,) = dishonest
        if (group, verifier) not in self._refuted:
            self._refuted.add((group, verifier))
            self._overturn(verifier)
        dispute = self._open.get(sampler)
        if dispute is not None:
            dispute.accusers.discard(verifier)
            if not dispute.accusers:
                del self._open[sampler]
        return True

    def settled(self, sampler: bytes) -> None:
        """End the dispute on a sampler that is muted now."""
        self._open.pop(sampler, None)

    def _overturn(self, verifier: bytes) -> None:
        self.overturned[verifier] += 1
        if self.overturned[verifier] == OVERTURNS:
            log.warning(
                "verifier %s condemned %d groups that others found honest: its word alone counts no more;"
                " look at its machine, or make a run without it",
                peer_id(verifier),
                OVERTURNS,
            )
