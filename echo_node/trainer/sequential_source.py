"""Sequential pull: batches of a head's slots, requested from its roster.

Work is dealt out in rounds: what is missing is shared out, and every sampler that is not late is
awaited. Answers come in parts, each group as it ends, and every admitted group counts. What one did
not fill is shared out again among the others, who fill slots of their own. The first groups to
arrive make the batch; what comes when it is full, or has all that it may have of an engine class,
is not used. Groups are sorted by sampler and slot, so where nobody is late the batch does not
depend on who was faster. How long a sampler is waited for follows from `request_deadlines`.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

import trio

from echo_node.errors import DefectError, PeerError
from echo_node.net.base import Network
from echo_node.rollouts.admission import GroupFilter, Refused
from echo_node.rollouts.group_refs import GroupRefFetcher, is_reference
from echo_node.rollouts.record import RolloutRecord
from echo_node.runs.engine_shares import ClassShares
from echo_node.runtime.change_signal import ChangeSignal
from echo_node.trainer.batch_selection import Entry
from echo_node.trainer.batch_source import BatchRequest, NoBatchError, NobodyAnswersError
from echo_node.trainer.receipts import Receipts
from echo_node.trainer.request_deadlines import START_SECONDS, RequestDeadlines, ceiling
from echo_node.trainer.rest_schedule import RestSchedule
from echo_node.trainer.verdict_gate import VerdictGate
from echo_node.trainer.work_split import EvenSplit, WorkSplit, bound_young
from protocol import (
    Envelope,
    Identity,
    Opened,
    ProtocolError,
    RolloutRequest,
    Roster,
    WeightsHead,
    limits,
    peer_id,
    read_part,
    seal,
    topics,
)

log = logging.getLogger(__name__)
PART_SECONDS: Final = 60.0
"""Deadline in seconds of one question for a part: samplers hold one for 20 s at most."""
EMPTY_SECONDS: Final = 5.0
"""Least seconds between two questions of which the first brought nothing."""


@dataclasses.dataclass(eq=False, slots=True)
class _PendingRequest:
    """A request that is under way."""

    sampler: bytes
    head: bytes
    first: int
    count: int
    began: float
    progressed: float
    """Time of the last admitted group, or of the beginning."""
    taken: set[int] = dataclasses.field(default_factory=set)
    """Numbers of the slots that arrived, counted from the first."""
    tokens: int = 0
    late: bool = False

    @property
    def left(self) -> int:
        return self.count - len(self.taken)

    def question(self) -> RolloutRequest:
        return RolloutRequest(
            count=self.count, first=self.first, head=self.head, taken=tuple(sorted(self.taken))
        )

    def took(self, groups: Sequence[RolloutRecord]) -> None:
        """Record admitted groups."""
        self.taken |= {group.slot - self.first for group in groups}
        self.tokens += sum(group.message.token_count for group in groups)
        self.progressed = trio.current_time()


class _BatchInProgress:
    """A batch in progress: its groups, requests under way, and samplers that failed."""

    def __init__(
        self,
        head: bytes,
        willing: Mapping[bytes, str],
        batch: int,
        shares: ClassShares,
        used: Mapping[bytes, int],
    ) -> None:
        """Start an empty batch; `willing` are samplers and their engine classes.

        `used` is how many slots of the head samplers have filled before.
        """
        self.head = head
        self.groups: list[RolloutRecord] = []
        self.asks: list[_PendingRequest] = []
        self.answered: set[bytes] = set()
        self.failed: set[bytes] = set()
        self.changed = ChangeSignal()
        self._willing = willing
        self.batch = batch
        self._shares = shares
        self._used = {each: used.get(each, 0) for each in willing}
        self._taken: Counter[str] = Counter()
        """Number of groups, by engine class."""
        self.times: dict[bytes, float | None] = {}
        """Seconds that each sampler took for what it was asked for so far; None: not done."""

    @property
    def missing(self) -> int:
        return self.batch - len(self.groups)

    @property
    def free(self) -> list[bytes]:
        """Return the samplers that can be asked.

        They have not failed, have no request under way, and have room for their class.
        """
        busy = {ask.sampler for ask in self.asks}
        rooms = self.rooms()
        return [
            each
            for each, engine in self._willing.items()
            if each not in busy and each not in self.failed and rooms[engine] > 0
        ]

    @property
    def can_complete(self) -> bool:
        """Return whether a request under way can still bring what there is room for."""
        rooms = self.rooms()
        return any(rooms[self._willing[ask.sampler]] > 0 for ask in self.asks)

    @property
    def late(self) -> list[_PendingRequest]:
        return [ask for ask in self.asks if ask.late]

    @property
    def awaited(self) -> list[_PendingRequest]:
        return [ask for ask in self.asks if not ask.late]

    def rooms(self) -> dict[str, int]:
        """Return how many more groups of each class the batch may have."""
        classes = {*self._willing.values()}
        return {each: self._shares.most(each, self.batch) - self._taken[each] for each in classes}

    def engine(self, sampler: bytes) -> str:
        return self._willing[sampler]

    def ask(self, sampler: bytes, count: int) -> _PendingRequest:
        """Return a request for the sampler's next slots."""
        now = trio.current_time()
        self.asks.append(ask := _PendingRequest(sampler, self.head, self._used[sampler], count, now, now))
        self._used[sampler] += count
        self.times[sampler] = None
        return ask

    def used_slots(self) -> dict[bytes, int]:
        """Return how many slots each sampler has used.

        Of abandoned requests only those up to the last that came count.
        """
        return self._used | {ask.sampler: ask.first + max(ask.taken, default=-1) + 1 for ask in self.asks}

    def ceiling(self, sampler: bytes) -> float:
        """Return the seconds after which a sampler is late, by those that others took."""
        return ceiling(took for each, took in self.times.items() if each != sampler)

    def take(self, groups: list[RolloutRecord]) -> None:
        """Add groups, lowest slots first, as far as they and their class have room."""
        for group in sorted(groups, key=lambda group: group.order):
            engine = group.message.engine
            if self.missing and self._taken[engine] < self._shares.most(engine, self.batch):
                self._taken[engine] += 1
                self.groups.append(group)

    def done(self, ask: _PendingRequest) -> None:
        """Remove a request that has ended."""
        self.asks.remove(ask)
        self.changed.notify()


