"""TLS 1.3 contexts of the bulk port, with a pinned self-signed certificate.

The pin, the certificate's SHA-256, travels over the Noise stream, which authenticates the peer. The
certificate is made once per process and never stored.
"""

from __future__ import annotations

import datetime as dt
import functools
import hashlib
import hmac
import ssl
import tempfile
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from echo_node.errors import PeerError


class _Connection(ssl.SSLSocket):
    """TLS socket that closes itself when it is collected.

    `wrap_socket` takes the socket over, and lets it go unclosed if the peer resets the connection
    just before the handshake.
    """

    def __del__(self) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class ServerTls:
    """Server context and the pin of its certificate."""

    context: ssl.SSLContext
    pin: bytes


@functools.cache
def server_tls() -> ServerTls:
    """Return the server context with this process's certificate."""
    key = Ed25519PrivateKey.generate()
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "echo-node")])
    now = dt.datetime.now(dt.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(days=1))
        .not_valid_after(now + dt.timedelta(days=3650))
        .sign(key, None)
    )
    context = _context(ssl.PROTOCOL_TLS_SERVER)
    context.num_tickets = 0  # no resumption: each connection is for one answer
    with tempfile.TemporaryDirectory() as folder:  # ssl reads keys from files alone
        path = Path(folder, "key")
        path.touch(mode=0o600)
        path.write_bytes(
            key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
            + certificate.public_bytes(Encoding.PEM)
        )
        context.load_cert_chain(path)
    return ServerTls(context, hashlib.sha256(certificate.public_bytes(Encoding.DER)).digest())


@functools.cache
def client_tls() -> ssl.SSLContext:
    """Return the client context; it accepts any certificate: call `check_pin` first."""
    context = _context(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def check_pin(connection: ssl.SSLSocket, pin: bytes) -> None:
    """Raise unless the server's certificate is the one that was announced."""
    shown = connection.getpeercert(binary_form=True) or b""
    if not hmac.compare_digest(hashlib.sha256(shown).digest(), pin):
        raise PeerError("another certificate than the one that was announced")


def _context(protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.sslsocket_class = _Connection
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_3
    return context
