"""Seal a message and open it again.

On the wire a sealed message is the array [major, kind, run, signer, body, signature], where body is
the message's own canonical bytes. Its id is a hash, in the context of its kind and major version,
over run, signer and body, and the signature is over that id in the same context. So a signature
made for one kind, run, signer or major version never opens as another, and a message has one id
however it was signed.
"""

from __future__ import annotations

import dataclasses
from functools import cached_property
from typing import Annotated, Any, Generic, TypeVar

from protocol import canonical, limits, wire
from protocol.digest import DIGEST_BYTES, context, derive
from protocol.errors import (
    BadSignatureError,
    ProtocolError,
    WrongKindError,
    WrongMajorError,
    WrongRunError,
    WrongSignerError,
    WrongTypeError,
)
from protocol.fields import Counter, Digest, Key, Signature, Slug, blob
from protocol.identity import Identity, verify
from protocol.wire import of, row

T = TypeVar("T")


@row
class Parts:
    """The six parts of a sealed message, in wire order."""

    major: Counter
    kind: Slug
    run: Digest
    signer: Key
    body: Annotated[bytes, blob(limits.GROUP_BYTES)]
    signature: Signature


@dataclasses.dataclass(frozen=True, slots=True)
class Opened(Generic[T]):
    """A message whose seal was checked, with its signer, run and id."""

    message: T
    id: bytes
    run: bytes
    signer: bytes
    sealed: bytes = dataclasses.field(repr=False)
    """The bytes as received, to store or to relay."""


@dataclasses.dataclass(frozen=True)
class Envelope:
    """A sealed message by its parts. Of a received one, every part is a claim."""

    kind: str
    run: bytes
    signer: bytes
    body: bytes
    signature: bytes
    sealed: bytes = dataclasses.field(repr=False)

    @classmethod
    def seal(cls, message: object, identity: Identity, run: bytes) -> Envelope:
        """Seal a message by this identity in this run."""
        wanted: Any = type(message)
        body = wire.encode(message)
        signature = sign_body(wanted.KIND, body, identity, run)
        sealed = canonical.pack([limits.MAJOR, wanted.KIND, run, identity.public, body, signature])
        return cls(wanted.KIND, run, identity.public, body, signature, sealed)

    @classmethod
    def parse(cls, sealed: bytes) -> Envelope:
        """Split a sealed message, cheaply: no signature check, and the body is not read."""
        value = canonical.decode(sealed, most=limits.GROUP_BYTES + limits.ENVELOPE_BYTES)
        try:
            _check_major(value)
            parts: Parts = of(Parts).load(value)
        except ProtocolError as error:
            error.within("envelope")
            raise
        return cls(parts.kind, parts.run, parts.signer, parts.body, parts.signature, sealed)

    @cached_property
    def id(self) -> bytes:
        """Return the message's id, which commits to kind, run, signer and body."""
        return message_id(self.kind, self.run, self.signer, self.body)

    def claim(self, kind: type[T], run: bytes) -> T:
        """Decode the message as claimed, for checks that are cheaper than a signature."""
        wanted: Any = kind
        if self.kind != wanted.KIND:
            raise WrongKindError(f"{self.kind[:32]!r}, expected {wanted.KIND!r}", "envelope.kind")
        if self.run != run:
            raise WrongRunError(f"run {self.run.hex()[:16]}…, expected {run.hex()[:16]}…", "envelope.run")
        try:
            return wire.decode(kind, self.body)
        except ProtocolError as error:
            error.within(wanted.KIND)
            raise

    def open(self, kind: type[T], run: bytes, *, signer: bytes | None = None) -> Opened[T]:
        """Check everything, from cheap to expensive, and return the message."""
        if signer is not None and self.signer != signer:
            raise WrongSignerError("signed by another key than the one expected", "envelope.signer")
        return self.verified(self.claim(kind, run))

    def verified(self, claimed: T) -> Opened[T]:
        """Check the signature and return the message, for callers that have decoded it."""
        identity = self.id
        try:
            verify(self.signer, self.signature, _signed_bytes(self.kind, identity))
        except ProtocolError as error:
            error.within("envelope.signature" if isinstance(error, BadSignatureError) else "envelope.signer")
            raise
        return Opened(claimed, identity, self.run, self.signer, self.sealed)


def message_id(kind: str, run: bytes, signer: bytes, body: bytes) -> bytes:
    """Return the id of a sealed message."""
    return derive(kind, run, signer, body)


def seal(message: object, identity: Identity, run: bytes) -> bytes:
    """Return the bytes of a message that is sealed by this identity in this run."""
    return Envelope.seal(message, identity, run).sealed


def sign_body(kind: str, body: bytes, identity: Identity, run: bytes) -> bytes:
    """Return the signature alone, for objects that several keys sign.

    All sign the same body.
    """
    if len(run) != DIGEST_BYTES:
        raise WrongTypeError(f"not {DIGEST_BYTES} bytes", "envelope.run")
    return identity.sign(_signed_bytes(kind, message_id(kind, run, identity.public, body)))


def verify_body(kind: str, body: bytes, signer: bytes, signature: bytes, run: bytes) -> None:
    """Raise unless `signature` is `signer`'s over this body, as `sign_body` makes it."""
    verify_id(kind, message_id(kind, run, signer, body), signer, signature)


def verify_id(kind: str, identity: bytes, signer: bytes, signature: bytes) -> None:
    """Raise unless `signature` is `signer`'s over the message of this id."""
    verify(signer, signature, _signed_bytes(kind, identity))


def open_sealed(sealed: bytes, kind: type[T], run: bytes, *, signer: bytes | None = None) -> Opened[T]:
    """Parse and open a sealed message."""
    return Envelope.parse(sealed).open(kind, run, signer=signer)


def _check_major(value: object) -> None:
    """Check the major version first: another may look different from there on."""
    major = value[0] if isinstance(value, list) and value else limits.MAJOR
    if type(major) is int and major != limits.MAJOR:
        ours = limits.MAJOR
        raise WrongMajorError(
            f"version {major}, this node speaks {ours}: one of the two needs an upgrade", "major"
        )


def _signed_bytes(kind: str, identity: bytes) -> bytes:
    return context(kind).encode() + b"\0" + identity
