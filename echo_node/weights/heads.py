"""Heads for those who missed some: any node that holds heads answers, from wherever the asker's chain leaves its own.

Gossip loses messages and newcomers start with nothing, so the chain is never learnt from gossip alone. It reads what
is held, and keeps and judges nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from protocol import HeadsAnswer, HeadsQuestion, Opened, WeightsHead, decode, encode, limits
from protocol.errors import OutOfRangeError

Head: TypeAlias = Opened[WeightsHead]


class HeadServer:
    """Answers with the heads that follow one, oldest first, at most so many at once."""

    def __init__(self, chain: Callable[[], Sequence[Head]]) -> None:
        self._chain = chain
        """What is held now: versions one after the other, without a gap."""
        self._versions: dict[bytes, int] = {}

    async def serve(self, _peer: bytes, question: bytes) -> bytes:
        held = decode(HeadsQuestion, question).held
        heads = self._chain()
        start = self._after(heads, held) if held else 0
        following = heads[start : start + limits.CHAIN_HEADS]
        return encode(HeadsAnswer(tuple(head.sealed for head in following)))

    def _after(self, heads: Sequence[Head], held: Sequence[bytes]) -> int:
        self._learn(heads)
        for head_id in held:
            version = self._versions.get(head_id)
            if version is None or not heads:
                continue
            place = version - heads[0].message.version
            if 0 <= place < len(heads) and heads[place].id == head_id:
                return place + 1
        raise OutOfRangeError("this node does not know that head", "held")

    def _learn(self, heads: Sequence[Head]) -> None:
        """Remember where each head stands. Only what is new is looked at: a chain grows at its end."""
        for head in reversed(heads):
            if head.id in self._versions:
                return
            self._versions[head.id] = head.message.version
