"""Settings of a node in a libp2p swarm, and the check of its announced addresses."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from multiaddr import Multiaddr

from echo_node.errors import ConfigError, boundary
from echo_node.net.discovery.address_scope import Scope, scope

ADDRESS_ADVICE: Final = "one looks like /ip4/192.0.2.7/tcp/4001"
SEED_CONNECTIONS: Final = 600
"""Connections of a bootstrap node."""
_NAMED: Final = re.compile(r"/dns[46]?/[^/]+/tcp/[1-9][0-9]*")
_OWN_PEER: Final = re.compile(r"/p2p/\w+$")


@dataclass(frozen=True, slots=True)
class SwarmSettings:
    """Settings of one node in a swarm."""

    listen: tuple[str, ...] = ("/ip4/0.0.0.0/tcp/0",)
    seeds: tuple[str, ...] = ()
    """Seeds that the user named."""
    run_seeds: tuple[str, ...] = ()
    """Seeds of a link or a manifest, which its author named: see `address_door.run_teller`."""
    book: Path | None = None
    """File in which good peers are kept across restarts; None keeps them in memory."""
    lan: bool = False
    """Whether to look for peers on the local network."""
    relay: bool = True
    """Whether to relay for nodes that cannot be dialled, while this one can be."""
    wanted: int = 12
    """Connections that this node makes by itself."""
    connections: int = 300
    per_address: int | None = None
    """Inbound connections of strangers from one IPv4 address or IPv6 /64 (twice as many from a /56,
    four times from a /48); None is 64, or a quarter of the places if that is more."""
    public: bool | None = None
    """Whether others can dial this node; None finds out."""
    announce: tuple[str, ...] = ()
    """Addresses at which others can dial this node, beside those that it finds."""
    bulk: bool = True
    """Whether to open the bulk port: a TCP port with TLS 1.3 for large blobs."""
    bulk_port: int = 0
    """Bulk port; 0 is the one after the first that `listen` names, or else any free one."""

    def for_seed(self, *, public: bool | None = True) -> SwarmSettings:
        """Return the same settings for a bootstrap node: more connections, and dialable."""
        return replace(self, connections=SEED_CONNECTIONS, public=public, bulk=False)

    def announced(self) -> list[Multiaddr]:
        """Return the addresses to announce, which others pass on. Raises `ConfigError`."""
        return [_parse_announced(each) for each in self.announce]


def _parse_announced(text: str) -> Multiaddr:
    with boundary(ConfigError, "the addresses to announce", advice=ADDRESS_ADVICE):
        address = Multiaddr(text)
    plain = _OWN_PEER.sub("", str(address))
    if scope(plain) is Scope.NOWHERE and not _NAMED.fullmatch(plain):
        raise ConfigError(f"the address {text!r} to announce cannot be dialled", advice=ADDRESS_ADVICE)
    return address
