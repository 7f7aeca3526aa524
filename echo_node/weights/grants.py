"""Grants for those who missed some: any node answers with those of the asker's term and of the next, and the way to their bases.

A grant proves itself, and a term that was contested is told with all its grants, so that the asker sees who voted twice. It
reads what is held, and keeps and judges nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from echo_node.weights.journal import Head
from protocol import Follower, GrantsAnswer, GrantsQuestion, ShownGrant, decode, encode, limits


class GrantServer:
    """Answers with a step into the next term at a time: whoever took it asks again."""

    def __init__(self, follower: Callable[[], Follower], find: Callable[[bytes], Head | None]) -> None:
        self._follower = follower
        self._find = find
        """A head that is known, of the chain or of a branch that was left."""

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
        """The heads from the first that the asker does not hold up to the base; none, if they are not all to be had."""
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
