"""Serve heads and grants to peers that missed some.

Gossip loses messages and newcomers start with nothing, so the chain is never learnt from gossip
alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TypeAlias

from protocol import (
    Follower,
    GrantsAnswer,
    GrantsQuestion,
    HeadsAnswer,
    HeadsQuestion,
    Opened,
    ShownGrant,
    WeightsHead,
    decode,
    encode,
    limits,
)
from protocol.errors import OutOfRangeError

Head: TypeAlias = Opened[WeightsHead]


class HeadServer:
    """Answers with the heads after a given one, oldest first, limited in number."""

    def __init__(self, chain: Callable[[], Sequence[Head]]) -> None:
        self._chain = chain
        """Returns the current chain: consecutive versions without a gap."""
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
        """Index new heads by id; the chain only grows at its end."""
        for head in reversed(heads):
            if head.id in self._versions:
                return
            self._versions[head.id] = head.message.version


class GrantServer:
    """Answers with the grant of the next term; the peer asks again for the one after."""

    def __init__(self, follower: Callable[[], Follower], find: Callable[[bytes], Head | None]) -> None:
        self._follower = follower
        self._find = find
        """Finds a known head, of the chain or of an abandoned branch."""

    async def serve(self, _peer: bytes, question: bytes) -> bytes:
        asked = decode(GrantsQuestion, question)
        wanted = (asked.term, asked.term + 1)
        grants = [grant for grant in self._follower().grants if grant.vote.term in wanted]
        grants = sorted(grants, key=lambda grant: grant.vote.term)[: limits.GRANTS]
        held, room = frozenset(asked.held), limits.CHAIN_HEADS
        shown = []
        for grant in grants:
            branch = self._branch(grant.vote.base, held, room)
            room -= len(branch)
            shown.append(ShownGrant(grant, branch))
        return encode(GrantsAnswer(tuple(shown)))

    def _branch(self, base: bytes, held: Collection[bytes], room: int) -> tuple[bytes, ...]:
        """Return the heads unknown to the peer, up to the base; empty if some are missing."""
        way: list[bytes] = []
        at = base
        while at not in held:
            head = self._find(at)
            if head is None or len(way) == room:
                return ()
            way.append(head.sealed)
            if not head.message.version:
                break
            at = head.message.previous
        return tuple(reversed(way))
