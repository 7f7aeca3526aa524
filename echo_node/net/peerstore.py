"""Bounded peerstore: addresses and protocols of peers.

The library's own keeps any number of addresses for a peer, raises when they have expired, and when
full evicts its owner's keys first. Here connected peers and this node itself are pinned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from libp2p.peer.id import ID
from libp2p.peer.peerstore import PeerStore
from multiaddr import Multiaddr

from protocol import limits

PEERS: Final = 2_048
ADDRESSES: Final = 2 * limits.ADDRESSES
"""Addresses kept of one peer: its own advertised ones and some from others."""


class BoundedPeerStore(PeerStore):
    """The library's peerstore with enforced limits.

    `pinned` tells whether a peer is kept, expired or not; `admit` returns the addresses that a peer
    may name for itself, for those that the library adds by itself from identify messages.
    """

    def __init__(
        self,
        pinned: Callable[[ID], bool] = lambda _peer: False,
        admit: Callable[[ID, Sequence[Multiaddr]], Sequence[Multiaddr]] = lambda _peer, addresses: addresses,
    ) -> None:
        super().__init__(max_records=PEERS, max_peers=PEERS)
        self._pinned = pinned
        self._admit = admit

    def addrs(self, peer_id: ID) -> list[Multiaddr]:
        """Return the unexpired addresses of a peer."""
        data = self.peer_data_map.get(peer_id)
        if data is None or (data.is_expired() and not self._pinned(peer_id)):
            return []
        return list(data.get_addrs())

    def get_protocols(self, peer_id: ID) -> list[str]:
        """Return the protocols that a peer advertised."""
        data = self.peer_data_map.get(peer_id)
        return [] if data is None else list(data.get_protocols())

    def add_addrs(self, peer_id: ID, addrs: Sequence[Multiaddr], ttl: int = 0) -> None:
        """Add addresses that the peer names for itself, as far as they are admitted."""
        self.keep(peer_id, self._admit(peer_id, addrs), ttl)

    def keep(self, peer_id: ID, addrs: Sequence[Multiaddr], ttl: int) -> None:
        """Add admitted addresses up to the limit; earlier ones stay."""
        data = self.peer_data_map.get(peer_id)
        known = data.get_addrs() if data is not None else []
        new = [each for each in dict.fromkeys(addrs) if each not in known]
        super().add_addrs(peer_id, new[: max(0, ADDRESSES - len(known))], ttl)

    def _cleanup_expired_records(self) -> None:
        for peer, data in tuple(self.peer_data_map.items()):
            if data.is_expired() and not self._pinned(peer):
                self._forget(peer)
        self._enforce_peer_limit()

    def _enforce_peer_limit(self) -> None:
        """Evict peers without addresses first, then the least recently identified."""
        surplus = len(self.peer_data_map) - self.max_peers
        if surplus <= 0:
            return
        others = [peer for peer in self.peer_data_map if not self._pinned(peer)]
        others.sort(key=lambda peer: (bool(self.addrs(peer)), self.peer_data_map[peer].last_identified))
        for peer in others[:surplus]:
            self._forget(peer)

    def _forget(self, peer: ID) -> None:
        self.peer_data_map.pop(peer, None)
        self.peer_record_map.pop(peer, None)
