"""Noise transport that reads and writes messages after the handshake in bulk.

py-libp2p reads two bytes from the socket, then the message, and copies each message four times.
This reader takes all that the socket has, and writes several messages at once. The handshake, the
keys and the nonces stay py-libp2p's.
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
    """The Noise transport messages of one connection, after its handshake."""

    def __init__(self, plain: NoiseTransportReadWriter) -> None:
        raw = cast(IRawConnection, plain.conn)
        super().__init__(raw, plain.noise_state)
        protocol = plain.noise_state.noise_protocol
        self._raw = raw
        self._seal: _Cipher = protocol.cipher_state_encrypt.encrypt_with_ad
        self._open: _Cipher = protocol.cipher_state_decrypt.decrypt_with_ad
        self._chunk = memoryview(b"")

    async def write_msg(self, msg: bytes, prefix_encoded: bool = False) -> None:  # noqa: FBT001, FBT002, ARG002
        """Encrypt data as one or more messages and write them in one call to the socket."""
        view = memoryview(msg)
        parts: list[bytes] = []
        for start in range(0, len(view), MAX_PLAINTEXT_LENGTH):
            sealed = self._seal(None, view[start : start + MAX_PLAINTEXT_LENGTH])
            parts += len(sealed).to_bytes(_LENGTH_BYTES), sealed
        await self._raw.write(b"".join(parts))

    async def read_msg(self, prefix_encoded: bool = False) -> bytes:  # noqa: FBT001, FBT002, ARG002
        """Return the next decrypted message. A cancelled call loses no data."""
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
        """Read until at least `size` bytes are buffered."""
        while len(self._chunk) < size:
            more = await self._raw.read(READ_BYTES)
            if not more:
                raise ConnectionClosedError("the peer hung up", transport="tcp")
            self._chunk = memoryview(b"".join((self._chunk, more)) if self._chunk else more)


class NoiseTransport(Transport):
    """py-libp2p's Noise transport, with sessions that use `NoiseMessages`."""

    async def secure_inbound(self, conn: IRawConnection) -> ISecureConn:
        return _in_bulk(await super().secure_inbound(conn))

    async def secure_outbound(self, conn: IRawConnection, peer_id: ID) -> ISecureConn:
        return _in_bulk(await super().secure_outbound(conn, peer_id))


def _in_bulk(session: ISecureConn) -> ISecureConn:
    made = cast(SecureSession, session)
    made.conn = NoiseMessages(cast(NoiseTransportReadWriter, made.conn))
    return session
