"""What a peer has earned: from verdicts to a level of trust, which falls with time, and at once with a condemnation.

Trust decides how much of a peer's work is looked at, never what a look finds. A peer is muted in proportion to what it did,
and can read why. Pure bookkeeping with a clock that is handed in; it knows no network and no statistics.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final

NEWCOMER: Final = 16
"""Groups of a peer that are all looked at."""
LEAST_RATE: Final = 0.1
"""The part that is always looked at: whoever cheats in a tenth of its groups is then caught within 500, but for one in 200."""
HALF_LIFE: Final = 7 * 86_400.0
"""Seconds in which trust that nobody renews falls to a half."""
MUTE_SECONDS: Final = 3_600.0
"""For the first condemnation; each further one counts twice as much."""
LONGEST_MUTE: Final = 30 * 86_400.0
REASONS: Final = 8
PEERS: Final = 100_000


@dataclass(slots=True)
class Standing:
    """One peer, as of `at`."""

    honest: float = 0.0
    """Groups found honest, older ones counting for less."""
    condemned: int = 0
    muted_until: float = 0.0
    at: float = 0.0
    reasons: deque[str] = field(default_factory=lambda: deque(maxlen=REASONS))


class Trust:
    """The standing of all peers. Times are seconds of one clock."""

    def __init__(self) -> None:
        self._peers: dict[bytes, Standing] = {}

    def honest(self, peer: bytes, now: float) -> None:
        """A group of this peer was looked at and found honest."""
        standing = self._at(peer, now)
        standing.honest += 1

    def condemned(self, peer: bytes, reason: str, now: float) -> None:
        """A group of this peer was found dishonest: it starts from nothing, after a while in silence."""
        standing = self._at(peer, now)
        standing.honest = 0.0
        standing.condemned += 1
        standing.reasons.append(reason)
        wait = min(LONGEST_MUTE, MUTE_SECONDS * 2.0 ** min(standing.condemned - 1, 30))
        standing.muted_until = max(standing.muted_until, now + wait)

    def level(self, peer: bytes, now: float) -> float:
        """From 0 for a newcomer towards 1."""
        honest = self._at(peer, now).honest
        return honest / (honest + NEWCOMER)

    def rate(self, peer: bytes, now: float) -> float:
        """The part of a peer's groups that is looked at: all of a newcomer's, fewer as it earns trust."""
        honest = self._at(peer, now).honest
        return 1.0 if honest < NEWCOMER else max(LEAST_RATE, NEWCOMER / honest)

    def is_muted(self, peer: bytes, now: float) -> bool:
        standing = self._peers.get(peer)
        return standing is not None and now < standing.muted_until

    def muted(self, now: float) -> dict[bytes, str]:
        """Who is muted, and what for."""
        return {peer: known.reasons[-1] for peer, known in self._peers.items() if now < known.muted_until}

    def told(self, peer: bytes, now: float) -> str:
        """What a peer is told of itself, in one line."""
        standing = self._at(peer, now)
        if now < standing.muted_until:
            minutes = (standing.muted_until - now) / 60
            return f"muted for {minutes:.0f} more minutes: {standing.reasons[-1]}"
        if standing.condemned and standing.honest < NEWCOMER:
            return f"looked at as a newcomer again, since: {standing.reasons[-1]}"
        return (
            f"trusted at {self.level(peer, now):.2f}; {self.rate(peer, now):.0%} of the groups are looked at"
        )

    def _at(self, peer: bytes, now: float) -> Standing:
        standing = self._peers.get(peer)
        if standing is None:
            standing = self._peers[peer] = Standing(at=now)
            if len(self._peers) > PEERS:
                self._forget(now)
        past = max(0.0, now - standing.at)
        standing.honest *= 0.5 ** (past / HALF_LIFE)
        standing.at = now
        return standing

    def _forget(self, now: float) -> None:
        """Strangers without number must not fill the memory: those of whom there is least to know go first."""

        def worth(peer: bytes) -> tuple[bool, int, float]:
            known = self._peers[peer]
            return now < known.muted_until, known.condemned, known.honest

        for peer in sorted(self._peers, key=worth)[: PEERS // 10]:
            del self._peers[peer]
