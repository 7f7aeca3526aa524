"""Scope of an address: loopback, link, private, shared, public or not dialable.

An address here is the text of a multiaddress without its own peer's id at the end, as it is sent
and stored. No name is resolved: whatever is not a numeric IP with a TCP port is not dialable.
"""

from __future__ import annotations

import enum
import functools
import ipaddress
import re
from collections.abc import Iterable, Sequence
from typing import Final

import ifaddr

from protocol import limits, peer_id

_ADDRESS: Final = re.compile(
    r"/ip([46])/([0-9A-Fa-f.:]{2,45})/tcp/([0-9]{1,5})(/p2p/\w{52}/p2p-circuit)?", re.ASCII
)
_SHARED: Final = ipaddress.ip_network("100.64.0.0/10")
"""Carrier-grade NAT: neither private nor public to `ipaddress`."""
_TRANSLATED: Final = tuple(
    ipaddress.ip_network(each) for each in ("64:ff9b::/96", "64:ff9b:1::/48", "::ffff:0:0:0/96")
)
"""NAT64 and SIIT: the last 32 bits are an IPv4 address, which a gateway dials."""
_TUNNELLED: Final = (b"\x00\x00\x5e\xfe", b"\x02\x00\x5e\xfe")
"""ISATAP: bytes of an interface's id before the IPv4 address to which packets are tunnelled."""
_COMPATIBLE: Final = ipaddress.ip_network("::/96")
"""IPv4-compatible IPv6, long abolished."""

_id_of: Final = functools.lru_cache(1_024)(peer_id)  # base58 takes a quarter of a millisecond


class Scope(enum.IntEnum):
    """From how far away an address can be dialled; lower is nearer."""

    NOWHERE = 0
    LOOPBACK = 1
    LINK = 2
    """IPv4 link-local, 169.254.0.0/16: where machines without DHCP meet, and cloud metadata is."""
    PRIVATE = 3
    SHARED = 4
    """Carrier-grade NAT, 100.64.0.0/10: the customers of one provider."""
    PUBLIC = 5


def scope(address: str) -> Scope:
    """Return the scope of an address. A circuit address has the scope of its relay."""
    match = _ADDRESS.fullmatch(address) if len(address) <= limits.ADDRESS_BYTES else None
    if match is None or not 0 < int(match[3]) < 65_536:
        return Scope.NOWHERE
    return scope_of_ip(match[2], version=int(match[1]))


def scope_of_ip(text: str, *, version: int | None = None) -> Scope:
    """Return the scope of an IP address."""
    try:
        ip = ipaddress.ip_address(text)
    except ValueError:
        return Scope.NOWHERE
    if version not in {None, ip.version}:
        return Scope.NOWHERE
    if isinstance(ip, ipaddress.IPv4Address):
        return _scope_of_ip4(ip)
    if ip.ipv4_mapped is not None:
        return _scope_of_ip4(ip.ipv4_mapped)
    return _scope_of_ip6(ip)


def _scope_of_ip4(ip: ipaddress.IPv4Address) -> Scope:
    if ip.is_loopback:
        return Scope.LOOPBACK
    # 0.0.0.0/8 is this machine on many systems; 240.0.0.0/4 holds the broadcast address
    if ip.packed[0] == 0 or ip.is_multicast or ip.packed[0] >= 240:
        return Scope.NOWHERE
    if ip.is_link_local:
        return Scope.LINK
    if ip in _SHARED:
        return Scope.SHARED
    return Scope.PRIVATE if ip.is_private else Scope.PUBLIC


