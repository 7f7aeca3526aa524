"""Credit of proven samplers, by which room in a batch is shared.

Credit follows verified groups, not the number of keys. A peer that spreads its work over many keys
has the same credit in all, because each term of the sum is linear in its groups:

- A verified group counts as the inverse of the rate at which its sampler's groups were looked at.
  Groups of a new key are all looked at, so they would else count ten times those of an old one.
- Credit halves in an hour without verified groups: neither age nor an earlier key's fame lasts.
- Few heads discount it: who did all its work under one or two heads has shown little.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final

from echo_node.runtime.reputation import LEAST_RATE

HALF_LIFE: Final = 3_600.0
"""Seconds in which credit halves."""
HEADS: Final = 8
"""Heads with verified groups at which half of the credit counts."""
HEADS_REMEMBERED: Final = 64
"""Most heads that are counted for one sampler, the newest."""
LEAST: Final = 1e-3
"""Weight of a sampler without credit, so that none is shut out."""
SAMPLERS: Final = 8_192
"""Most samplers with credit; those without a verified group for longest are forgotten first."""


@dataclass(slots=True)
class _Account:
    credit: float = 0.0
    at: float = 0.0
    heads: OrderedDict[bytes, None] = field(default_factory=OrderedDict)


class ShareCredit:
    """Credit by sampler. Times are seconds of one clock."""

    def __init__(self) -> None:
        self._accounts: OrderedDict[bytes, _Account] = OrderedDict()

    def verified(self, sampler: bytes, head: bytes, rate: float, now: float) -> None:
        """Credit a group found honest; `rate` is the chance that it was checked."""
        account = self._accounts.setdefault(sampler, _Account(at=now))
        self._accounts.move_to_end(sampler)
        if len(self._accounts) > SAMPLERS:
            self._accounts.popitem(last=False)
        account.credit = _decayed(account, now) + 1.0 / min(1.0, max(LEAST_RATE, rate))
        account.at = max(now, account.at)
        account.heads[head] = None
        account.heads.move_to_end(head)
        if len(account.heads) > HEADS_REMEMBERED:
            account.heads.popitem(last=False)

    def condemned(self, sampler: bytes) -> None:
        """Forget all credit of a sampler that is muted."""
        self._accounts.pop(sampler, None)

    def weight(self, sampler: bytes, now: float) -> float:
        """Return a sampler's weight when room is shared."""
        account = self._accounts.get(sampler)
        if account is None:
            return LEAST
        heads = len(account.heads)
        return max(LEAST, _decayed(account, now) * heads / (heads + HEADS))


def _decayed(account: _Account, now: float) -> float:
    return float(account.credit * 0.5 ** (max(0.0, now - account.at) / HALF_LIFE))
