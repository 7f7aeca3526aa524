"""Sequential pull: batches of a head's slots, requested from its roster.

Work is dealt out in rounds: what is missing is shared out, and every sampler that is not late is
awaited. What one did not fill is shared out again among the others, who fill slots of their own. A
sampler that is too slow for its request is asked for less from then on, at once if it has answered
in this step before: what it has filled counts. The first groups to arrive make the batch; what
comes when it is full, or has all that it may have of an engine class, is not used. Answers are
sorted by sampler and slot, so where nobody is late the batch does not depend on who was faster.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence

import trio

from echo_node.errors import DefectError, PeerError
from echo_node.net.base import Network, RequestError
from echo_node.rollouts.admission import GroupFilter, Refused
from echo_node.rollouts.record import RolloutRecord
from echo_node.runs.engine_shares import ClassShares
from echo_node.runtime.change_signal import ChangeSignal
from echo_node.trainer.batch_selection import Entry
from echo_node.trainer.batch_source import BatchRequest, NoBatchError, NobodyAnswersError
from echo_node.trainer.receipts import Receipts
from echo_node.trainer.rest_schedule import RestSchedule
from echo_node.trainer.verdict_gate import VerdictGate
from echo_node.trainer.work_split import EvenSplit, RequestSizes, WorkSplit, bound_young
from protocol import (
    Identity,
    Opened,
    ProtocolError,
    RolloutRequest,
    Roster,
    WeightsHead,
    limits,
    peer_id,
    read_batch,
    seal,
    topics,
)

log = logging.getLogger(__name__)
ROLLOUT_SECONDS = 60.0


@dataclasses.dataclass(eq=False, slots=True)
class _PendingRequest:
    """A request that is under way."""

    sampler: bytes
    request: RolloutRequest
    began: float
    late: bool = False


class _BatchInProgress:
    """A batch in progress: its groups, requests under way, and samplers that failed."""

    def __init__(self, head: bytes, willing: Mapping[bytes, str], batch: int, shares: ClassShares) -> None:
        """Start an empty batch; `willing` are samplers and their engine classes."""
        self.head = head
        self.groups: list[RolloutRecord] = []
        self.asks: list[_PendingRequest] = []
        self.answered: set[bytes] = set()
        self.failed: set[bytes] = set()
        self.changed = ChangeSignal()
        self._willing = willing
        self._batch = batch
        self._shares = shares
        self._used = dict.fromkeys(willing, 0)
        self._taken: Counter[str] = Counter()
        """Number of groups, by engine class."""

    @property
    def missing(self) -> int:
        return self._batch - len(self.groups)

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
        return {each: self._shares.most(each, self._batch) - self._taken[each] for each in classes}

    def engine(self, sampler: bytes) -> str:
        return self._willing[sampler]

    def ask(self, sampler: bytes, count: int) -> _PendingRequest:
        """Return a request for the sampler's next slots."""
        request = RolloutRequest(count=count, first=self._used[sampler], head=self.head)
        self._used[sampler] += count
        self.asks.append(ask := _PendingRequest(sampler, request, trio.current_time()))
        return ask

    def give_back(self, ask: _PendingRequest) -> None:
        """Make unfilled slots the sampler's next ones again: its slots are consecutive."""
        self._used[ask.sampler] = ask.request.first

    def take(self, groups: list[RolloutRecord]) -> None:
        """Add groups, lowest slots first, as far as they and their class have room."""
        for group in sorted(groups, key=lambda group: group.order):
            engine = group.message.engine
            if self.missing and self._taken[engine] < self._shares.most(engine, self._batch):
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
    ) -> None:
        """Create the source.

        `shares` are those of the engine classes; `gate` waits for the verdicts that the run
        requires; `entry` tells young keys, of whom few are asked, from proven ones.
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
        self._request_sizes = RequestSizes(ROLLOUT_SECONDS)
        self._rests = RestSchedule()
        self._entry = entry or Entry()
        self._turn = 0
        """Number of the step, by which young keys take turns."""

    async def next_batch(self, request: BatchRequest) -> tuple[RolloutRecord, ...]:
        """Return the groups of the head's slots that verdicts let in.

        Raise `NoBatchError` if there are none.
        """
        filled = await self._fill(request.head, request.roster)
        if self._gate is None:
            return filled
        if vouched := await self._gate.let_in(filled):
            return vouched
        raise NoBatchError("verifiers vouch for no group of this version")

    async def _fill(self, head: Opened[WeightsHead], roster: Roster) -> tuple[RolloutRecord, ...]:
        """Fill every slot once, under this head, by samplers of its roster."""
        willing = self._rested({member.key: member.engine for member in roster.members})
        self._check_classes(willing)
        filling = _BatchInProgress(head.id, willing, self._batch, self._shares)
        async with trio.open_nursery() as nursery:
            while filling.missing and (filling.free or filling.can_complete):
                for sampler, count in self._deal(filling):
                    nursery.start_soon(self._ask, filling.ask(sampler, count), filling)
                await self._wait(filling)
            nursery.cancel_scope.cancel()  # requests still under way have no room
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
            return dealt[sampler] < self._request_sizes.most(sampler) and rooms[filling.engine(sampler)] > 0

        while left and (roomy := [each for each in dealt if has_room(each)]):
            for sampler, share in self._shared_out(roomy, left, filling, rooms):
                given = min(share, self._request_sizes.most(sampler) - dealt[sampler])
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
            due = {ask: self._due(ask) for ask in filling.awaited}
            with trio.move_on_at(min(due.values(), default=math.inf)):
                await filling.changed.wait()
            for ask, when in due.items():
                if ask in filling.asks and trio.current_time() >= when:
                    ask.late = True
                    log.warning(
                        "sampler %s is late with %d groups: others are asked",
                        peer_id(ask.sampler),
                        ask.request.count,
                    )

    def _due(self, ask: _PendingRequest) -> float:
        return ask.began + self._spread.patience(ask.sampler, ask.request.count)

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
            waited = trio.current_time() - ask.began
            self._spread.kept_waiting(ask.sampler, ask.request.count, waited)
        failed = filling.failed | late
        self._rests.end_step(filling.answered - failed, failed)

    async def _ask(self, ask: _PendingRequest, filling: _BatchInProgress) -> None:
        """Request one sampler's slots: all of them count, or none."""
        try:
            answer = await self._network.request(
                ask.sampler,
                topics.ROLLOUT_STREAM,
                seal(ask.request, self._identity, self._run),
                deadline=ROLLOUT_SECONDS,
                most=limits.ANSWER_BYTES,
            )
            groups = self._read(ask.sampler, ask.request, answer)
        except (PeerError, ProtocolError) as error:
            self._fail(ask, filling, error)
        else:
            seconds = trio.current_time() - ask.began
            self._spread.took(ask.sampler, ask.request.count, seconds)
            self._request_sizes.filled(ask.sampler, ask.request.count, seconds)
            filling.answered.add(ask.sampler)
            filling.take(groups)
        filling.done(ask)

    def _fail(
        self, ask: _PendingRequest, filling: _BatchInProgress, error: PeerError | ProtocolError
    ) -> None:
        """Leave a sampler out of this step.

        One that has answered in it, and is now too slow, is asked again for less.
        """
        sampler, count = ask.sampler, ask.request.count
        if isinstance(error, RequestError) and error.reason == "deadline":
            self._request_sizes.missed(sampler, count)
            self._spread.kept_waiting(sampler, count, ROLLOUT_SECONDS)
            if sampler in filling.answered:
                log.warning("sampler %s is asked for less: %s", peer_id(sampler), error)
                filling.answered.discard(sampler)  # it must answer again before another reprieve
                filling.give_back(ask)
                return
        log.warning("sampler %s is left out of this step: %s", peer_id(sampler), error)
        filling.failed.add(sampler)

    def _read(self, sampler: bytes, request: RolloutRequest, answer: bytes) -> list[RolloutRecord]:
        groups = []
        for envelope in read_batch(answer, most=limits.ANSWER_BYTES):
            if envelope.signer != sampler:  # before admission, which would fill the other sampler's slot
                raise PeerError("it sent a group of somebody else's")
            judged = self._admission.judge(envelope)
            if isinstance(judged, Refused):
                if judged.signed:
                    self._receipts.refuse(judged.id, judged.reason)
                raise PeerError(f"it sent a group that is refused: {judged.what}")
            if judged.message.heads != (request.head,):
                raise PeerError("it sent a group that it was not asked for")
            groups.append(judged)
        slots = sorted(group.message.slot for group in groups)
        if slots != list(range(request.first, request.first + request.count)):
            raise PeerError(f"it filled {len(groups)} slots, not the {request.count} that it was asked for")
        return groups