def _scope_of_ip6(ip: ipaddress.IPv6Address) -> Scope:
    if ip.is_loopback:
        return Scope.LOOPBACK
    # a link-local address needs an interface as well
    if ip.is_unspecified or ip.is_multicast or ip.is_link_local or ip.is_site_local or ip in _COMPATIBLE:
        return Scope.NOWHERE
    inside = ip.sixtofour or (ip.teredo[1] if ip.teredo else None)
    if any(ip in network for network in _TRANSLATED) or ip.packed[8:12] in _TUNNELLED:
        inside = ipaddress.IPv4Address(ip.packed[-4:])
    if inside is not None:  # an address within: a gateway would dial it, so only a public one counts
        return Scope.PUBLIC if _scope_of_ip4(inside) is Scope.PUBLIC else Scope.NOWHERE
    return Scope.PRIVATE if ip.is_private else Scope.PUBLIC


def canonical(address: str) -> str | None:
    """Return the one spelling of an address; None if it cannot be dialled.

    An IPv4-mapped IPv6 address becomes IPv4, and IPv6 and ports lose their leading zeros.
    """
    match = _ADDRESS.fullmatch(address) if len(address) <= limits.ADDRESS_BYTES else None
    if match is None or scope(address) is Scope.NOWHERE:
        return None
    ip = ipaddress.ip_address(match[2])
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    ip = mapped or ip
    return f"/ip{ip.version}/{ip}/tcp/{int(match[3])}{match[4] or ''}"


def port_of(address: str) -> int:
    """Return the TCP port of a dialable address; of a circuit, its relay's."""
    return int(address.split("/")[4])


def relay_of(address: str) -> tuple[str, str] | None:
    """Return peer id and address of the relay of a circuit; None for a direct address."""
    match = _ADDRESS.fullmatch(address)
    if match is None or not match[4]:
        return None
    return match[4].split("/")[2], address.removesuffix(match[4])


def subnet_of(address: str) -> str | None:
    """Return the /24 or /48 network of a public address; None for other addresses.

    The owner of the address is likely to control all of that network.
    """
    match = _ADDRESS.fullmatch(address)
    if match is None or scope(address) is not Scope.PUBLIC:
        return None
    ip = ipaddress.ip_address(match[2])
    return str(ipaddress.ip_network((int(ip), 24) if ip.version == 4 else (int(ip), 48), strict=False))


def usable(addresses: Iterable[str], public: bytes, *, least: Scope = Scope.LOOPBACK, most: int) -> list[str]:
    """Return at most `most` addresses of at least a scope, unique, in order.

    However many there are, only a few times as many as are wanted are examined.
    """
    found: dict[str, None] = {}
    for looked_at, address in enumerate(addresses):
        if len(found) == most or looked_at == 8 * most:
            break
        text = without_peer(address, public)
        if scope(text) >= least and (one := canonical(text)) is not None:
            found[one] = None
    return list(found)


def without_peer(address: str, public: bytes) -> str:
    """Return the address without this peer's id at its end."""
    return address.removesuffix(f"/p2p/{_id_of(public)}") if "/p2p/" in address[-64:] else address


def of_socket(ip: str, port: int) -> str:
    """Return the multiaddress of a TCP endpoint."""
    plain = ip.removeprefix("::ffff:") if "." in ip else ip.partition("%")[0]
    return f"/ip{6 if ':' in plain else 4}/{plain}/tcp/{port}"


def interfaces() -> list[str]:
    """Return the non-loopback IP addresses of this machine that others might reach."""
    ips = (each.ip for card in ifaddr.get_adapters() for each in card.ips)
    plain = dict.fromkeys(ip if isinstance(ip, str) else ip[0] for ip in ips)
    return [ip for ip in plain if scope_of_ip(ip) > Scope.LOOPBACK]


def expand(listening: Iterable[str], ips: Sequence[str]) -> list[str]:
    """Replace wildcard listen addresses (0.0.0.0, ::) by one for each of `ips`."""
    found: dict[str, None] = {}
    for address in listening:
        match = _ADDRESS.fullmatch(address)
        if match is None or not ipaddress.ip_address(match[2]).is_unspecified:
            found[address] = None
            continue
        for ip in ips:
            if ipaddress.ip_address(ip).version == int(match[1]):
                found[of_socket(ip, int(match[3]))] = None
    return list(found)
