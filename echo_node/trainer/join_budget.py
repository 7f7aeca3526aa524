"""Join budgets for new keys: per address and in all, over ten minutes.

Keys are free, addresses are not. Peers behind one IPv4 address or IPv6 /64 share a budget, and a
/48 has that of a few /64s. The first joins of an address are admitted even when all budgets
together are spent, so that a crowd from elsewhere keeps nobody out.
"""

from __future__ import annotations

import ipaddress
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

WINDOW_SECONDS: Final = 600.0
"""Seconds in which a budget refills."""
ALWAYS: Final = 4
"""Joins of one address in that time that are admitted whatever others do."""
WIDE: Final = 16
"""Budgets of a /64 that one IPv6 /48 has."""
DEBT: Final = 2
"""Budgets that can be spent ahead, by joins that are always admitted; more is not counted."""
ADDRESSES: Final = 65_536
"""Most addresses remembered; those without a join for longest are forgotten first."""
_RELAYED: Final = "relayed"
_ALL: Final = "all"


@dataclass(slots=True)
class _Spent:
    joins: float = 0.0
    at: float = 0.0


class JoinBudget:
    """Joins spent, by address. The limits are numbers of joins in ten minutes."""

    def __init__(self, per_address: int, total: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_address = per_address
        self._total = total
        self._clock = clock
        self._spent: OrderedDict[str, _Spent] = OrderedDict()

    def wait(self, address: str | None) -> float:
        """Return the seconds that a join from this address must wait; 0 for none."""
        now, limits = self._clock(), self._limits(address)
        waits = [
            WINDOW_SECONDS * (over / limit)
            for name, limit in limits.items()
            if (over := self._at(name, limit, now) + 1 - limit) > 0
        ]
        narrowest = next(iter(limits))
        is_crowd = self._at(narrowest, limits[narrowest], now) >= ALWAYS
        if narrowest in (_ALL, _RELAYED) or is_crowd:
            over = self._at(_ALL, self._total, now) + 1 - self._total
            waits += [WINDOW_SECONDS * over / self._total] if over > 0 else []
        return max(waits, default=0.0)

    def spend(self, address: str | None) -> None:
        """Count a join that was taken."""
        now = self._clock()
        for name, limit in {**self._limits(address), _ALL: self._total}.items():
            self._at(name, limit, now)
            spent = self._spent.setdefault(name, _Spent(at=now))
            spent.joins = min(spent.joins + 1, float(DEBT * limit))
            self._spent.move_to_end(name)
        while len(self._spent) > ADDRESSES:
            self._spent.popitem(last=False)

    def _limits(self, address: str | None) -> dict[str, int]:
        """Return the budgets that count a join from an address, narrowest first."""
        names = list(_buckets(address))
        if names in ([_RELAYED], [_ALL]):
            return {names[0]: self._total}
        return dict(zip(names, (self._per_address, WIDE * self._per_address), strict=False))

    def _at(self, name: str, limit: int, now: float) -> float:
        spent = self._spent.get(name)
        if spent is None:
            return 0.0
        spent.joins = max(0.0, spent.joins - limit * (now - spent.at) / WINDOW_SECONDS)
        spent.at = now
        return spent.joins


def _buckets(address: str | None) -> Iterable[str]:
    """Return the names of an address's budgets, the narrowest first.

    This machine's own nodes, and those behind relays, which have quotas, share that of all.
    """
    try:
        parsed = None if address is None else ipaddress.ip_address(address)
    except ValueError:
        parsed = None
    if parsed is None:
        return (_RELAYED,)
    if isinstance(parsed, ipaddress.IPv6Address) and parsed.ipv4_mapped is not None:
        parsed = parsed.ipv4_mapped
    if parsed.is_loopback:
        return (_ALL,)
    if isinstance(parsed, ipaddress.IPv4Address):
        return (str(parsed),)
    return tuple(str(ipaddress.ip_network((parsed, bits), strict=False)) for bits in (64, 48))
