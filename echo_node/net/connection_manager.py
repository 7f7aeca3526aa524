"""Inbound connections: who gets a place, and who leaves when there is none.

Strangers are bounded per IPv4 address, per IPv6 /64, /56 and /48, and per relay. When all places
are taken, the idlest connection of the most crowded network goes, so that nobody displaces a
network with fewer connections than its own. Protected peers are bounded by the number of places
alone: keys of a manifest always, members for a while after a group of theirs was accepted.
"""

from __future__ import annotations

import enum
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Final

from echo_node.net.reachability import multiaddrs

PER_ADDRESS: Final = 64
"""Strangers of one IPv4 address or IPv6 /64: a cluster, or a part of a carrier's customers."""
ADDRESS_SHARE: Final = 4
"""One address may hold one in this many places, where that is more than `PER_ADDRESS`."""
PER_RELAY: Final = 32
"""Strangers through one relay, whose address says nothing of theirs."""
PER_KEY: Final = 3
"""Inbound connections of one key; its oldest goes."""
NEWCOMERS_SHARE: Final = 8
"""One in this many places is not given to members, so that newcomers always find one."""
STAY_SECONDS: Final = 5.0
"""Seconds for which a new connection is not ended for another stranger: a rush must not thrash."""
PROTECTED: Final = 16_384
"""Peers with a protected place; the one whose protection ends first is forgotten."""


class Rank(enum.IntEnum):
    """Rank of a connection; a higher one is never ended for a lower one."""

    STRANGER = 0
    MEMBER = 1
    """A group of its was accepted lately."""
    MANIFEST = 2
    """A trainer or verifier of the run."""


@dataclass(frozen=True, slots=True)
class Network:
    """A network that has one owner, and by how much more than an address it may hold."""

    name: str
    weight: int = 1
    bounded: bool = True
    """Whether it has a cap. Loopback has none: who runs programs on this machine can do worse."""


def networks_of(host: str | None, relay: str = "") -> tuple[Network, ...]:
    """Return the networks that a connection counts for.

    They follow from its remote IP address or relay.
    """
    ip = multiaddrs.ip(host) if host is not None else None
    if ip is None:
        return (Network(f"relay {relay}"),)
    if ip.version == 4 or ip.is_loopback:
        return (Network(str(ip), bounded=not ip.is_loopback),)
    number = int(ip)
    return tuple(
        Network(f"{number >> (128 - bits):x}/{bits}", weight) for bits, weight in ((64, 1), (56, 2), (48, 4))
    )


@dataclass(eq=False, slots=True)
class Place:
    """An inbound connection that holds a place."""

    public: bytes
    networks: tuple[Network, ...]
    since: float
    handle: Hashable


