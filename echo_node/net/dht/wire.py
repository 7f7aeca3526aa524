"""Messages of the Kademlia DHT, bounded, without malformed addresses.

There are no values: the newest state is gossiped, and the DHT finds peers.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from google.protobuf.message import DecodeError
from libp2p.kad_dht.pb.kademlia_pb2 import Message
from libp2p.peer.id import ID
from multiaddr import Multiaddr
from multiaddr.exceptions import Error as MultiaddrError

from protocol import ProtocolError, limits

MESSAGE_BYTES: Final = 64 * 1024
KEY_BYTES: Final = 80
PEERS: Final = 64
"""Most peers in one message."""
Kind = Literal["add-provider", "get-providers", "find-node", "ping"]
_NUMBERS: Final[Mapping[Kind, Message.MessageType]] = {
    "add-provider": Message.ADD_PROVIDER,
    "get-providers": Message.GET_PROVIDERS,
    "find-node": Message.FIND_NODE,
    "ping": Message.PING,
}
_KINDS: Final[Mapping[int, Kind]] = {number: kind for kind, number in _NUMBERS.items()}
_CONNECTED: Final = 1


class KadError(ProtocolError):
    """A message that is malformed or of an unknown type."""

    reason = "malformed-dht"


Addresses = dict[ID, tuple[Multiaddr, ...]]


@dataclass(frozen=True, slots=True)
class KadMessage:
    """A request or a response. Responses of other implementations have no key."""

    kind: Kind
    key: bytes
    closer: Addresses
    providers: Addresses


def write_kad(
    kind: Kind,
    key: bytes = b"",
    closer: Mapping[ID, Iterable[Multiaddr]] | None = None,
    providers: Mapping[ID, Iterable[Multiaddr]] | None = None,
) -> bytes:
    """Encode a message, without its length prefix.

    Holds as many peers as fit, of which the closer ones take at most half of the message.
    """
    message = Message(type=_NUMBERS[kind], key=key)
    parts = (
        (closer, message.closerPeers, MESSAGE_BYTES // 2),
        (providers, message.providerPeers, MESSAGE_BYTES),
    )
    for peers, into, most in parts:
        for peer, addresses in itertools.islice((peers or {}).items(), PEERS):
            shown = [each.to_bytes() for each in addresses][: limits.ADDRESSES]
            added = into.add(id=peer.to_bytes(), addrs=shown, connection=_CONNECTED)
            if message.ByteSize() > most:
                into.remove(added)
                break
    return bytes(message.SerializeToString())


def read_kad(data: bytes) -> KadMessage:
    """Decode a message, or raise `KadError`."""
    message = Message()
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise KadError("a message that is no protobuf") from error
    kind = _KINDS.get(message.type)
    if kind is None:
        raise KadError("a kind of message that this DHT does not take")
    if len(message.key) > KEY_BYTES:
        raise KadError(f"a key of {len(message.key)} bytes, at most {KEY_BYTES} are taken")
    return KadMessage(kind, message.key, _peers(message.closerPeers), _peers(message.providerPeers))


def _peers(peers: Sequence[Message.Peer]) -> Addresses:
    if len(peers) > PEERS:
        raise KadError(f"{len(peers)} peers in a message, at most {PEERS} are taken")
    return {ID(peer.id): read_addresses(peer.addrs) for peer in peers}


def read_addresses(addresses: Sequence[bytes]) -> tuple[Multiaddr, ...]:
    """Return the valid ones of a bounded number of addresses."""
    found = []
    for each in addresses[: limits.ADDRESSES]:
        if 0 < len(each) <= limits.ADDRESS_BYTES:
            try:
                address = Multiaddr(each)
                str(address)  # bytes are looked at only when they are shown
            except (MultiaddrError, ValueError):
                continue
            found.append(address)
    return tuple(found)
