"""The one door for addresses: which of them may be dialled, and how often.

Every address passes `admit` with its teller before it is stored, and `take` before a socket is
opened; what was never admitted is never dialled. The rules: an address is no nearer than the scope
by which its teller was met; ports below 1024 are for seeds that the user named; an address that
never answered has few tries; and every teller has a budget of dials that fail.
"""

from __future__ import annotations

import enum
import re
from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Final

from echo_node.net.discovery.address_scope import Scope, canonical, port_of, relay_of, scope, without_peer
from echo_node.net.rate_limit import TokenBucket
from protocol import ProtocolError, limits, public_key_of

LOWEST_PORT: Final = 1_024
"""Ports below it belong to services of the system; only a user may name one."""
NAMES: Final = 2
"""Most DNS names that one telling of a peer's addresses may hold."""
_NAME: Final = re.compile(
    r"/dns[46]?/(?=[A-Za-z0-9.-]{1,253}/)[A-Za-z0-9-]{1,63}(\.[A-Za-z0-9-]{1,63})*\.?/tcp/[1-9][0-9]{0,4}",
    re.ASCII,
)


class Trust(enum.IntEnum):
    """Trust in the source of an address; higher ones replace lower ones."""

    PEER = 0
    """A peer said so: of itself or of others."""
    LAN = 1
    """A multicast announcement of the local network, by whoever is in it."""
    BOOK = 2
    """This node reached the peer there before, maybe in an earlier run of the program."""
    RUN = 3
    """A seed of a link or a manifest."""
    USER = 4
    """A seed that the user named, or an address that the program was told to connect to."""


@dataclass(frozen=True, slots=True)
class Teller:
    """Source of an address: the scope by which it was met, and the budget that pays."""

    trust: Trust
    met: Scope
    budget: str = ""

    def may_name(self, address: str) -> bool:
        """Return whether the teller may name a canonical address."""
        if self.trust < Trust.USER and port_of(address) < LOWEST_PORT:
            return False
        return is_name(address) or scope(address) >= max(self.met, Scope.LOOPBACK)


USER: Final = Teller(Trust.USER, Scope.LOOPBACK)
LAN: Final = Teller(Trust.LAN, Scope.LINK, "lan")
UNKNOWN: Final = Teller(Trust.PEER, Scope.PUBLIC, "unknown")
"""A peer of whom no connection is open any more."""


def run_teller(seeds: Iterable[str]) -> Teller:
    """Return the teller of a run's seeds, given their addresses.

    The furthest of them says how far away the run is: one with a public seed sends nobody to a
    private address or to the loopback interface. A name counts as public.
    """
    scopes = [Scope.PUBLIC if each.startswith("/dns") else scope(each) for each in seeds]
    return Teller(Trust.RUN, max(scopes, default=Scope.PUBLIC), "run")


def book_tellers(dialled: Iterable[str], signed: Iterable[str]) -> tuple[Teller, Teller]:
    """Return the tellers of an address book entry, of reached and signed ones.

    A peer was met by the nearest address at which it was reached; one that never was, by the
    furthest that it signed.
    """
    reached = [scope(each) for each in dialled]
    met = min(reached) if reached else max(map(scope, signed), default=Scope.PUBLIC)
    return Teller(Trust.BOOK, Scope.LOOPBACK, "book"), Teller(Trust.PEER, met, "book")


def is_name(address: str) -> bool:
    """Return whether an address is a DNS name with a TCP port."""
    return _NAME.fullmatch(address) is not None and int(address.rpartition("/")[2]) < 65_536


def port_may_be_dialled(port: int) -> bool:
    """Return whether a port named by a peer may be dialled at its address.

    The address is that of its connection.
    """
    return LOWEST_PORT <= port < 65_536


@dataclass(frozen=True, slots=True)
class DoorLimits:
    """Limits of the door. Dials that reach the peer cost nothing."""

    tries: int = 3
    """Dials of one address under one peer id that a peer named and where nobody answered."""
    rest: float = 1_800.0
    """Seconds after which those tries are given again."""
    endpoint_burst: int = 6
    endpoint_rate: float = 1 / 60
    """Dials of one address a second, under whatever peer ids, while none of them answers."""
    teller_burst: int = 64
    teller_rate: float = 1 / 5
    """Failed dials a second of what one teller named."""
    burst: int = 512
    rate: float = 5.0
    """Failed dials a second of what all peers together named."""
    per_teller: int = 512
    """Addresses that one teller may have admitted; its newest replace its oldest."""
    most: int = 16_384
    """Addresses admitted in all; the teller with the most makes room."""
    kept: int = 4_096
    """Addresses with tries, endpoints and tellers with a budget, addresses that answered."""


Key = tuple[bytes, str]
"""A peer's public key and an address."""
_Buckets = OrderedDict[Hashable, TokenBucket]
_Draw = tuple[_Buckets, Hashable, float, float]
"""A table of budgets, the one in it, its rate and its burst."""


