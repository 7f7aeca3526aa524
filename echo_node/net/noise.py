"""Noise, as the library does it, with the messages after the handshake read and written in bulk.

The library asks the socket for two bytes, then for the message, and copies each one four times. Here the socket is
asked for all that it has, and several messages are written at once. The handshake, the keys and the counting of
messages stay the library's; nothing here knows what the messages hold.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, cast

from cryptography.exceptions import InvalidTag
from libp2p.abc import IRawConnection, ISecureConn
from libp2p.io.exceptions import ConnectionClosedError, DecryptionFailedException
from libp2p.peer.id import ID
from libp2p.security.noise.io import MAX_PLAINTEXT_LENGTH, NoiseTransportReadWriter
from libp2p.security.noise.transport import Transport
from libp2p.security.secure_session import SecureSession

READ_BYTES: Final = 256 * 1024
_LENGTH_BYTES: Final = 2
_Cipher = Callable[[bytes | None, bytes | memoryview], bytes]


class NoiseMessages(NoiseTransportReadWriter):
    """The messages of one connection after its handshake."""

    def __init__(self, plain: NoiseTransportReadWriter) -> None:
        raw = cast(IRawConnection, plain.conn)
        super().__init__(raw, plain.noise_state)
        protocol = plain.noise_state.noise_protocol
        self._raw = raw
        self._seal: _Cipher = protocol.cipher_state_encrypt.encrypt_with_ad
        self._open: _Cipher = protocol.cipher_state_decrypt.decrypt_with_ad
        self._chunk = memoryview(b"")

    async def write_msg(self, msg: bytes, prefix_encoded: bool = False) -> None:  # noqa: FBT001, FBT002, ARG002
        """Write it as one message, or as several full ones and a last; one call to the socket for all."""
        view = memoryview(msg)
        parts: list[bytes] = []
        for start in range(0, len(view), MAX_PLAINTEXT_LENGTH):
            sealed = self._seal(None, view[start : start + MAX_PLAINTEXT_LENGTH])
            parts += len(sealed).to_bytes(_LENGTH_BYTES), sealed
        await self._raw.write(b"".join(parts))

    async def read_msg(self, prefix_encoded: bool = False) -> bytes:  # noqa: FBT001, FBT002, ARG002
        """The next message. A cancelled call loses nothing."""
        await self._fill(_LENGTH_BYTES)
        whole = _LENGTH_BYTES + int.from_bytes(self._chunk[:_LENGTH_BYTES])
        await self._fill(whole)
        try:
            message = self._open(None, self._chunk[_LENGTH_BYTES:whole])
        except InvalidTag as error:
            raise DecryptionFailedException(
                "a message that was not sealed with the key of this connection"
            ) from error
        self._chunk = self._chunk[whole:]
        return message

    async def _fill(self, size: int) -> None:
        """Read until so many bytes are there."""
        while len(self._chunk) < size:
            more = await self._raw.read(READ_BYTES)
            if not more:
                raise ConnectionClosedError("the peer hung up", transport="tcp")
            self._chunk = memoryview(b"".join((self._chunk, more)) if self._chunk else more)


class NoiseTransport(Transport):
    """The library's Noise, whose sessions use `NoiseMessages`."""

    async def secure_inbound(self, conn: IRawConnection) -> ISecureConn:
        return _in_bulk(await super().secure_inbound(conn))

    async def secure_outbound(self, conn: IRawConnection, peer_id: ID) -> ISecureConn:
        return _in_bulk(await super().secure_outbound(conn, peer_id))


def _in_bulk(session: ISecureConn) -> ISecureConn:
    made = cast(SecureSession, session)
    made.conn = NoiseMessages(cast(NoiseTransportReadWriter, made.conn))
    return session
