"""How far an address leads: to this machine, a private network, everywhere, or nowhere. Text in, text out.

An address here is a multiaddress without the id of its own peer at the end, as it travels and is kept. This module
opens no connection and resolves no name: what is no number, or no TCP port, leads nowhere.
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
"""The inside of a provider's network: private, though Python does not call it so."""

_id_of: Final = functools.lru_cache(1_024)(peer_id)  # base58 takes a quarter of a millisecond


class Scope(enum.IntEnum):
    """From how far away an address can be dialled."""

    NOWHERE = 0
    LOOPBACK = 1
    PRIVATE = 2
    PUBLIC = 3


def scope(address: str) -> Scope:
    """How far an address leads. A way through a relay leads as far as the relay."""
    match = _ADDRESS.fullmatch(address) if len(address) <= limits.ADDRESS_BYTES else None
    if match is None or not 0 < int(match[3]) < 65_536:
        return Scope.NOWHERE
    return scope_of_ip(match[2], version=int(match[1]))


def scope_of_ip(text: str, *, version: int | None = None) -> Scope:
    """How far an IP address leads."""
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


def neighbourhood(address: str) -> str | None:
    """The network that the owner of a public address is likely to have whole; None for all other addresses."""
    match = _ADDRESS.fullmatch(address)
    if match is None or scope(address) is not Scope.PUBLIC:
        return None
    ip = ipaddress.ip_address(match[2])
    return str(ipaddress.ip_network((int(ip), 24) if ip.version == 4 else (int(ip), 48), strict=False))


def usable(addresses: Iterable[str], public: bytes, *, least: Scope = Scope.LOOPBACK, most: int) -> list[str]:
    """At most `most` of a peer's addresses that lead at least so far, each once and in their order.

    However many there are, only a few times as many as are wanted are looked at.
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
    """The address of a TCP endpoint."""
    plain = ip.removeprefix("::ffff:") if "." in ip else ip.partition("%")[0]
    return f"/ip{6 if ':' in plain else 4}/{plain}/tcp/{port}"


def interfaces() -> list[str]:
    """The IP addresses of this machine at which others might reach it; loopback is none of them."""
    ips = (each.ip for card in ifaddr.get_adapters() for each in card.ips)
    plain = dict.fromkeys(ip if isinstance(ip, str) else ip[0] for ip in ips)
    return [ip for ip in plain if scope_of_ip(ip) > Scope.LOOPBACK]


def expand(listening: Iterable[str], ips: Sequence[str]) -> list[str]:
    """Where a listener is to be found: "every interface" (0.0.0.0, ::) becomes one address for each of `ips`."""
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
