"""Peer scores: faults and credits of each peer, and how long it is muted for them.

A peer is muted when the share of bad messages is high, so that one fault among a thousand good
messages costs nothing, and for a time that grows with the number of faults. Faults decay.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import Final

import trio

from echo_node.net.base import Mute
from echo_node.net.handler_guard import Faults
from protocol import peer_id

HALF_LIFE_SECONDS: Final = 120.0
"""Seconds in which faults and credits decay to a half."""
TOLERATED: Final = 8.0
"""Faults below which a peer is never muted."""
SHARE: Final = 0.25
"""Share of bad messages above which a peer is muted."""
SECONDS_PER_FAULT: Final = 4.0
"""Seconds of mute for each decayed fault."""
LONGEST_SECONDS: Final = 3600.0
PEERS: Final = 4_096
"""Scores kept; the least important is evicted."""
_log = logging.getLogger("echo_node.net")


@dataclass(slots=True)
class _Score:
    """Decayed counts of one peer."""

    good: float = 0.0
    bad: float = 0.0
    at: float = 0.0
    credited: float = -math.inf
    until: float = 0.0

    def decay(self, now: float) -> None:
        factor = 0.5 ** ((now - self.at) / HALF_LIFE_SECONDS)
        self.good, self.bad, self.at = self.good * factor, self.bad * factor, now


class PeerScores:
    """The scores of all peers, bounded in number."""

    def __init__(self) -> None:
        self._by_peer: dict[bytes, _Score] = {}
        self._faults = Faults()

    def credit(self, peer: bytes) -> None:
        """Count a good message of the peer."""
        score = self._score(peer)
        score.good += 1
        score.credited = score.at

    def fault(self, peer: bytes, reason: str) -> None:
        """Count a fault of the peer, and mute it above the limits."""
        self._faults.score(peer, reason)
        score = self._score(peer)
        score.bad += 1
        if score.bad > TOLERATED and score.bad > SHARE * (score.good + score.bad):
            seconds = min(LONGEST_SECONDS, SECONDS_PER_FAULT * score.bad)
            if score.until <= score.at:
                _log.info("peer %s muted for %.0f s: %s", peer_id(peer), seconds, reason)
            score.until = max(score.until, score.at + seconds)

    def last_credit(self, peer: bytes) -> float:
        """Return when the peer last sent a good message, by trio's clock."""
        score = self._by_peer.get(peer)
        return score.credited if score is not None else -math.inf

    def is_muted(self, peer: bytes) -> bool:
        score = self._by_peer.get(peer)
        return score is not None and score.until > trio.current_time()

    def mutes(self) -> dict[bytes, Mute]:
        """Return the muted peers, for how long, and why."""
        now, reasons = trio.current_time(), self._faults.scores()
        return {
            peer: Mute(score.until - now, reasons.get(peer, {}))
            for peer, score in self._by_peer.items()
            if score.until > now
        }

    def scores(self) -> dict[bytes, dict[str, int]]:
        return self._faults.scores()

    def _score(self, peer: bytes) -> _Score:
        now = trio.current_time()
        score = self._by_peer.get(peer)
        if score is None:
            if len(self._by_peer) >= PEERS:
                del self._by_peer[min(self._by_peer, key=self._weight)]
            score = self._by_peer[peer] = _Score(at=now)
        score.decay(now)
        return score

    def _weight(self, peer: bytes) -> tuple[float, float]:
        score = self._by_peer[peer]
        return max(score.until, score.at), score.bad
