"""Per-peer quota for useless groups; a peer that has used it up is muted.

A token bucket for each peer, which refills with time. A group counts once against the sampler that
signed it, whoever sent it; an unsigned or repeated one counts against its sender, unless the
manifest names that node, which forwards messages of others. So no peer can use up another's quota.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Final

from echo_node.net.base import Mute
from protocol import peer_id

log = logging.getLogger(__name__)
PATIENCE: Final = 256.0
"""Useless groups of one peer at once: the capacity of its bucket."""
PER_SECOND: Final = 4.0
"""Groups a second by which a bucket refills; a muted peer is unmuted at half."""
PEERS: Final = 1024
"""Most peers remembered; those without a useless group for longest go first."""
GROUPS: Final = 16_384
"""Most groups remembered that have counted against their samplers."""
OWN_FAULT: Final = frozenset({"malformed", "over-limit", "wrong-engine", "wrong-prompt", "wrong-signature"})
"""Reasons for a refusal that an honest sampler never causes."""
USELESS: Final = "too many of its groups were of no use"
"""Reason sent to a peer whose quota is used up."""
LITTLE: Final = 1 / 32
"""Weight of a group that was refused for another reason.

All that a sampler has waiting may come too late when another trainer takes over.
"""


@dataclass(slots=True)
class _Account:
    wasted: float = 0.0
    at: float = 0.0
    """Time of the last update."""
    spent: bool = False
    reasons: Counter[str] = field(default_factory=Counter)

    def fade(self, now: float) -> None:
        self.wasted = max(0.0, self.wasted - PER_SECOND * (now - self.at))
        self.at = now
        if self.wasted <= PATIENCE / 2:
            self.spent = False
        if not self.wasted:
            self.reasons.clear()


class SenderQuota:
    """Quotas of peers, by their keys. `named` are the keys of the manifest."""

    def __init__(self, named: Collection[bytes] = (), clock: Callable[[], float] = time.monotonic) -> None:
        self._named = frozenset(named)
        self._clock = clock
        self._accounts: OrderedDict[bytes, _Account] = OrderedDict()
        self._counted: OrderedDict[bytes, None] = OrderedDict()
        """Groups that have counted against their samplers."""

    def refused(self, group: bytes, reason: str, *, sender: bytes, signer: bytes | None) -> None:
        """Count a useless group. `signer` is given where its signature is valid."""
        if signer is not None and group not in self._counted:
            self._counted[group] = None
            if len(self._counted) > GROUPS:
                self._counted.popitem(last=False)
            self._add(signer, reason)
        else:
            self.handed(sender, reason)

    def handed(self, sender: bytes, reason: str, count: int = 1) -> None:
        """Count useless groups against their sender."""
        if sender not in self._named:
            self._add(sender, reason, count)

    def is_muted(self, peer: bytes) -> bool:
        """Return whether a peer's quota is used up for now."""
        if (account := self._accounts.get(peer)) is None:
            return False
        account.fade(self._clock())
        return account.spent

    def mutes(self) -> dict[bytes, Mute]:
        """Return the muted peers, for how long, and why."""
        return {
            peer: Mute((account.wasted - PATIENCE / 2) / PER_SECOND, dict(account.reasons), USELESS)
            for peer, account in self._accounts.items()
            if self.is_muted(peer)
        }

    def _add(self, peer: bytes, reason: str, count: int = 1) -> None:
        account = self._accounts.setdefault(peer, _Account(at=self._clock()))
        self._accounts.move_to_end(peer)
        while len(self._accounts) > PEERS:
            self._accounts.popitem(last=False)
        account.fade(self._clock())
        account.wasted += count if reason in OWN_FAULT else LITTLE * count
        account.reasons[reason] += count
        if account.wasted >= PATIENCE and not account.spent:
            account.spent = True
            log.warning("groups of %s are ignored for a while: %s", peer_id(peer), _reasons(account))


def _reasons(account: _Account) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in account.reasons.most_common())
