"""Ed25519 keys, and the libp2p peer id of the same key.

A node has one key: it is its libp2p identity and signs all its messages. Keys of small order and
keys in a non-canonical form are refused, since with them one signature can stand for many messages.

Signatures are verified by libsodium, in half the time that OpenSSL takes, and to the same end but
for one case: it refuses a commitment R of small order. Only a signer who wants to can make such a
one; by the specification it may stand.
"""

from __future__ import annotations

from typing import Final

import nacl.exceptions
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from nacl.bindings import crypto_sign_open

from protocol.errors import BadKeyError, BadPeerIdError, BadSignatureError

KEY_BYTES: Final = 32
SIGNATURE_BYTES: Final = 64
PEER_ID_BYTES: Final = 38

_FIELD_PRIME: Final = 2**255 - 19
_Y_MASK: Final = 2**255 - 1
_SMALL_ORDER_Y: Final = frozenset(
    (
        0,  # order 4
        1,  # the neutral element
        _FIELD_PRIME - 1,  # order 2
        2707385501144840649318225287225658788936804267575313519463743609750303402022,  # order 8
        55188659117513257062467267217118295137698188065244968500265048394206261417927,  # order 8
    )
)
# Identity multihash (code 0, 36 bytes) of the protobuf PublicKey {Type: Ed25519, Data: 32 bytes}.
_PEER_ID_PREFIX: Final = bytes.fromhex("002408011220")
_BASE58: Final = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
_PEER_ID_CHARACTERS: Final = 52


class Identity:
    """Private key of a node. Its `repr` never shows it."""

    __slots__ = ("_private", "public")

    def __init__(self, seed: bytes) -> None:
        if len(seed) != KEY_BYTES:
            raise BadKeyError(f"a private key has {KEY_BYTES} bytes, not {len(seed)}")
        self._private = Ed25519PrivateKey.from_private_bytes(seed)
        self.public = self._private.public_key().public_bytes_raw()

    @classmethod
    def generate(cls) -> Identity:
        return cls(Ed25519PrivateKey.generate().private_bytes_raw())

    @property
    def seed(self) -> bytes:
        """Return the private key itself, to store it or to hand it to libp2p."""
        return self._private.private_bytes_raw()

    @property
    def peer_id(self) -> str:
        return peer_id(self.public)

    def sign(self, message: bytes) -> bytes:
        return self._private.sign(message)

    def __repr__(self) -> str:
        return f"Identity({self.peer_id})"


def check_key(public: bytes) -> None:
    """Refuse a public key that is malformed, non-canonical or of small order."""
    if len(public) != KEY_BYTES:
        raise BadKeyError(f"a public key has {KEY_BYTES} bytes, not {len(public)}")
    y = _y(public)
    if y >= _FIELD_PRIME or y in _SMALL_ORDER_Y:
        raise BadKeyError("a key of small order or in a non-canonical form")


def verify(public: bytes, signature: bytes, message: bytes) -> None:
    """Raise unless `signature` is this key's over `message`."""
    check_key(public)
    if len(signature) != SIGNATURE_BYTES:
        raise BadSignatureError(f"a signature has {SIGNATURE_BYTES} bytes, not {len(signature)}")
    try:
        if _y(signature[:KEY_BYTES]) in _SMALL_ORDER_Y:
            Ed25519PublicKey.from_public_bytes(public).verify(signature, message)
        else:
            crypto_sign_open(signature + message, public)
    except (InvalidSignature, nacl.exceptions.BadSignatureError):
        raise BadSignatureError("the signature does not belong to this key and message") from None


def _y(point: bytes) -> int:
    return int.from_bytes(point, "little") & _Y_MASK


def peer_id_bytes(public: bytes) -> bytes:
    """Return the binary peer id, which is what hashes are made over."""
    return _PEER_ID_PREFIX + public


def peer_id(public: bytes) -> str:
    """Return the peer id as text: base58btc, `12D3KooW…`."""
    number = int.from_bytes(peer_id_bytes(public))
    digits = []
    while number:
        number, digit = divmod(number, 58)
        digits.append(_BASE58[digit])
    return _BASE58[0] + "".join(reversed(digits))  # one leading zero byte is one leading "1"


def public_key_of(text: str) -> bytes:
    """Return the public key that a peer id names."""
    if len(text) != _PEER_ID_CHARACTERS:
        raise BadPeerIdError(f"an Ed25519 peer id has {_PEER_ID_CHARACTERS} characters, not {len(text)}")
    number = 0
    for character in text:
        digit = _BASE58.find(character)
        if digit < 0:
            raise BadPeerIdError(f"{character!r} is not a base58 digit")
        number = number * 58 + digit
    binary = number.to_bytes(PEER_ID_BYTES + 1)[1:] if number < 1 << 8 * PEER_ID_BYTES else b""
    public = binary[len(_PEER_ID_PREFIX) :]
    if not binary.startswith(_PEER_ID_PREFIX) or peer_id(public) != text:
        raise BadPeerIdError("not the peer id of an Ed25519 key")
    try:
        check_key(public)
    except BadKeyError as error:
        raise BadPeerIdError(str(error)) from None
    return public
