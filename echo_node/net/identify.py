"""How two peers introduce themselves: keys, addresses and protocols, read within bounds. And the answer to a ping.

The library reads up to a megabyte, or without any bound where the length is missing, and keeps all of it. It knows
nothing of who is connected or why.
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

from echo_node.net.pace import Pace
from protocol import ProtocolError, limits

__all__ = [
    "ENDED",
    "IDENTIFY",
    "PING",
    "PUSH",
    "IntroductionError",
    "answer_pings",
    "keep",
    "read_introduction",
]

MESSAGE_BYTES: Final = 64 * 1024
PROTOCOLS: Final = 256
PROTOCOL_BYTES: Final = 256
RECORD_BYTES: Final = 16 * 1024
SECONDS: Final = 10.0
PINGS_PER_SECOND: Final = 20
ENDED: Final = (StreamError, IOException, trio.TooSlowError)
"""What a stream raises when its other end is gone or silent."""
_log = logging.getLogger("echo_node.net.identify")


class IntroductionError(ProtocolError):
    """An introduction that nobody needs to read."""

    reason = "malformed-identify"


async def read_introduction(stream: INetStream) -> Identify:
    """What the peer says of itself. Raises `IntroductionError`, or whatever the stream raises."""
    with trio.fail_after(SECONDS):
        data = await _read_message(stream)
    said = Identify()
    try:
        said.ParseFromString(data)
    except DecodeError as error:
        raise IntroductionError("an introduction that is no protobuf") from error
    return said


async def keep(store: IPeerStore, peer: ID, said: Identify) -> None:
    """Remember what a peer says of itself, within bounds, in place of what was known before."""
    fit = [each for each in said.listen_addrs if len(each) <= limits.ADDRESS_BYTES][: limits.ADDRESSES]
    del said.listen_addrs[:]
    said.listen_addrs.extend(fit)
    if len(said.signedPeerRecord) > RECORD_BYTES:
        said.ClearField("signedPeerRecord")
    try:  # the library finds out whether a text is one only when it is used
        short = [each for each in said.protocols if len(each) <= PROTOCOL_BYTES][:PROTOCOLS]
        del said.protocols[:]
        said.protocols.extend(short)
        await update_peerstore_from_identify(store, peer, said)
    except UnicodeError as error:
        raise IntroductionError("an introduction whose words are no text") from error


async def answer_pings(stream: INetStream) -> None:
    """Send back what comes, as long as something comes."""
    pace = Pace(PINGS_PER_SECOND, PINGS_PER_SECOND)
    try:
        while True:
            with trio.fail_after(SECONDS):
                payload = await _read_exactly(stream, PING_LENGTH)
            if not payload:
                break
            await pace.wait()
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
            raise IntroductionError("an introduction that ends before it starts")
        size |= (part[0] & 0x7F) << (7 * n)
        if part[0] < 0x80:
            break
    else:
        raise IntroductionError("a length that does not end")
    if size > MESSAGE_BYTES:
        raise IntroductionError(f"an introduction of {size} bytes, at most {MESSAGE_BYTES} are taken")
    return await _read_exactly(stream, size)


async def _read_exactly(stream: INetStream, size: int) -> bytes:
    """So many bytes; none if the stream ends first."""
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