class ConnectionManager:
    """The places of one node. Pure: the swarm opens and closes the connections."""

    def __init__(
        self,
        inbound: int,
        clock: Callable[[], float],
        last_useful: Callable[[bytes], float] = lambda _peer: -math.inf,
        *,
        per_address: int | None = None,
    ) -> None:
        """`last_useful` is when a peer last sent something of use; a ping is not."""
        self._inbound = max(1, inbound)
        self._clock = clock
        self._last_useful = last_useful
        self._per_address = per_address or max(PER_ADDRESS, inbound // ADDRESS_SHARE)
        self._places: dict[Hashable, Place] = {}
        self._protected: dict[bytes, float] = {}

    def __len__(self) -> int:
        return len(self._places)

    @property
    def inbound(self) -> int:
        """The number of places."""
        return self._inbound

    def protect(self, public: bytes, seconds: float) -> None:
        """Protect a peer's place for so long; for ever, if it is a key of the manifest."""
        until = self._clock() + seconds
        self._protected[public] = max(until, self._protected.get(public, 0.0))
        if len(self._protected) > PROTECTED:
            del self._protected[min(self._protected, key=lambda each: self._protected[each])]

    def rank(self, public: bytes) -> Rank:
        """Return the rank of a peer now."""
        until = self._protected.get(public, 0.0)
        if until == math.inf:
            return Rank.MANIFEST
        return Rank.MEMBER if until > self._clock() else Rank.STRANGER

    def admit(self, public: bytes, networks: tuple[Network, ...], handle: Hashable) -> list[Hashable] | None:
        """Give a connection a place; return which ones have to end for it.

        None if there is no place for it.
        """
        new = Place(public, networks, self._clock(), handle)
        ranks = self._ranks()
        ranks[new] = self._rank_of_newcomer(public, ranks)
        ended: list[Place] = []
        own = [each for each in self._places.values() if each.public == public]
        if len(own) >= PER_KEY:
            ended.append(min(own, key=lambda each: each.since))
        if ranks[new] is Rank.STRANGER and not self._fit_networks(new, ranks, ended):
            return None
        if len(self._places) - len(ended) >= self._inbound:
            victim = self._victim(new, ranks, ended)
            if victim is None:
                return None
            ended.append(victim)
        for each in ended:
            del self._places[each.handle]
        self._places[handle] = new
        return [each.handle for each in ended]

    def leave(self, handle: Hashable) -> None:
        """Free the place of a connection that has ended."""
        self._places.pop(handle, None)

    def _ranks(self) -> dict[Place, Rank]:
        """Rank all places; members beyond their share count as strangers.

        The least recent members lose their rank first.
        """
        found = {each: self.rank(each.public) for each in self._places.values()}
        members = [each for each, rank in found.items() if rank is Rank.MEMBER]
        most = self._inbound - max(1, self._inbound // NEWCOMERS_SHARE)
        if len(members) > most:
            members.sort(key=lambda each: self._protected[each.public])
            found |= dict.fromkeys(members[: len(members) - most], Rank.STRANGER)
        return found

    def _rank_of_newcomer(self, public: bytes, ranks: dict[Place, Rank]) -> Rank:
        rank = self.rank(public)
        members = sum(each is Rank.MEMBER for each in ranks.values())
        full = members >= self._inbound - max(1, self._inbound // NEWCOMERS_SHARE)
        return Rank.STRANGER if rank is Rank.MEMBER and full else rank

    def _fit_networks(self, new: Place, ranks: dict[Place, Rank], ended: list[Place]) -> bool:
        """Make room within the newcomer's own networks; return whether there is."""
        for network in new.networks:
            if not network.bounded:
                continue
            cap = PER_RELAY if network.name.startswith("relay ") else self._per_address * network.weight
            inside = [
                each
                for each in self._places.values()
                if network in each.networks and ranks[each] is Rank.STRANGER and each not in ended
            ]
            if len(inside) >= cap:
                victim = self._idlest(self._settled(inside))
                if victim is None:
                    return False
                ended.append(victim)
        return True

    def _victim(self, new: Place, ranks: dict[Place, Rank], ended: list[Place]) -> Place | None:
        """Return the idlest connection of the most crowded network, the newcomer counted."""
        there = [each for each in self._places.values() if each not in ended]
        strangers = [each for each in there if ranks[each] is Rank.STRANGER]
        if ranks[new] > Rank.STRANGER:
            lower = strangers or [each for each in there if ranks[each] < ranks[new]]
            return self._idlest(self._most_crowded(lower))
        crowded = self._most_crowded([*strangers, new])
        return self._idlest(self._settled(each for each in crowded if each is not new))

    def _most_crowded(self, places: list[Place]) -> list[Place]:
        counts = Counter(network for each in places for network in each.networks)
        crowd = {each: max(counts[network] / network.weight for network in each.networks) for each in places}
        most = max(crowd.values(), default=0.0)
        return [each for each in places if crowd[each] == most]

    def _settled(self, places: Iterable[Place]) -> list[Place]:
        now = self._clock()
        return [each for each in places if now - each.since >= STAY_SECONDS]

    def _idlest(self, places: list[Place]) -> Place | None:
        return min(places, key=self._active_at, default=None)

    def _active_at(self, place: Place) -> float:
        return max(place.since, self._last_useful(place.public))
