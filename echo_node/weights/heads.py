"""Heads for those who missed some: a node asks with the newest that it holds, and is sent what follows.

Gossip loses messages and newcomers start with nothing, so the chain is never learnt from gossip alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from protocol import ZERO, Opened, WeightsHead, canonical, limits
from protocol.errors import OutOfRangeError, WrongTypeError

MOST_HEADS: Final = 256
ANSWER_BYTES: Final = MOST_HEADS * (limits.HEAD_BYTES + limits.ENVELOPE_BYTES + 8)


class HeadServer:
    """Answers with the heads that follow one, oldest first, at most so many at once."""

    def __init__(self, heads: Sequence[Opened[WeightsHead]]) -> None:
        self._heads = heads

    async def serve(self, _peer: bytes, newest: bytes) -> bytes:
        """`newest` is the id of a head, or 32 zero bytes for none."""
        heads = self._heads
        start = (
            0 if newest == ZERO else next((i + 1 for i, head in enumerate(heads) if head.id == newest), None)
        )
        if start is None:
            raise OutOfRangeError("this node does not know that head", "chain")
        return canonical.encode(
            [head.sealed for head in heads[start : start + MOST_HEADS]], most=ANSWER_BYTES
        )


def read_heads(answer: bytes) -> list[bytes]:
    """The sealed heads of an answer. They still have to be opened and to follow the rules."""
    sealed = canonical.decode(answer, most=ANSWER_BYTES)
    if (
        type(sealed) is not list
        or len(sealed) > MOST_HEADS
        or any(type(item) is not bytes for item in sealed)
    ):
        raise WrongTypeError(f"not an array of at most {MOST_HEADS} sealed heads", "chain")
    return sealed
