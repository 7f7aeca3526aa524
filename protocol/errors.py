"""Errors of bytes from a peer, as one tree.

ProtocolError                  what, where in the message, and a `reason` for any language
├── MalformedError             the bytes are not canonical msgpack
│   ├── TruncatedError         they end too early
│   ├── TrailingBytesError     they go on after the value
│   ├── NotCanonicalError      the same value has another, shorter or ordered form
│   ├── ForbiddenTypeError     a msgpack type that the wire does not use
│   ├── NotFiniteError         NaN or an infinity
│   ├── BadTextError           a string that is not UTF-8
│   └── TooLargeError          too long, too deep or too many items
├── SchemaError                the value is not the message that it claims to be
│   ├── UnknownFieldError      a field that this major version does not have
│   ├── MissingFieldError      a field that it must have
│   ├── WrongTypeError         a field of another type
│   ├── OutOfRangeError        the right type, beyond its limit
│   └── InconsistentError      fields that contradict one another
├── SealError                  the envelope does not vouch for the message
│   ├── WrongMajorError        another major version of the wire
│   ├── WrongKindError         another kind of message
│   ├── WrongRunError          another run
│   ├── WrongSignerError       a key that may not say this
│   ├── BadKeyError            not a usable Ed25519 public key
│   └── BadSignatureError      not signed by the key that it names
├── BadPeerIdError             not the peer id of an Ed25519 key
├── BadLinkError               not an `echo:` link, or a damaged one
├── BadFrameError              not one zstd frame of the form that frames of weights have
└── ChainError                 a head, grant or proof that the rules of the chain refuse

A `ChainError` names its rule in `reason`; the other leaves have one reason each.
"""

from __future__ import annotations

from typing import ClassVar


class ProtocolError(Exception):
    """A peer sent something that the wire does not allow."""

    reason: ClassVar[str] = "protocol"

    def __init__(self, what: str, where: str = "") -> None:
        super().__init__(what, where)
        self.what = what
        self.where = where

    def within(self, outer: str) -> None:
        """Prefix the place of the fault, as the error climbs out of a nested value."""
        joint = "" if not self.where or self.where.startswith("[") else "."
        self.where = f"{outer}{joint}{self.where}"

    def __str__(self) -> str:
        return f"{self.where}: {self.what}" if self.where else self.what


class MalformedError(ProtocolError):
    reason = "malformed"


class TruncatedError(MalformedError):
    reason = "truncated"


class TrailingBytesError(MalformedError):
    reason = "trailing-bytes"


class NotCanonicalError(MalformedError):
    reason = "not-canonical"


class ForbiddenTypeError(MalformedError):
    reason = "forbidden-type"


class NotFiniteError(MalformedError):
    reason = "not-finite"


class BadTextError(MalformedError):
    reason = "bad-text"


class TooLargeError(MalformedError):
    reason = "too-large"


class SchemaError(ProtocolError):
    reason = "schema"


class UnknownFieldError(SchemaError):
    reason = "unknown-field"


class MissingFieldError(SchemaError):
    reason = "missing-field"


class WrongTypeError(SchemaError):
    reason = "wrong-type"


class OutOfRangeError(SchemaError):
    reason = "out-of-range"


class InconsistentError(SchemaError):
    reason = "inconsistent"


class SealError(ProtocolError):
    reason = "seal"


class WrongMajorError(SealError):
    reason = "wrong-major"


class WrongKindError(SealError):
    reason = "wrong-kind"


class WrongRunError(SealError):
    reason = "wrong-run"


class WrongSignerError(SealError):
    reason = "wrong-signer"


class BadKeyError(SealError):
    reason = "bad-key"


class BadSignatureError(SealError):
    reason = "bad-signature"


class BadPeerIdError(ProtocolError):
    reason = "bad-peer-id"


class BadLinkError(ProtocolError):
    reason = "bad-link"


class BadFrameError(ProtocolError):
    reason = "bad-frame"


class ChainError(ProtocolError):
    """The rules of the chain refuse it.

    `rule` is the name in receipts, logs and vectors.
    """

    reason = "chain"

    def __init__(self, rule: str, what: str) -> None:
        super().__init__(what)
        self.rule = rule
