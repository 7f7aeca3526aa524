"""The roster: sealed joins in, the samplers of the next head out."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from echo_node.errors import PeerError
from echo_node.net.base import ACCEPT, BusyError, Message, Validation
from echo_node.net.outbox.direct_delivery import Taker
from echo_node.runs.algorithm import training_settings
from echo_node.runs.engine_shares import ClassShares
from echo_node.runs.run import Run
from echo_node.runtime.change_signal import ChangeSignal
from echo_node.trainer.join_budget import JoinBudget
from echo_node.trainer.journal import TrainingJournal
from protocol import Envelope, Join, Member, Opened, Roster, limits, open_sealed

CHANGE_SECONDS: Final = 600.0
"""Seconds between two changes of a sampler's engine class.

Verifiers accumulate evidence by class, so it must not change often.
"""


class RosterBuilder:
    """One join of each sampler: the first with the engine class that it has now.

    An engine class that the manifest does not allow is not let in. A cheat could hide in a class
    that may fill only a part of a batch, so no sampler changes to such a class, or away from it.
    """

    def __init__(self, run: Run, clock: Callable[[], float] = time.monotonic) -> None:
        self._run = run
        self._clock = clock
        self._shares = {tolerance.engine: tolerance.share for tolerance in run.manifest.engines}
        self._most = ClassShares(run.manifest.engines).most
        self._batch = training_settings(run.manifest).batch_groups
        self._members: dict[bytes, Member] = {}
        self._next_change: dict[bytes, float] = {}
        self._changed = ChangeSignal()
        limit = run.manifest.joins
        self._budget = JoinBudget(limit.per_address, limit.total, clock)

    def add(self, join: Opened[Join]) -> bool:
        """Add a sampler, or its new engine class; return whether anything changed."""
        if not self._is_change(join) or self.refusal(join) is not None:
            return False
        if join.signer in self._members:
            self._next_change[join.signer] = self._clock() + CHANGE_SECONDS
        self._members[join.signer] = Member(join.signer, join.message.engine, join.id)
        self._changed.notify()
        return True

    def taker(
        self, journal: TrainingJournal, address: Callable[[bytes], str | None] = lambda _: None
    ) -> Taker:
        """Return the handler of delivered joins, which count from the next head on.

        `address` returns that of a peer's connection, by which joins of new keys have a budget.
        """

        def validate(message: Message) -> Validation:
            Envelope.parse(message.data).claim(Join, self._run.id)
            return ACCEPT

        async def take(message: Message) -> bytes:
            join = open_sealed(message.data, Join, self._run.id, signer=message.sender)
            if (why := self.refusal(join)) is not None:
                raise PeerError(why)
            if join.signer not in self._members:
                where = address(message.sender)
                if (wait := self._budget.wait(where)) > 0:
                    raise BusyError(f"too many new samplers joined lately: try again in {wait:.0f} s")
                self._budget.spend(where)
            if self._is_change(join):
                await journal.join(join.signer, join.sealed)  # on disk before it is acknowledged
                self.add(join)
            return b""

        return Taker(validate, take)

    def take_over(self, roster: Roster) -> None:
        """Add the members of the newest head's roster, whichever trainer they joined with."""
        for member in roster.members:
            self._members.setdefault(member.key, member)

    def refusal(self, join: Opened[Join]) -> str | None:
        """Return why a join is refused, as text for the sampler; None, if it is accepted."""
        engine, before = join.message.engine, self._members.get(join.signer)
        if before is not None and before.engine == engine:
            return None
        if engine not in self._shares or not self._most(engine, self._batch):
            why = "" if engine not in self._shares else ": its share of a batch is less than a group"
            return f"this run does not take the engine class {engine}{why}"
        if before is None:
            return None if len(self._members) < limits.ROSTER else "this run has no room for more samplers"
        if any(self._shares.get(each, 1.0) < 1.0 for each in (before.engine, engine)):
            return f"you joined with {before.engine}, and who has may not go over to {engine} in this run"
        if (left := self._next_change.get(join.signer, 0.0) - self._clock()) > 0:
            return f"you changed to {before.engine} a while ago, and may change again in {left:.0f} s"
        return None

    def _is_change(self, join: Opened[Join]) -> bool:
        before = self._members.get(join.signer)
        return before is None or before.engine != join.message.engine

    def roster(self) -> Roster:
        return Roster(tuple(self._members[key] for key in sorted(self._members)))

    async def wait_for_join(self) -> None:
        """Wait until a sampler joins. The caller sets the deadline."""
        await self._changed.wait()

    async def wait_for(self, count: int) -> None:
        """Wait until so many samplers have joined. The caller sets the deadline."""
        while len(self._members) < count:
            await self._changed.wait()
