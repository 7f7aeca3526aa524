"""What this node remembers of peers: where they can be dialled, what they speak. Bounded, whoever told.

The library's own keeps any number of addresses for a peer, raises when they have grown old, and when it is full throws
out its owner's keys first. Here a peer that is connected, and this node itself, stay whatever others tell. It knows
nothing of how addresses are learnt.
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
"""Of one peer: what it said itself, and some hearsay."""


class BoundedPeerStore(PeerStore):
    """The library's store, with bounds that hold."""

    def __init__(self) -> None:
        super().__init__(max_records=PEERS, max_peers=PEERS)
        self.stays: Callable[[ID], bool] = lambda _peer: False
        """Whether a peer is kept for now, old or not. The host sets it."""

    def addrs(self, peer_id: ID) -> list[Multiaddr]:
        """Where a peer was last said to be; nowhere if that is long ago, or was never said."""
        data = self.peer_data_map.get(peer_id)
        if data is None or (data.is_expired() and not self.stays(peer_id)):
            return []
        return list(data.get_addrs())

    def get_protocols(self, peer_id: ID) -> list[str]:
        """What a peer said that it speaks; nothing if it said nothing."""
        data = self.peer_data_map.get(peer_id)
        return [] if data is None else list(data.get_protocols())

    def add_addrs(self, peer_id: ID, addrs: Sequence[Multiaddr], ttl: int = 0) -> None:
        """Add to what is known, as long as there is room: what came first stays."""
        data = self.peer_data_map.get(peer_id)
        known = data.get_addrs() if data is not None else []
        new = [each for each in dict.fromkeys(addrs) if each not in known]
        super().add_addrs(peer_id, new[: max(0, ADDRESSES - len(known))], ttl)

    def _cleanup_expired_records(self) -> None:
        for peer, data in tuple(self.peer_data_map.items()):
            if data.is_expired() and not self.stays(peer):
                self._forget(peer)
        self._enforce_peer_limit()

    def _enforce_peer_limit(self) -> None:
        """Make room: those that cannot be dialled go first, then those that were heard of longest ago."""
        surplus = len(self.peer_data_map) - self.max_peers
        if surplus <= 0:
            return
        others = [peer for peer in self.peer_data_map if not self.stays(peer)]
        others.sort(key=lambda peer: (bool(self.addrs(peer)), self.peer_data_map[peer].last_identified))
        for peer in others[:surplus]:
            self._forget(peer)

    def _forget(self, peer: ID) -> None:
        self.peer_data_map.pop(peer, None)
        self.peer_record_map.pop(peer, None)