class SequentialSource:
    """Batches of exactly one head.

    A sampler that failed rests for some steps, longer each time (`rest_schedule`).
    """

    def __init__(
        self,
        network: Network,
        identity: Identity,
        run: bytes,
        batch: int,
        admission: GroupFilter,
        receipts: Receipts,
        *,
        spread: WorkSplit | None = None,
        shares: ClassShares | None = None,
        gate: VerdictGate | None = None,
        entry: Entry | None = None,
        deadlines: RequestDeadlines,
    ) -> None:
        """Create the source.

        `shares` are those of the engine classes; `gate` waits for the verdicts that the run
        requires; `entry` tells young keys, of whom few are asked, from proven ones; `deadlines`
        has the limits of the run.
        """
        self._network = network
        self._identity = identity
        self._run = run
        self._batch = batch
        self._admission = admission
        self._receipts = receipts
        self._gate = gate
        self._shares = shares or ClassShares()
        self._spread = spread or EvenSplit()
        self._deadlines = deadlines
        self._fetcher = GroupRefFetcher(network, run)
        self._filling: _BatchInProgress | None = None
        self._rests = RestSchedule()
        self._entry = entry or Entry()
        self._used: tuple[bytes, dict[bytes, int]] = b"", {}
        """The newest head, and how many of its slots each sampler has filled."""
        self._turn = 0
        """Number of the step, by which young keys take turns."""

    async def next_batch(self, request: BatchRequest) -> tuple[RolloutRecord, ...]:
        """Return the groups of the head's slots that verdicts let in.

        Raise `NoBatchError` if there are none.
        """
        filled = await self._fill(request.head, request.roster, request.count or self._batch)
        if self._gate is None:
            return filled
        if vouched := await self._gate.let_in(filled):
            return vouched
        raise NoBatchError("verifiers vouch for no group of this version")

    async def _fill(self, head: Opened[WeightsHead], roster: Roster, count: int) -> tuple[RolloutRecord, ...]:
        """Fill so many slots once, under this head, by samplers of its roster."""
        willing = self._rested({member.key: member.engine for member in roster.members})
        self._check_classes(willing)
        used = self._used[1] if self._used[0] == head.id else {}
        filling = self._filling = _BatchInProgress(head.id, willing, count, self._shares, used)
        try:
            async with trio.open_nursery() as nursery:
                while filling.missing and (filling.free or filling.can_complete):
                    for sampler, share in self._deal(filling):
                        nursery.start_soon(self._ask, filling.ask(sampler, share), filling)
                    await self._wait(filling)
                nursery.cancel_scope.cancel()  # requests still under way have no room
        finally:
            self._filling = None
        self._used = head.id, used | filling.used_slots()
        self._remember(filling)
        if filling.missing:
            self._check_classes({key: willing[key] for key in filling.answered - filling.failed})
            raise NobodyAnswersError(
                "no sampler of the roster answers", advice="start one with echo-node join --role sampler"
            )
        if any(group.message.heads != (head.id,) for group in filling.groups):
            raise DefectError("a sequential batch with a group of another version")
        return tuple(sorted(filling.groups, key=lambda group: group.order))

    def _check_classes(self, willing: Mapping[bytes, str]) -> None:
        """Refuse a roster whose engine classes cannot fill a batch together."""
        if willing and not self._shares.can_fill(willing.values(), self._batch):
            classes = " and ".join(sorted({*willing.values()}))
            raise NobodyAnswersError(
                f"all samplers that answer are of the class {classes}: {self._shares.describe(self._batch)}",
                advice="start a sampler of another class with echo-node join --role sampler --engine",
            )

    def _deal(self, filling: _BatchInProgress) -> list[tuple[bytes, int]]:
        """Return whom to ask for how many groups.

        What is too much for one sampler, or for its class, goes to those that have room.
        """
        left, rooms = filling.missing, filling.rooms()
        dealt = dict.fromkeys(filling.free, 0)

        def has_room(sampler: bytes) -> bool:
            return (
                dealt[sampler] < self._deadlines.most_groups(sampler) and rooms[filling.engine(sampler)] > 0
            )

        while left and (roomy := [each for each in dealt if has_room(each)]):
            for sampler, share in self._shared_out(roomy, left, filling, rooms):
                given = min(share, self._deadlines.most_groups(sampler) - dealt[sampler])
                dealt[sampler] += given
                rooms[filling.engine(sampler)] -= given
                left -= given
        return [(sampler, count) for sampler, count in dealt.items() if count]

    def _shared_out(
        self, samplers: Sequence[bytes], groups: int, filling: _BatchInProgress, rooms: Mapping[str, int]
    ) -> list[tuple[bytes, int]]:
        """Return each sampler's count of so many groups, bounded by its class's room."""
        shares = dict(zip(samplers, self._spread.shares(samplers, groups), strict=True))
        for engine, room in rooms.items():
            members = [each for each in samplers if filling.engine(each) == engine]
            if sum(shares[each] for each in members) > room:
                shares |= zip(members, self._spread.shares(members, room), strict=True)
        return [*shares.items()]

    async def _wait(self, filling: _BatchInProgress) -> None:
        """Wait until the batch is full, or somebody can be asked, or nobody is left."""
        while filling.missing and (filling.awaited or (filling.can_complete and not filling.free)):
            seen = filling.changed.count
            due = {ask: self._late_at(ask, filling) for ask in filling.awaited}
            with trio.move_on_at(min(due.values(), default=math.inf)):
                await filling.changed.wait(since=seen)
            for ask, when in due.items():
                if ask in filling.asks and trio.current_time() >= when:
                    ask.late = True
                    log.warning(
                        "sampler %s is late with %d of %d groups: others are asked",
                        peer_id(ask.sampler),
                        ask.left,
                        ask.count,
                    )

    def _late_at(self, ask: _PendingRequest, filling: _BatchInProgress) -> float:
        """Return when others are asked for a late sampler's slots, by their speed."""
        least = self._spread.least_patience if self._deadlines.is_measured(ask.sampler) else START_SECONDS
        return ask.began + max(least, filling.ceiling(ask.sampler))

    def _fails_at(self, ask: _PendingRequest) -> float:
        """Return when a sampler is left out of the step, by run limits and speed."""
        whole = ask.began + self._deadlines.seconds(ask.sampler, ask.count)
        return min(whole, ask.progressed + self._deadlines.seconds(ask.sampler, ask.left))

    def _rested(self, roster: Mapping[bytes, str]) -> Mapping[bytes, str]:
        """Return the samplers that do not rest, with few young keys among proven ones.

        Return all that do not rest, if those cannot fill a batch; then all.
        """
        self._rests.begin_step()
        self._turn += 1
        rested = {key: engine for key, engine in roster.items() if not self._rests.is_resting(key)}
        few_young = bound_young(rested, self._entry.is_young, self._turn)
        for chosen in (few_young, rested):
            if self._shares.can_fill(chosen.values(), self._batch):
                return chosen
        return roster

    def _remember(self, filling: _BatchInProgress) -> None:
        """Record failures; a sampler still late when the batch is full has failed too."""
        late = {ask.sampler for ask in filling.late}
        for ask in filling.late:
            self._spread.kept_waiting(ask.sampler, ask.left, trio.current_time() - ask.began)
            self._requested(ask)
        failed = filling.failed | late
        self._rests.end_step(filling.answered - failed, failed)

    async def _ask(self, ask: _PendingRequest, filling: _BatchInProgress) -> None:
        """Request one sampler's slots, part by part, for as long as it makes progress."""
        try:
            while ask.left:
                await self._take_part_in_time(ask, filling)
        except (PeerError, ProtocolError) as error:
            log.warning("sampler %s is left out of this step: %s", peer_id(ask.sampler), error)
            filling.failed.add(ask.sampler)
            filling.times.pop(ask.sampler, None)
            self._requested(ask)
        else:
            seconds = trio.current_time() - ask.began
            self._spread.took(ask.sampler, ask.count, seconds)
            self._deadlines.record(ask.sampler, ask.count, ask.tokens, seconds)
            filling.times[ask.sampler] = seconds
            filling.answered.add(ask.sampler)
            self._requested(ask)
        filling.done(ask)

    async def _take_part_in_time(self, ask: _PendingRequest, filling: _BatchInProgress) -> None:
        with trio.move_on_at(self._fails_at(ask)) as patience:
            await self._take_part(ask, filling)
        if patience.cancelled_caught:
            self._spread.kept_waiting(ask.sampler, ask.left, trio.current_time() - ask.began)
            raise PeerError(f"{ask.left} of {ask.count} groups have not come in time")

    def _requested(self, ask: _PendingRequest) -> None:
        """Count what was asked for as due: not to answer costs as much as to skip slots."""
        self._admission.requested(ask.head, ask.sampler, ask.first + ask.count)

    async def _take_part(self, ask: _PendingRequest, filling: _BatchInProgress) -> None:
        """Ask for one part, and take its groups."""
        asked = trio.current_time()
        part = await self._network.request(
            ask.sampler,
            topics.ROLLOUT_STREAM,
            seal(ask.question(), self._identity, self._run),
            deadline=PART_SECONDS,
            most=limits.ANSWER_BYTES,
        )
        groups = await self._read(ask, read_part(part))
        if not groups:
            await trio.sleep_until(asked + EMPTY_SECONDS)
            return
        ask.took(groups)
        filling.take(groups)
        filling.changed.notify()

    async def _read(self, ask: _PendingRequest, part: Sequence[Envelope]) -> list[RolloutRecord]:
        """Return the groups of a part, fetched if by reference; all good or none."""
        if any(envelope.signer != ask.sampler for envelope in part):
            raise PeerError("it sent a group of somebody else's")  # before admission fills the other's slot
        if any(map(is_reference, part)):
            part = await self._fetcher.groups_of(part, ask.sampler, is_accepted=True)
        wanted = set(ask.question().slots)
        groups: list[RolloutRecord] = []
        try:
            for envelope in part:
                groups += [self._judge(envelope, ask.head, wanted)]
        except PeerError:
            for group in groups:
                self._admission.release(group)
            raise
        return groups

    def _judge(self, envelope: Envelope, head: bytes, wanted: set[int]) -> RolloutRecord:
        """Admit a group of one of the wanted slots, which is then not wanted any more."""
        judged = self._admission.judge(envelope)
        if isinstance(judged, Refused):
            if judged.signed:
                self._receipts.refuse(judged.id, judged.reason)
            raise PeerError(f"it sent a group that is refused: {judged.what}")
        if judged.message.heads != (head,) or judged.slot not in wanted:
            self._admission.release(judged)
            raise PeerError("it sent a group that it was not asked for")
        wanted.remove(judged.slot)
        return judged

    @property
    def progress(self) -> str | None:
        """Return how far the batch under way is, in words; None between batches."""
        filling = self._filling
        if filling is None:
            return None
        delivered = len(filling.groups)
        asked = min(filling.batch, delivered + sum(ask.left for ask in filling.awaited))
        words = f"{asked} of {filling.batch} groups requested, {delivered} delivered"
        needs = [self._needs(ask) for ask in filling.awaited]
        known = [each for each in needs if each is not None]
        if known:
            words += f", the slowest sampler needs about {duration(max(known))}"
        if len(known) < len(needs):
            words += f", {len(needs) - len(known)} not measured yet"
        if filling.late:
            words += f", {len(filling.late)} late"
        return words

    def _needs(self, ask: _PendingRequest) -> float | None:
        """Return the seconds that a sampler probably still needs; None if unknown."""
        passed = trio.current_time() - ask.began
        if ask.taken:
            return ask.left * (ask.progressed - ask.began) / len(ask.taken)
        whole = self._deadlines.expected(ask.sampler, ask.count)
        return None if whole is None else max(0.0, whole - passed)


def duration(seconds: float) -> str:
    """Return a duration in words, rounded up."""
    if seconds < 90:
        return f"{math.ceil(seconds)} s"
    return f"{math.ceil(seconds / 60)} minutes" if seconds < 5_400 else f"{math.ceil(seconds / 3_600)} hours"
