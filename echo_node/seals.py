"""Signatures of sealed messages, each verified once: who looks at a message before it passes it on looks again to use it.

Only what is good is remembered. It knows nothing of what a message means.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from protocol import Envelope
from protocol.envelope import verify_id

REMEMBERED: Final = 16_384


class Seals:
    """The newest signatures that were found good."""

    def __init__(self) -> None:
        self._good: OrderedDict[tuple[bytes, bytes], None] = OrderedDict()

    def check(self, envelope: Envelope) -> bytes:
        """The id of a message that was really said by its signer; else a `ProtocolError`."""
        said = envelope.id
        seal = (said, envelope.signature)
        if seal not in self._good:
            verify_id(envelope.kind, said, envelope.signer, envelope.signature)
            self._good[seal] = None
            if len(self._good) > REMEMBERED:
                self._good.popitem(last=False)
        return said
