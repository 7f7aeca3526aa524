"""The identify and ping protocols, read within bounds.

The library reads up to a megabyte, or without any bound where the length is missing, and keeps all
of it.
"""

from __future__ import annotations

import logging
from typing import Final

import trio
from google.protobuf.message import DecodeError
from libp2p.abc import INetStream, IPeerStore
from libp2p.host.ping import ID as PING
from libp2p.host.ping import PING_LENGTH
from libp2p.identity.identify.identify import ID as IDENTIFY
from libp2p.identity.identify.pb.identify_pb2 import Identify
from libp2p.identity.identify_push.identify_push import ID_PUSH as PUSH
from libp2p.identity.update import update_peerstore_from_identify
from libp2p.io.exceptions import IOException
from libp2p.network.stream.exceptions import StreamEOF, StreamError
from libp2p.peer.id import ID

from echo_node.net.rate_limit import TokenBucket
from protocol import ProtocolError, limits

__all__ = [
    "ENDED",
    "IDENTIFY",
    "PING",
    "PUSH",
    "IdentifyError",
    "answer_pings",
    "read_identify",
    "store_identify",
]

MESSAGE_BYTES: Final = 64 * 1024
PROTOCOLS: Final = 256
PROTOCOL_BYTES: Final = 256
RECORD_BYTES: Final = 16 * 1024
SECONDS: Final = 10.0
PINGS_PER_SECOND: Final = 20
ENDED: Final = (StreamError, IOException, trio.TooSlowError)
"""Errors of a stream whose peer is gone or silent."""
_log = logging.getLogger("echo_node.net.identify")


class IdentifyError(ProtocolError):
    """A malformed or oversized identify message."""

    reason = "malformed-identify"


async def read_identify(stream: INetStream) -> Identify:
    """Read an identify message. Raises `IdentifyError`, or whatever the stream raises."""
    with trio.fail_after(SECONDS):
        data = await _read_message(stream)
    message = Identify()
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise IdentifyError("identify: not a protobuf message") from error
    return message


async def store_identify(store: IPeerStore, peer: ID, message: Identify) -> None:
    """Replace a peer's entry in the peerstore with its identify message, bounded."""
    fit = [each for each in message.listen_addrs if len(each) <= limits.ADDRESS_BYTES][: limits.ADDRESSES]
    del message.listen_addrs[:]
    message.listen_addrs.extend(fit)
    if len(message.signedPeerRecord) > RECORD_BYTES:
        message.ClearField("signedPeerRecord")
    try:  # protobuf decodes proto2 strings when they are read, not when they are parsed
        short = [each for each in message.protocols if len(each) <= PROTOCOL_BYTES][:PROTOCOLS]
        del message.protocols[:]
        message.protocols.extend(short)
        await update_peerstore_from_identify(store, peer, message)
    except UnicodeError as error:
        raise IdentifyError("identify: a protocol that is not UTF-8") from error


async def answer_pings(stream: INetStream) -> None:
    """Echo ping payloads until the stream ends."""
    rate = TokenBucket(PINGS_PER_SECOND, PINGS_PER_SECOND)
    try:
        while True:
            with trio.fail_after(SECONDS):
                payload = await _read_exactly(stream, PING_LENGTH)
            if not payload:
                break
            await rate.wait()
            with trio.fail_after(SECONDS):
                await stream.write(payload)
        await stream.close()
    except ENDED as error:
        _log.debug("pings of %s end: %r", stream.muxed_conn.peer_id, error)
        await stream.reset()


async def _read_message(stream: INetStream) -> bytes:
    size = 0
    for n in range(4):
        part = await _read_exactly(stream, 1)
        if not part:
            raise IdentifyError("identify: the stream ended before the message")
        size |= (part[0] & 0x7F) << (7 * n)
        if part[0] < 0x80:
            break
    else:
        raise IdentifyError("identify: a length of more than 4 bytes")
    if size > MESSAGE_BYTES:
        raise IdentifyError(f"identify: {size} bytes, the limit is {MESSAGE_BYTES}")
    return await _read_exactly(stream, size)


async def _read_exactly(stream: INetStream, size: int) -> bytes:
    """Return `size` bytes, or none if the stream ends first."""
    got = bytearray()
    try:
        while len(got) < size:
            part = await stream.read(size - len(got))
            if not part:
                return b""
            got += part
    except StreamEOF:
        return b""
    return bytes(got)
