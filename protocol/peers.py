"""What two nodes say to each other about further nodes: how many are wanted, and who they are.

It is hearsay: nothing here proves that a peer exists or that it is to be found at these addresses. Whoever connects
finds out.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from protocol import limits
from protocol.fields import Key, address, array, check_ascending, uint
from protocol.wire import of, record, row


@record
class PeersQuestion:
    """How many peers the asker would like to hear of."""

    LIMIT: ClassVar[int] = limits.PEERS_QUESTION_BYTES

    wanted: Annotated[int, uint(limits.PEERS, 1)]


@row
class PeerPlace:
    """A peer and the addresses at which it can be dialled, the best first, none with the peer's own id at its end."""

    key: Key
    addresses: Annotated[tuple[str, ...], array(address, limits.PEER_ADDRESSES, 1)]


@record
class PeersAnswer:
    """Some peers that the answerer is connected to, sorted by key."""

    LIMIT: ClassVar[int] = limits.PEERS_ANSWER_BYTES

    peers: Annotated[tuple[PeerPlace, ...], array(of(PeerPlace), limits.PEERS)]

    def check(self) -> None:
        check_ascending((place.key for place in self.peers), "peers")
