"""Sequential pull: ask the samplers of a head's roster to fill its slots, and take a batch of nothing else.

Work goes out in rounds: what is missing is shared out, and everybody is waited for who is not late. What a sampler did not
fill is shared out again among the others, who fill slots of their own. Who is too slow for what it was asked is asked for less
from then on, at once if it has answered in this step before: what it has filled counts. The first groups to arrive make the batch; what comes
when it is full, or has all that it may have of an engine class, is of no use, whoever sent it. Answers are sorted by sampler and slot, so where nobody is late the batch does
not depend on who was faster.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import trio

from echo_node.admission import Admitted, Refused
from echo_node.errors import DefectError, PeerError
from echo_node.net.base import Network, RequestError
from echo_node.trainer.classes import ClassShares
from echo_node.trainer.portions import Portions
from echo_node.trainer.spreading import Evenly, Spread
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
    read_batch,
    seal,
    topics,
)

log = logging.getLogger(__name__)
ROLLOUT_SECONDS = 60.0
LONGEST_REST = 64
"""Steps."""


class NobodyAnswersError(PeerError):
    """No sampler of the roster that could fill the batch answers now. Another may have joined since, or come back."""


@dataclasses.dataclass(eq=False, slots=True)
class _Ask:
    """A question that is under way."""

    sampler: bytes
    request: RolloutRequest
    began: float
    late: bool = False


class _Filling:
    """A batch on its way: what is there, who is at work on the rest, and who is of no help."""

    def __init__(self, head: bytes, willing: Mapping[bytes, str], batch: int, shares: ClassShares) -> None:
        """`willing` are samplers and their engine classes."""
        self.head = head
        self.groups: list[Admitted] = []
        self.asks: list[_Ask] = []
        self.answered: set[bytes] = set()
        self.failed: set[bytes] = set()
        self.news = trio.Event()
        self._willing = willing
        self._batch = batch
        self._shares = shares
        self._used = dict.fromkeys(willing, 0)
        self._taken: Counter[str] = Counter()
        """Groups by engine class."""

    @property
    def missing(self) -> int:
        return self._batch - len(self.groups)

    @property
    def free(self) -> list[bytes]:
        """Who could be asked: those that have not failed, have nothing to do, and have room for their class."""
        busy = {ask.sampler for ask in self.asks}
        rooms = self.rooms()
        return [
            each
            for each, engine in self._willing.items()
            if each not in busy and each not in self.failed and rooms[engine] > 0
        ]

    @property
    def is_hopeful(self) -> bool:
        """Whether anybody at work can still bring what there is room for."""
        rooms = self.rooms()
        return any(rooms[self._willing[ask.sampler]] > 0 for ask in self.asks)

    @property
    def late(self) -> list[_Ask]:
        return [ask for ask in self.asks if ask.late]

    @property
    def awaited(self) -> list[_Ask]:
        return [ask for ask in self.asks if not ask.late]

    def rooms(self) -> dict[str, int]:
        """How many more groups of each class the batch may have."""
        classes = {*self._willing.values()}
        return {each: self._shares.most(each, self._batch) - self._taken[each] for each in classes}

    def engine(self, sampler: bytes) -> str:
        return self._willing[sampler]

    def ask(self, sampler: bytes, count: int) -> _Ask:
        """The sampler's next slots, as a question to it."""
        request = RolloutRequest(count=count, first=self._used[sampler], head=self.head)
        self._used[sampler] += count
        self.asks.append(ask := _Ask(sampler, request, trio.current_time()))
        return ask

    def give_back(self, ask: _Ask) -> None:
        """Slots that were not filled are the sampler's next ones again: its slots follow one another."""
        self._used[ask.sampler] = ask.request.first

    def take(self, groups: list[Admitted]) -> None:
        """Those of the lowest slots first, and no more than are missing, or than their class may have."""
        for group in sorted(groups, key=lambda group: group.order):
            engine = group.group.message.engine
            if self.missing and self._taken[engine] < self._shares.most(engine, self._batch):
                self._taken[engine] += 1
                self.groups.append(group)

    def done(self, ask: _Ask) -> None:
        """A question is under way no more."""
        self.asks.remove(ask)
        self.news.set()
        self.news = trio.Event()


