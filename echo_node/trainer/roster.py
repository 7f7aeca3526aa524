"""Who has joined a run: sealed joins in, the roster of the next head out."""

from __future__ import annotations

import trio

from echo_node.run import Run
from protocol import Join, Member, Opened, Roster, limits


class JoinDesk:
    """Keeps the first join of each sampler. An engine class that the manifest does not allow is not let in."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._members: dict[bytes, Member] = {}
        self._changed = trio.Event()

    def welcome(self, join: Opened[Join]) -> bool:
        """Enter a sampler; whether that is news."""
        if join.signer in self._members or not self.would_welcome(join):
            return False
        self._members[join.signer] = Member(join.signer, join.message.engine, join.id)
        self._changed.set()
        self._changed = trio.Event()
        return True

    def take_over(self, roster: Roster) -> None:
        """Who is in the newest head's roster has joined, whichever trainer it told so."""
        for member in roster.members:
            self._members.setdefault(member.key, member)

    def would_welcome(self, join: Opened[Join]) -> bool:
        """Whether a sampler is in the roster, or may be."""
        allowed = {tolerance.engine for tolerance in self._run.told.engines}
        has_room = len(self._members) < limits.ROSTER
        return join.signer in self._members or (join.message.engine in allowed and has_room)

    def roster(self) -> Roster:
        return Roster(tuple(self._members[key] for key in sorted(self._members)))

    async def wait_for_news(self) -> None:
        """Until somebody joins. The caller sets the deadline."""
        await self._changed.wait()

    async def wait_for(self, count: int) -> None:
        """Until so many samplers have joined. The caller sets the deadline."""
        while len(self._members) < count:
            await self._changed.wait()
