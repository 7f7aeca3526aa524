"""Peer exchange: how many peers are wanted, and who they are.

It is hearsay: nothing here proves that a peer exists or has these addresses.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from protocol import limits
from protocol.fields import Key, address, array, check_ascending, uint
from protocol.wire import of, record, row


@record
class PeersQuestion:
    """Number of peers that the asker would like to learn of."""

    LIMIT: ClassVar[int] = limits.PEERS_QUESTION_BYTES

    wanted: Annotated[int, uint(limits.PEERS, 1)]


@row
class PeerPlace:
    """A peer and its dial addresses, best first, without the peer's own id at the end."""

    key: Key
    addresses: Annotated[tuple[str, ...], array(address, limits.PEER_ADDRESSES, 1)]


@record
class PeersAnswer:
    """Peers that the answerer is connected to, sorted by key."""

    LIMIT: ClassVar[int] = limits.PEERS_ANSWER_BYTES

    peers: Annotated[tuple[PeerPlace, ...], array(of(PeerPlace), limits.PEERS)]

    def check(self) -> None:
        check_ascending((place.key for place in self.peers), "peers")
