"""Scope of an address: loopback, private, public or not dialable.

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
"""Carrier-grade NAT: private, though `ipaddress` does not say so."""

_id_of: Final = functools.lru_cache(1_024)(peer_id)  # base58 takes a quarter of a millisecond


class Scope(enum.IntEnum):
    """From how far away an address can be dialled."""

    NOWHERE = 0
    LOOPBACK = 1
    PRIVATE = 2
    PUBLIC = 3


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
    if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is not None:
        ip = ip.ipv4_mapped
    if ip.is_loopback:
        return Scope.LOOPBACK
    needs_interface = ip.version == 6 and ip.is_link_local
    if ip.is_unspecified or ip.is_multicast or str(ip) == "255.255.255.255" or needs_interface:
        return Scope.NOWHERE
    return Scope.PRIVATE if ip.is_private or (ip.version == 4 and ip in _SHARED) else Scope.PUBLIC


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
        text = address.removesuffix(f"/p2p/{_id_of(public)}") if "/p2p/" in address[-64:] else address
        if scope(text) >= least:
            found[text] = None
    return list(found)


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