class SequentialSource:
    """Batches of exactly one head. A sampler that failed is left alone for a while, longer each time that it fails."""

    def __init__(
        self,
        network: Network,
        identity: Identity,
        run: bytes,
        batch: int,
        judge: Callable[[Envelope], Admitted | Refused],
        *,
        spread: Spread | None = None,
        refuse: Callable[[bytes, str], None] = lambda _group, _reason: None,
        shares: ClassShares | None = None,
    ) -> None:
        """`refuse` hears of every group that may not be trained on, and why; `shares` are those of the engine classes."""
        self._network = network
        self._identity = identity
        self._run = run
        self._batch = batch
        self._judge = judge
        self._shares = shares or ClassShares()
        self._spread = spread or Evenly()
        self._portions = Portions(ROLLOUT_SECONDS)
        self._refuse = refuse
        self._failures: dict[bytes, int] = {}
        self._rests: dict[bytes, int] = {}
        """In how many steps a sampler that failed is asked again."""

    async def next_batch(self, head: Opened[WeightsHead], roster: Roster) -> tuple[Admitted, ...]:
        """Every slot filled once, under this head, by samplers of its roster."""
        willing = self._rested({member.key: member.engine for member in roster.members})
        self._check_classes(willing)
        filling = _Filling(head.id, willing, self._batch, self._shares)
        async with trio.open_nursery() as nursery:
            while filling.missing and (filling.free or filling.is_hopeful):
                for sampler, count in self._deal(filling):
                    nursery.start_soon(self._ask, filling.ask(sampler, count), filling)
                await self._wait(filling)
            nursery.cancel_scope.cancel()  # nothing that is still under way has room
        self._remember(filling)
        if filling.missing:
            self._check_classes({key: willing[key] for key in filling.answered - filling.failed})
            raise NobodyAnswersError(
                "no sampler of the roster answers", advice="start one with echo-node join --role sampler"
            )
        if any(group.group.message.heads != (head.id,) for group in filling.groups):
            raise DefectError("a sequential batch with a group of another version")
        return tuple(sorted(filling.groups, key=lambda group: group.order))

    def _check_classes(self, willing: Mapping[bytes, str]) -> None:
        """Nobody is asked for what cannot become a batch: some engine classes may fill only a part of it."""
        if willing and not self._shares.can_fill(willing.values(), self._batch):
            classes = " and ".join(sorted({*willing.values()}))
            raise NobodyAnswersError(
                f"all samplers that answer are of the class {classes}: {self._shares.told(self._batch)}",
                advice="start a sampler of another class with echo-node join --role sampler --engine",
            )

    def _deal(self, filling: _Filling) -> list[tuple[bytes, int]]:
        """Who is asked next for how many groups. What is too much for one, or for its class, goes to those who have room."""
        left, rooms = filling.missing, filling.rooms()
        dealt = dict.fromkeys(filling.free, 0)

        def has_room(sampler: bytes) -> bool:
            return dealt[sampler] < self._portions.most(sampler) and rooms[filling.engine(sampler)] > 0

        while left and (roomy := [each for each in dealt if has_room(each)]):
            for sampler, share in self._shared_out(roomy, left, filling, rooms):
                given = min(share, self._portions.most(sampler) - dealt[sampler])
                dealt[sampler] += given
                rooms[filling.engine(sampler)] -= given
                left -= given
        return [(sampler, count) for sampler, count in dealt.items() if count]

    def _shared_out(
        self, samplers: Sequence[bytes], groups: int, filling: _Filling, rooms: Mapping[str, int]
    ) -> list[tuple[bytes, int]]:
        """How many of so many groups each of the samplers is given; in a class with too little room, that is shared out."""
        shares = dict(zip(samplers, self._spread.shares(samplers, groups), strict=True))
        for engine, room in rooms.items():
            members = [each for each in samplers if filling.engine(each) == engine]
            if sum(shares[each] for each in members) > room:
                shares |= zip(members, self._spread.shares(members, room), strict=True)
        return [*shares.items()]

    async def _wait(self, filling: _Filling) -> None:
        """Until the batch is full, or nobody is waited for and somebody can be asked, or nobody is left at all."""
        while filling.missing and (filling.awaited or (filling.is_hopeful and not filling.free)):
            due = {ask: self._due(ask) for ask in filling.awaited}
            with trio.move_on_at(min(due.values(), default=math.inf)):
                await filling.news.wait()
            for ask, when in due.items():
                if ask in filling.asks and trio.current_time() >= when:
                    ask.late = True
                    told = peer_id(ask.sampler)
                    log.warning(
                        "sampler %s is late with %d groups: others are asked", told, ask.request.count
                    )

    def _due(self, ask: _Ask) -> float:
        return ask.began + self._spread.patience(ask.sampler, ask.request.count)

    def _rested(self, roster: Mapping[bytes, str]) -> Mapping[bytes, str]:
        """Whom to ask: those who do not rest; all of them, if those could not fill a batch."""
        self._rests = {key: left - 1 for key, left in self._rests.items() if left > 1 and key in roster}
        rested = {key: engine for key, engine in roster.items() if key not in self._rests}
        return rested if self._shares.can_fill(rested.values(), self._batch) else roster

    def _remember(self, filling: _Filling) -> None:
        """Who is still late when the batch is full has failed as well."""
        late = {ask.sampler for ask in filling.late}
        for ask in filling.late:
            waited = trio.current_time() - ask.began
            self._spread.kept_waiting(ask.sampler, ask.request.count, waited)
        for key in filling.answered - filling.failed - late:
            self._failures.pop(key, None)
        for key in filling.failed | late:
            self._failures[key] = self._failures.get(key, 0) + 1
            self._rests[key] = min(2 ** (self._failures[key] - 1), LONGEST_REST)

    async def _ask(self, ask: _Ask, filling: _Filling) -> None:
        """Have one sampler fill its slots: all of them count, or none."""
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
            self._portions.filled(ask.sampler, ask.request.count, seconds)
            filling.answered.add(ask.sampler)
            filling.take(groups)
        filling.done(ask)

    def _fail(self, ask: _Ask, filling: _Filling, error: PeerError | ProtocolError) -> None:
        """Leave a sampler out of this step. One that has answered in it, and is now too slow, is asked again for less."""
        sampler, count = ask.sampler, ask.request.count
        if isinstance(error, RequestError) and error.reason == "deadline":
            self._portions.missed(sampler, count)
            self._spread.kept_waiting(sampler, count, ROLLOUT_SECONDS)
            if sampler in filling.answered:
                log.warning("sampler %s is asked for less: %s", peer_id(sampler), error)
                filling.answered.discard(sampler)  # until it answers again, this was its last chance
                filling.give_back(ask)
                return
        log.warning("sampler %s is left out of this step: %s", peer_id(sampler), error)
        filling.failed.add(sampler)

    def _read(self, sampler: bytes, request: RolloutRequest, answer: bytes) -> list[Admitted]:
        groups = []
        for envelope in read_batch(answer, most=limits.ANSWER_BYTES):
            if envelope.signer != sampler:  # before it is judged, which would fill the slot of whose it is
                raise PeerError("it sent a group of somebody else's")
            judged = self._judge(envelope)
            if isinstance(judged, Refused):
                if judged.signed:
                    self._refuse(judged.id, judged.reason)
                raise PeerError(f"it sent a group that is refused: {judged.what}")
            if judged.group.message.heads != (request.head,):
                raise PeerError("it sent a group that it was not asked for")
            groups.append(judged)
        slots = sorted(group.group.message.slot for group in groups)
        if slots != list(range(request.first, request.first + request.count)):
            raise PeerError(f"it filled {len(groups)} slots, not the {request.count} that it was asked for")
        return groups
