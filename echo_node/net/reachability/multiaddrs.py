"""Helpers for multiaddresses: IP address and port, circuits, scope, interfaces."""

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
"""A circuit address with a long host name has about 200."""


def read(binary: bytes) -> Multiaddr | None:
    """Parse a binary address from a peer; None if it is malformed."""
    if not 0 < len(binary) <= MOST_BYTES:
        return None
    try:
        address = Multiaddr(binary)
        str(address)  # it is lazy: what it cannot say it cannot dial
    except (MultiaddrError, ValueError, LookupError):
        return None
    return address


def names(address: Multiaddr) -> list[str]:
    """Return the names of an address's protocols, from the left."""
    return [each.name for each in address.protocols()]


def ip_of(address: Multiaddr) -> IP | None:
    """Return the IP address that an address begins with; None if it has none."""
    first = next(iter(address.items()), None)
    return ip(str(first[1])) if first is not None and first[0].name in {"ip4", "ip6"} else None


def ip(text: str) -> IP | None:
    """Parse a socket's IP address; IPv4-mapped IPv6 becomes IPv4."""
    try:
        found = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return mapped or found


def network(host: IP) -> str:
    """Return the network that has one owner: the IPv4 address itself, a /64 of IPv6."""
    return str(host) if host.version == 4 else host.exploded[:19]


def reaches(address: Multiaddr) -> Literal["machine", "network", "internet"]:
    """Return from how far away an address can be dialled; DNS names count as global."""
    host = ip_of(address)
    if host is None or host.is_global:
        return "internet"
    return "machine" if host.is_loopback else "network"


def port_of(address: Multiaddr) -> int | None:
    """Return the TCP port of an address; None if it is not plain TCP."""
    parts = list(address.items())
    if [each[0].name for each in parts[1:]] not in (["tcp"], ["tcp", "p2p"]):
        return None
    return int(parts[1][1])


def tcp(host: IP, port: int) -> Multiaddr:
    """Return the multiaddress of a TCP endpoint."""
    return Multiaddr(f"/ip{host.version}/{host}/tcp/{port}")


def is_circuit(address: Multiaddr) -> bool:
    """Return whether an address goes through a relay."""
    return "p2p-circuit" in names(address)


def circuit(address: Multiaddr) -> tuple[ID, tuple[Multiaddr, ...], ID] | None:
    """Return the relay, its address if given, and the target of a circuit address.

    None if the address is not one circuit to one peer.
    """
    parts = names(address)
    if parts.count("p2p-circuit") != 1 or parts[-3:] != ["p2p", "p2p-circuit", "p2p"]:
        return None
    to_relay = address.decapsulate_code(P_P2P_CIRCUIT)
    relay, target = _last_peer(to_relay), _last_peer(address)
    if relay is None or target is None or relay == target:
        return None
    return relay, (to_relay.decapsulate_code(P_P2P),) if len(parts) > 3 else (), target


def to(address: Multiaddr, peer: ID) -> Multiaddr | None:
    """Return the address with this peer's id at its end, which identify leaves out.

    None if the address belongs to another peer or is malformed.
    """
    whole = address if names(address)[-1:] == ["p2p"] else address.encapsulate(Multiaddr(f"/p2p/{peer}"))
    if _last_peer(whole) != peer or (is_circuit(whole) and circuit(whole) is None):
        return None
    return whole


def bare(address: Multiaddr) -> Multiaddr:
    """Return the address without the peer id at its end."""
    return address.decapsulate_code(P_P2P) if names(address)[-1:] == ["p2p"] else address


def expanded(addresses: Iterable[Multiaddr]) -> list[Multiaddr]:
    """Replace 0.0.0.0 and :: by the addresses of this machine's interfaces, each once."""
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
