"""Who makes groups that are of no use, again and again: what each peer may waste of our time before it is not looked at.

A bucket for each peer, which fills with time. A group counts against the sampler that signed it, once, whoever handed it
over; where nobody signed it, or it comes again, against who handed it over, unless that one is named by the manifest and
passes on what others said. So nobody can waste another's patience. It knows nothing of groups.
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
"""Useless groups of one peer, at once."""
PER_SECOND: Final = 4.0
"""By which patience comes back. Who has used it up is looked at again once half of it is back."""
PEERS: Final = 1024
"""That are remembered; those that have wasted nothing for longest are forgotten first."""
GROUPS: Final = 16_384
"""That are remembered to have counted against their samplers."""
OWN_FAULT: Final = frozenset({"malformed", "over-limit", "wrong-engine", "wrong-prompt", "wrong-signature"})
"""Reasons for a refusal that an honest sampler does not give. Others happen to the best, and count for little."""
LITTLE: Final = 1 / 32
"""So that all that a sampler has waiting may come too late, as it does when another trainer takes over."""


@dataclass(slots=True)
class _Account:
    wasted: float = 0.0
    at: float = 0.0
    """As of when."""
    spent: bool = False
    reasons: Counter[str] = field(default_factory=Counter)

    def fade(self, now: float) -> None:
        self.wasted = max(0.0, self.wasted - PER_SECOND * (now - self.at))
        self.at = now
        if self.wasted <= PATIENCE / 2:
            self.spent = False
        if not self.wasted:
            self.reasons.clear()


class Waste:
    """What peers have wasted, by their keys. `named` are the keys of the manifest."""

    def __init__(self, named: Collection[bytes] = (), clock: Callable[[], float] = time.monotonic) -> None:
        self._named = frozenset(named)
        self._clock = clock
        self._accounts: OrderedDict[bytes, _Account] = OrderedDict()
        self._counted: OrderedDict[bytes, None] = OrderedDict()
        """Groups that have counted against their samplers."""

    def refused(self, group: bytes, reason: str, *, sender: bytes, signer: bytes | None) -> None:
        """A group was of no use. `signer` is given where it has really signed it."""
        if signer is not None and group not in self._counted:
            self._counted[group] = None
            if len(self._counted) > GROUPS:
                self._counted.popitem(last=False)
            self._add(signer, reason)
        else:
            self.handed(sender, reason)

    def handed(self, sender: bytes, reason: str, count: int = 1) -> None:
        """So many useless groups were handed over, and it is nobody else's fault."""
        if sender not in self._named:
            self._add(sender, reason, count)

    def is_spent(self, peer: bytes) -> bool:
        """Whether patience with this peer is used up for now."""
        if (account := self._accounts.get(peer)) is None:
            return False
        account.fade(self._clock())
        return account.spent

    def spent(self) -> dict[bytes, Mute]:
        """With whom it is used up, for how long, and why."""
        return {
            peer: Mute((account.wasted - PATIENCE / 2) / PER_SECOND, dict(account.reasons))
            for peer, account in self._accounts.items()
            if self.is_spent(peer)
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
            log.warning("groups of %s are not looked at for a while: %s", peer_id(peer), _told(account))


def _told(account: _Account) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in account.reasons.most_common())
