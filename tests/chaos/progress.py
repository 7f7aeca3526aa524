"""Whether a swarm makes progress: that it has come up, and that every living node recovers.

What counts is what nodes say themselves: versions for those that train and follow, groups accepted,
verdicts given.
"""

from __future__ import annotations

from typing import Final

import trio

from tests.chaos.swarm import Member, Swarm

LOOK_SECONDS: Final = 0.5
FIRST_VERSION: Final = 3
MORE_VERSIONS: Final = 3


async def until_it_works(swarm: Swarm, within: float) -> list[str]:
    """Until every node does what it is for; the names of those that still do not."""
    wanting = [member.name for member in swarm.members.values()]
    with trio.move_on_after(within):
        while wanting := [each.name for each in swarm.members.values() if not _works(each)]:  # noqa: ASYNC110 - ten nodes' news
            await trio.sleep(LOOK_SECONDS)
    return wanting


def _works(member: Member) -> bool:
    told = member.last("progress")
    if member.part.role == "bootstrap":
        return bool(member.last("listening"))
    if (told.get("version") or 0) < FIRST_VERSION:
        return False
    return member.part.role == "trainer" or _done(member) > 0


def _done(member: Member) -> int:
    """Groups accepted or verdicts given since its last start."""
    told = member.last("progress")
    return (
        told.get("accepted", 0) if member.part.role == "sampler" else sum(told.get("verdicts", {}).values())
    )


class Quiet:
    """From now on nothing goes wrong: whoever lives must get on."""

    def __init__(self, swarm: Swarm) -> None:
        self._swarm = swarm
        self._head = swarm.head_version
        self._before = {each.name: (id(each.process), _done(each)) for each in swarm.members.values()}

    async def until_all_get_on(self, within: float) -> list[str]:
        """Until everybody has made progress; the names of those that did not within the bound."""
        wanting = list(self._swarm.members)
        with trio.move_on_after(within):
            while wanting := self._wanting():  # noqa: ASYNC110 - as above
                await trio.sleep(LOOK_SECONDS)
        return wanting

    def _wanting(self) -> list[str]:
        return [each.name for each in self._swarm.members.values() if not self._gets_on(each)]

    def _gets_on(self, member: Member) -> bool:
        if member.process is None or member.process.process.poll() is not None:
            return False
        if member.part.role == "bootstrap":
            return bool(member.last("listening"))
        version = member.last("progress").get("version") or 0
        if version < self._head + MORE_VERSIONS:
            return False
        if member.part.role == "trainer":
            return True
        same, before = self._before[member.name]
        return _done(member) > (before if same == id(member.process) else 0)
