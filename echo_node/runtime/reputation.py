"""Reputation of peers: trust earned by verdicts, and mutes for condemnations.

Trust decays with time and is lost at once by a condemnation. It decides how much of a peer's work
is checked, never the outcome of a check. A peer is muted in proportion to its offences, and can
read why.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

from echo_node.net.base import Mute

NEWCOMER: Final = 16
"""Groups of a new peer that are all checked."""
LEAST_RATE: Final = 0.1
"""The share that is always checked: a peer that cheats in a tenth of its groups is then caught
within 500, except for one in 200."""
HALF_LIFE: Final = 7 * 86_400.0
"""Seconds in which trust that is not renewed halves."""
MUTE_SECONDS: Final = 3_600.0
"""Seconds for the first condemnation; doubled by each further one."""
LONGEST_MUTE: Final = 30 * 86_400.0
CLASS_IN_DOUBT: Final = "class-in-doubt"
"""Reason of an undecided verdict: a narrow breach that may be the fault of the tolerance."""
REASONS: Final = 8
PEERS: Final = 100_000


@dataclass(slots=True)
class TrustLevel:
    """The trust in one peer, as of `at`."""

    honest: float = 0.0
    """Groups found honest, decayed by age."""
    condemned: int = 0
    muted_until: float = 0.0
    at: float = 0.0
    reasons: deque[str] = field(default_factory=lambda: deque(maxlen=REASONS))


class PeerReputation(Protocol):
    """A rule by which peers are muted for a while."""

    def is_muted(self, peer: bytes, /) -> bool:
        """Tell whether a peer is muted now."""

    def mutes(self) -> Mapping[bytes, Mute]:
        """Return the peers that are muted now: for how long, and why."""


class Reputations:
    """Several mute rules as one: a peer is muted if any of them mutes it.

    The rules are `net.peer_scoring.PeerScores` (malformed and forged messages), `Trust` (groups
    that verifiers condemned) and `trainer.sender_quota.SenderQuota` (useless groups).
    """

    def __init__(self, *rules: PeerReputation) -> None:
        self._rules = rules

    def is_muted(self, peer: bytes) -> bool:
        """Tell whether any rule mutes a peer."""
        return any(rule.is_muted(peer) for rule in self._rules)

    def mutes(self) -> Mapping[bytes, Mute]:
        """Return all muted peers; if several rules mute one, with the last's reasons."""
        return {peer: mute for rule in self._rules for peer, mute in rule.mutes().items()}


class Trust:
    """The trust in all peers. Times are seconds of one clock."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._peers: dict[bytes, TrustLevel] = {}

    def honest(self, peer: bytes, now: float) -> None:
        """Record that a group of this peer was checked and found honest."""
        standing = self._at(peer, now)
        standing.honest += 1

    def condemned(self, peer: bytes, reason: str, now: float) -> None:
        """Record that a peer's group was found dishonest: mute it, reset its trust."""
        standing = self._at(peer, now)
        standing.honest = 0.0
        standing.condemned += 1
        standing.reasons.append(reason)
        wait = min(LONGEST_MUTE, MUTE_SECONDS * 2.0 ** min(standing.condemned - 1, 30))
        standing.muted_until = max(standing.muted_until, now + wait)

    def doubted(self, peer: bytes, now: float) -> None:
        """Make a peer a newcomer again, without a mute: all of its groups are checked."""
        self._at(peer, now).honest = 0.0

    def level(self, peer: bytes, now: float) -> float:
        """Return the trust in a peer, from 0 for a newcomer towards 1."""
        honest = self._at(peer, now).honest
        return honest / (honest + NEWCOMER)

    def rate(self, peer: bytes, now: float) -> float:
        """Return the share of a peer's groups to check: 1 for newcomers, less by trust."""
        honest = self._at(peer, now).honest
        return 1.0 if honest < NEWCOMER else max(LEAST_RATE, NEWCOMER / honest)

    def is_muted(self, peer: bytes, now: float | None = None) -> bool:
        """Tell whether a peer is muted now."""
        now = self._clock() if now is None else now
        standing = self._peers.get(peer)
        return standing is not None and now < standing.muted_until

    def mutes(self, now: float | None = None) -> dict[bytes, Mute]:
        """Return the peers that are muted now, with the newest condemnation of each."""
        now = self._clock() if now is None else now
        return {
            peer: Mute(known.muted_until - now, Counter(known.reasons), known.reasons[-1])
            for peer, known in self._peers.items()
            if now < known.muted_until
        }

    def describe(self, peer: bytes, now: float) -> str:
        """Return a peer's own standing as one line."""
        standing = self._at(peer, now)
        if now < standing.muted_until:
            minutes = (standing.muted_until - now) / 60
            return f"muted for {minutes:.0f} more minutes: {standing.reasons[-1]}"
        if standing.condemned and standing.honest < NEWCOMER:
            return f"looked at as a newcomer again, since: {standing.reasons[-1]}"
        return (
            f"trusted at {self.level(peer, now):.2f}; {self.rate(peer, now):.0%} of the groups are looked at"
        )

    def _at(self, peer: bytes, now: float) -> TrustLevel:
        standing = self._peers.get(peer)
        if standing is None:
            standing = self._peers[peer] = TrustLevel(at=now)
            if len(self._peers) > PEERS:
                self._forget(now)
        past = max(0.0, now - standing.at)
        standing.honest *= 0.5 ** (past / HALF_LIFE)
        standing.at = now
        return standing

    def _forget(self, now: float) -> None:
        """Drop the peers of whom least is known, so that strangers cannot fill the memory."""

        def worth(peer: bytes) -> tuple[bool, int, float]:
            known = self._peers[peer]
            return now < known.muted_until, known.condemned, known.honest

        for peer in sorted(self._peers, key=worth)[: PEERS // 10]:
            del self._peers[peer]
