"""What a multiaddress says: which IP address and port, whether through a relay, and whether others can use it.

It knows the notation and this machine's interfaces, and dials nothing.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from typing import Final, Literal

from libp2p.peer.id import ID
from libp2p.utils.address_validation import expand_wildcard_address
from multiaddr import Multiaddr
from multiaddr.exceptions import Error as MultiaddrError
from multiaddr.protocols import P_P2P, P_P2P_CIRCUIT

from protocol.identity import PEER_ID_BYTES, peer_id_bytes

IP = ipaddress.IPv4Address | ipaddress.IPv6Address
MOST_BYTES: Final = 512
"""A circuit with a long host name has about 200."""


def read(binary: bytes) -> Multiaddr | None:
    """An address that a peer wrote; None if it is none."""
    if not 0 < len(binary) <= MOST_BYTES:
        return None
    try:
        address = Multiaddr(binary)
        str(address)  # it is lazy: what it cannot say it cannot dial
    except (MultiaddrError, ValueError, LookupError):
        return None
    return address


def names(address: Multiaddr) -> list[str]:
    """Its protocols, from the left."""
    return [each.name for each in address.protocols()]


def ip_of(address: Multiaddr) -> IP | None:
    """The IP address that it begins with."""
    first = next(iter(address.items()), None)
    return ip(str(first[1])) if first is not None and first[0].name in {"ip4", "ip6"} else None


def ip(text: str) -> IP | None:
    """The IP address that a socket names; an IPv4 address in an IPv6 socket is an IPv4 address."""
    try:
        found = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return mapped or found


def network(host: IP) -> str:
    """The part of it that has one owner: all of IPv4, a /64 of IPv6."""
    return str(host) if host.version == 4 else host.exploded[:19]


def reaches(address: Multiaddr) -> Literal["machine", "network", "internet"]:
    """How far away it can be dialled from; a name is taken to be known everywhere."""
    host = ip_of(address)
    if host is None or host.is_global:
        return "internet"
    return "machine" if host.is_loopback else "network"


def port_of(address: Multiaddr) -> int | None:
    """The TCP port of an address like `/ip4/…/tcp/4001`; None for everything else, circuits too."""
    parts = list(address.items())
    if [each[0].name for each in parts[1:]] not in (["tcp"], ["tcp", "p2p"]):
        return None
    return int(parts[1][1])


def tcp(host: IP, port: int) -> Multiaddr:
    """The address of a port."""
    return Multiaddr(f"/ip{host.version}/{host}/tcp/{port}")


def is_circuit(address: Multiaddr) -> bool:
    """Whether it goes through a relay."""
    return "p2p-circuit" in names(address)


def circuit(address: Multiaddr) -> tuple[ID, tuple[Multiaddr, ...], ID] | None:
    """Relay, the relay's address if there is one, and target. None if this is not one circuit to one peer."""
    parts = names(address)
    if parts.count("p2p-circuit") != 1 or parts[-3:] != ["p2p", "p2p-circuit", "p2p"]:
        return None
    to_relay = address.decapsulate_code(P_P2P_CIRCUIT)
    relay, target = _last_peer(to_relay), _last_peer(address)
    if relay is None or target is None or relay == target:
        return None
    return relay, (to_relay.decapsulate_code(P_P2P),) if len(parts) > 3 else (), target


def to(address: Multiaddr, peer: ID) -> Multiaddr | None:
    """The address with this peer at its end, which identify leaves away; None if it is no way to this peer."""
    whole = address if names(address)[-1:] == ["p2p"] else address.encapsulate(Multiaddr(f"/p2p/{peer}"))
    if _last_peer(whole) != peer or (is_circuit(whole) and circuit(whole) is None):
        return None
    return whole


def bare(address: Multiaddr) -> Multiaddr:
    """The address without the peer at its end."""
    return address.decapsulate_code(P_P2P) if names(address)[-1:] == ["p2p"] else address


def expanded(addresses: Iterable[Multiaddr]) -> list[Multiaddr]:
    """With the addresses of this machine's interfaces in the place of 0.0.0.0 and ::, each once."""
    found: dict[str, Multiaddr] = {}
    for address in addresses:
        host = ip_of(address)
        wide = host is not None and host.is_unspecified
        for each in expand_wildcard_address(address) if wide else [address]:
            own = ip_of(each)
            if own is None or not (own.is_unspecified or own.is_link_local):
                found.setdefault(str(each), each)
    return list(found.values())


def _last_peer(address: Multiaddr) -> ID | None:
    try:
        peer = ID.from_string(str(address.get_peer_id()))
    except (MultiaddrError, ValueError, LookupError):
        return None
    binary = peer.to_bytes()
    return peer if len(binary) == PEER_ID_BYTES and binary == peer_id_bytes(binary[-32:]) else None
