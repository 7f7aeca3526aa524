"""The `echo:` link: what a newcomer needs to find a run and its recent state.

It is `echo:` and base64url, without padding, of the link's canonical bytes and a checksum of four
bytes.
"""

from __future__ import annotations

import base64
import binascii
from typing import Annotated, ClassVar, Final

from protocol import limits
from protocol.digest import derive
from protocol.errors import BadLinkError
from protocol.fields import Counter, Digest, address, array, uint
from protocol.wire import decode, encode, record

SCHEME: Final = "echo:"
_CHECKSUM_BYTES: Final = 4


@record
class Link:
    """A run, peers to ask, and a recent head: a newcomer accepts nothing older."""

    LIMIT: ClassVar[int] = limits.LINK_BYTES

    addresses: Annotated[tuple[str, ...], array(address, limits.ADDRESSES)]
    head: Digest
    run: Digest
    term: Annotated[int, uint(limits.SAFE_INTEGER, 1)]
    version: Counter

    def __str__(self) -> str:
        data = encode(self)
        return SCHEME + base64.urlsafe_b64encode(data + _checksum(data)).rstrip(b"=").decode()

    @classmethod
    def parse(cls, text: str) -> Link:
        """Parse a link as somebody pasted it."""
        text = text.strip(" \t\r\n")
        if not text.startswith(SCHEME):
            raise BadLinkError(f"a link starts with {SCHEME}")
        if len(text) > 2 * limits.LINK_BYTES:
            raise BadLinkError(f"a link has at most {2 * limits.LINK_BYTES} characters, this one {len(text)}")
        body = text.removeprefix(SCHEME)
        try:
            data = base64.b64decode(body + "=" * (-len(body) % 4), altchars=b"-_", validate=True)
        except (binascii.Error, ValueError):
            raise BadLinkError("a character that no link has, or one lost: copy the link again") from None
        if base64.urlsafe_b64encode(data).rstrip(b"=").decode() != body:
            raise BadLinkError("its last character is off: copy the link again")
        content, checksum = data[:-_CHECKSUM_BYTES], data[-_CHECKSUM_BYTES:]
        if checksum != _checksum(content):
            raise BadLinkError("its checksum does not match: copy the link again")
        return decode(cls, content)


def _checksum(data: bytes) -> bytes:
    return derive("link", data)[:_CHECKSUM_BYTES]
