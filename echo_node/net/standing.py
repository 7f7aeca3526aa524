"""How peers stand with this node: what each did wrong, and for how long it is not heard because of it.

A peer is muted in proportion: to how much of what it sent was bad, so that one slip among a thousand good messages
costs nothing, and for a time that grows with the number of faults. Faults fade. It knows no medium.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Final

import trio

from echo_node.net.base import Mute
from echo_node.net.guard import Faults
from protocol import peer_id

FADE_SECONDS: Final = 120.0
"""In which what a peer did counts for half."""
TOLERATED: Final = 8.0
"""Faults that are never enough to be muted."""
SHARE: Final = 0.25
"""The part of what a peer sent that must be bad before it is muted."""
SECONDS_PER_FAULT: Final = 4.0
LONGEST_SECONDS: Final = 3600.0
PEERS: Final = 4_096
_log = logging.getLogger("echo_node.net")


@dataclass(slots=True)
class _Account:
    good: float = 0.0
    bad: float = 0.0
    at: float = 0.0
    until: float = 0.0

    def fade(self, now: float) -> None:
        factor = 0.5 ** ((now - self.at) / FADE_SECONDS)
        self.good, self.bad, self.at = self.good * factor, self.bad * factor, now


class Standing:
    """The accounts of all peers. Bounded: the account that matters least makes room."""

    def __init__(self) -> None:
        self._accounts: dict[bytes, _Account] = {}
        self._faults = Faults()

    def credit(self, peer: bytes) -> None:
        """The peer sent something good."""
        account = self._account(peer)
        account.good += 1

    def fault(self, peer: bytes, reason: str) -> None:
        """Hold a fault against the peer, and mute it if that is too much."""
        self._faults.score(peer, reason)
        account = self._account(peer)
        account.bad += 1
        if account.bad > TOLERATED and account.bad > SHARE * (account.good + account.bad):
            seconds = min(LONGEST_SECONDS, SECONDS_PER_FAULT * account.bad)
            if account.until <= account.at:
                _log.info("%s is muted for %.0f s: %s", peer_id(peer), seconds, reason)
            account.until = max(account.until, account.at + seconds)

    def muted(self, peer: bytes) -> bool:
        account = self._accounts.get(peer)
        return account is not None and account.until > trio.current_time()

    def mutes(self) -> dict[bytes, Mute]:
        """Who is muted now, for how long, and why."""
        now, reasons = trio.current_time(), self._faults.scores()
        return {
            peer: Mute(account.until - now, reasons.get(peer, {}))
            for peer, account in self._accounts.items()
            if account.until > now
        }

    def scores(self) -> dict[bytes, dict[str, int]]:
        return self._faults.scores()

    def _account(self, peer: bytes) -> _Account:
        now = trio.current_time()
        account = self._accounts.get(peer)
        if account is None:
            if len(self._accounts) >= PEERS:
                del self._accounts[min(self._accounts, key=self._weight)]
            account = self._accounts[peer] = _Account(at=now)
        account.fade(now)
        return account

    def _weight(self, peer: bytes) -> tuple[float, float]:
        account = self._accounts[peer]
        return max(account.until, account.at), account.bad