class AddressDoor:
    """Admitted addresses of all peers, with their tries and budgets.

    Bounded, in memory.
    """

    def __init__(self, allowed: DoorLimits | None = None) -> None:
        self._allowed = allowed or DoorLimits()
        self._admitted: dict[Key, Teller] = {}
        self._by_budget: dict[str, OrderedDict[Key, None]] = {}
        self._answered: OrderedDict[Key, None] = OrderedDict()
        self._tries: _Buckets = OrderedDict()
        self._endpoints: _Buckets = OrderedDict()
        self._tellers: _Buckets = OrderedDict()
        self._all: _Buckets = OrderedDict()
        self.counts: Counter[str] = Counter()
        """Addresses by outcome: `refused`, `spent`, `dialled`."""

    def __len__(self) -> int:
        return len(self._admitted)

    def admit(
        self, public: bytes, addresses: Iterable[str], teller: Teller, *, most: int = limits.ADDRESSES
    ) -> list[str]:
        """Return the addresses of a peer that its teller may name.

        Each comes once, in one spelling. However many there are, only a few times as many as are
        wanted are examined.
        """
        found: dict[str, None] = {}
        names = 0
        for looked_at, text in enumerate(addresses):
            if len(found) == most or looked_at == 8 * most:
                break
            plain = without_peer(text, public)
            if name := is_name(plain):
                names += 1
            one = plain.lower() if name and names <= NAMES else canonical(plain)
            if one is None or not teller.may_name(one):
                self.counts["refused"] += 1
                continue
            found[one] = None
        for one in found:
            self._admit((public, one), teller)
            if (relay := relay_of(one)) is not None and (key := _key_of(relay[0])) is not None:
                self._admit((key, relay[1]), teller)
        return list(found)

    def admit_resolved(self, public: bytes, name: str, numbers: Iterable[str]) -> list[str]:
        """Return the addresses that an admitted name leads to and its teller may name."""
        return self.admit(public, numbers, self._admitted.get((public, name), UNKNOWN))

    def allows(self, public: bytes, address: str) -> bool:
        """Return whether an address was admitted and has tries and budget left."""
        key = (public, address)
        if key in self._answered:
            return True
        teller = self._admitted.get(key)
        if teller is None:
            return False
        found = (table.get(name) for table, name, *_ in self._draws_on(key, teller))
        return all(bucket is None or bucket.has() for bucket in found)

    def take(self, public: bytes, address: str) -> bool:
        """Count a dial; return whether it may be made."""
        key = (public, address)
        if not self.allows(public, address):
            self.counts["spent" if key in self._admitted else "refused"] += 1
            return False
        for table, name, rate, burst in self._draws_on(key, self._admitted.get(key, USER)):
            bucket = table.pop(name, None) or TokenBucket(rate, burst)
            bucket.reserve()
            table[name] = bucket
            while len(table) > self._allowed.kept:
                table.popitem(last=False)
        self.counts["dialled"] += 1
        return True

    def reached(self, public: bytes, address: str) -> None:
        """Record that the peer itself answered there, and give back what the dial cost."""
        key = (public, address)
        if (teller := self._admitted.get(key)) is not None:
            for table, name, *_ in self._draws_on(key, teller):
                if (bucket := table.get(name)) is not None:
                    bucket.refund(1.0)
        self._answered[key] = None
        self._answered.move_to_end(key)
        while len(self._answered) > self._allowed.kept:
            self._answered.popitem(last=False)

    def _draws_on(self, key: Key, teller: Teller) -> list[_Draw]:
        """Return the budgets, with rate and burst, that dialling an address draws on."""
        allowed = self._allowed
        if teller.trust is Trust.USER or key in self._answered:
            return []
        found: list[_Draw] = [(self._endpoints, key[1], allowed.endpoint_rate, allowed.endpoint_burst)]
        if teller.trust <= Trust.LAN:
            found.append((self._tellers, teller.budget, allowed.teller_rate, allowed.teller_burst))
        if teller.trust is Trust.PEER:
            found.append((self._tries, key, allowed.tries / allowed.rest, allowed.tries))
            found.append((self._all, "all", allowed.rate, allowed.burst))
        return found

    def _admit(self, key: Key, teller: Teller) -> None:
        known = self._admitted.get(key)
        if known is not None:
            if not self._replaces(known, teller):
                return
            self._drop(key, known)
        own = self._by_budget.setdefault(teller.budget, OrderedDict())
        self._admitted[key] = teller
        own[key] = None
        if len(own) > self._allowed.per_teller and teller.trust < Trust.USER:
            self._drop_oldest(teller.budget)
        if len(self._admitted) > self._allowed.most:
            self._drop_oldest(max(self._by_budget, key=lambda each: len(self._by_budget[each])))

    def _replaces(self, known: Teller, teller: Teller) -> bool:
        """Return whether a second teller takes the first one's place.

        One that has used up its budget must not keep the addresses that it named from others.
        """
        if teller.trust != known.trust:
            return teller.trust > known.trust
        spent = self._tellers.get(known.budget)
        return spent is not None and not spent.has()

    def _drop_oldest(self, budget: str) -> None:
        key = next(iter(self._by_budget[budget]))
        self._drop(key, self._admitted[key])

    def _drop(self, key: Key, teller: Teller) -> None:
        del self._admitted[key]
        del self._by_budget[teller.budget][key]
        if not self._by_budget[teller.budget]:
            del self._by_budget[teller.budget]


def _key_of(peer: str) -> bytes | None:
    try:
        return public_key_of(peer)
    except ProtocolError:
        return None
