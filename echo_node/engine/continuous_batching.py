"""Continuous batching: completions of many prompts decode together.

A row that falls free is reused at once. Completions of one request that agree so far share a row of
the decoder, and split where their draws differ. New weights can be applied between two tokens:
running completions continue under them, at most one change each. Draws depend on the requests' keys
alone, so a completion does not depend on the others in its batch. At the end of a turn a row rests
until the environment's reply comes, which extends it; the others go on, and new ones start.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, cast

import numpy as np

from echo_node.engine.base import (
    Draw,
    Finish,
    Finished,
    Ids,
    Prefix,
    SamplingLimits,
    SlotRequest,
    Span,
    TurnEnd,
    TurnReply,
    Update,
)
from echo_node.engine.decoder import Decoder
from echo_node.engine.host_resources import NoRoomError
from echo_node.engine.request_checks import Reach
from echo_node.engine.token_sampling import Follows, draw, first_ids, row_of, stacked
from echo_node.errors import DefectError, EngineError
from protocol.sampling import uniforms
from protocol.turns import TurnRules

_log = logging.getLogger(__name__)
_ROUNDING: Final = 64
"""Room is made for lengths in steps of this and then doubling, so that it is seldom made again."""


WORTH_KEEPING: Final = 128
"""Tokens below which a completion is drawn again rather than resumed."""


class _Group:
    """A request in progress: completions that have not started, logits of its prompt."""

    def __init__(self, number: int, request: SlotRequest) -> None:
        self.number = number
        self.request = request
        self.started = 0
        self.drawn = {prefix.completion: prefix for prefix in request.drawn}
        self.follows: Follows | None = None
        """Follows after the prompt under the loaded weights; None if not yet computed."""

    @property
    def left(self) -> int:
        return self.request.group_size - self.started

    @property
    def length(self) -> int:
        return self.request.prompt.size + self.request.limits.max_tokens

    def take(self, most: int) -> range:
        """Start up to so many completions without a prefix, or one that has one."""
        first, count = self.started, min(self.left, most)
        with_prefix = [number for number in range(first, first + count) if number in self.drawn]
        if with_prefix:
            count = max(1, with_prefix[0] - first)
        self.started += count
        return range(first, first + count)


class _Completion:
    """One completion on its way."""

    def __init__(self, group: _Group, number: int, head_id: bytes) -> None:
        self.group = group
        self.number = number
        self.limits = group.request.limits
        self.luck = uniforms(group.request.slot_key, number, self.limits.max_tokens)
        prefix = group.drawn.get(number)
        self.ids: list[int] = [] if prefix is None else prefix.ids.tolist()
        self.logprobs: list[float] = [] if prefix is None else prefix.logprobs.tolist()
        self.spans = [Span(0, head_id)]
        self.reported = len(self.ids)
        """Tokens that `news_of_draws` has given out."""
        self.rules = group.request.turns
        self.turn, self.turn_start, self.environment = 1, 0, 0
        """Number of the turn, its first token, and the environment's tokens so far."""
        self.switched = False
        """Whether it goes on under another head than it began with."""

    @property
    def turn_has_ended(self) -> bool:
        return self.rules is not None and bool(self._turn_end(self.rules))

    def finish(self) -> Finish | None:
        """Return how the completion ends with its newest token; None if it does not."""
        if self.rules is None:
            if self.ids[-1] in self.limits.end_tokens:
                return "end"
            return "length" if len(self.ids) == self.limits.max_tokens else None
        end = self._turn_end(self.rules)
        return None if end is None else cast("Finish", self.rules.finish(end, self.turn, len(self.ids)))

    def _turn_end(self, rules: TurnRules) -> str | None:
        return rules.turn_end(self.ids[-1], len(self.ids) - self.turn_start, len(self.ids))

    def extend(self, reply: Ids, head_id: bytes) -> None:
        """Append the environment's ids; the next token is the first of another turn."""
        self.spans += [Span(len(self.ids), None), Span(len(self.ids) + reply.size, head_id)]
        self.ids += reply.tolist()
        self.logprobs += [0.0] * reply.size
        self.turn, self.turn_start = self.turn + 1, len(self.ids)
        self.environment += reply.size

    def finished(self, finish: Finish) -> Finished:
        ids, logprobs = np.array(self.ids, np.int64), np.array(self.logprobs)
        return Finished(self.group.number, self.number, Draw(ids, logprobs, finish, tuple(self.spans)))


class _Row:
    """Completions that agree, on one row of the decoder.

    Their last token is not in the row yet. At rest it waits for the environment; `reply` has come
    and is not in the row yet either.
    """

    def __init__(self, completions: list[_Completion]) -> None:
        self.completions = completions
        self.rests = completions[0].turn_has_ended if completions[0].ids else False
        self.is_stale = False
        """Whether it rested while the weights changed."""
        self.reply: Ids | None = None

    @property
    def group(self) -> _Group:
        return self.completions[0].group

    @property
    def last(self) -> int:
        return self.completions[0].ids[-1]

    @property
    def filled(self) -> int:
        """Positions that the decoder holds of it."""
        return self.group.request.prompt.size + len(self.completions[0].ids) - 1

    @property
    def ended(self) -> TurnEnd:
        """The end of the turn that it waits for a reply to."""
        first = self.completions[0]
        return TurnEnd(
            request=self.group.number,
            completions=tuple(each.number for each in self.completions),
            ids=np.array(first.ids, np.int64),
            start=first.turn_start,
            turn=first.turn,
            environment=first.environment,
        )

    def sequence(self) -> Ids:
        drawn = np.array(self.completions[0].ids, np.int64)
        return np.concatenate((self.group.request.prompt, drawn)).astype(np.int64)


class Batch:
    """The running batch of one engine: up to `rows` completions.

    `put` applies an update to the decoder.
    """

    def __init__(self, decoder: Decoder, head_id: bytes, *, rows: int, put: Callable[[Update], None]) -> None:
        self._decoder = decoder
        self._head = self._first_head = head_id
        self._most = rows
        self._put = put
        self._length = 0
        self._waiting: deque[_Group] = deque()
        self._rows: list[_Row | None] = []
        self._living = 0
        self._taken = 0
        self._stale = False
        """Whether the rows are still those of other weights."""
        self._reach = Reach(decoder.vocabulary, decoder.context)
        self._spare = 0
        """Rows beyond `rows`, through which others change places: one if there are turns."""
        self._asked: dict[tuple[int, int], _Row] = {}
        """Rows whose environment was asked, by request and first completion."""
        self._unasked: list[_Row] = []
        self.tokens, self.seconds = 0, 0.0
        """Tokens generated so far, and the seconds that they took."""

    @property
    def room(self) -> int:
        """Completions that could start at once, beyond those that wait."""
        return max(0, self._most - self._living - sum(group.left for group in self._waiting))

    @property
    def idle(self) -> bool:
        return not (self._living or self._waiting)

    @property
    def waits(self) -> bool:
        """Return whether nothing can be drawn before an environment answers."""
        can_start = self._waiting and self._living < self._most
        return not can_start and all(row.rests and row.reply is None for row in self._rows if row)

    @property
    def updatable(self) -> bool:
        """Return whether no running completion has changed its head yet."""
        return not any(each.switched for each in self._completions())

    def ended_turns(self) -> list[TurnEnd]:
        """Return turns that ended since the last call; each is answered by `respond`."""
        ended, self._unasked = [row.ended for row in self._unasked], []
        return ended

    def respond(self, request: int, completion: int, reply: TurnReply) -> list[Finished]:
        """Take the reply to a turn of this completion.

        It is the first of those that ended together.
        """
        row = self._asked.pop((request, completion), None)
        if row is None:
            raise EngineError(
                f"a reply to completion {completion} of request {request}, which waits for none"
            )
        if reply.ids is None:
            self._rows[self._rows.index(row)] = None
            self._living -= len(row.completions)
            return [each.finished(reply.finish) for each in row.completions]
        first, limits = row.completions[0], row.group.request.limits
        outside = not reply.ids.size or reply.ids.min() < 0 or reply.ids.max() >= limits.vocab_size
        if outside or len(first.ids) + reply.ids.size >= limits.max_tokens:
            raise EngineError(f"a reply of {reply.ids.size} tokens that does not fit the request's limits")
        row.reply = reply.ids
        return []

    def check(self, requests: Iterable[SlotRequest]) -> None:
        """Raise `EngineError` unless all of these requests can be taken."""
        for number, request in enumerate(requests, self._taken):
            self._reach.check_request(request, number)

    def add(self, request: SlotRequest) -> None:
        """Take a request. They are numbered in the order of coming."""
        self.check([request])
        self._waiting.append(_Group(self._taken, request))
        self._taken += 1

    def update(self, update: Update) -> None:
        """Let everything from the next token on be drawn under another head."""
        self._put(update)
        self._head, self._stale = update.head_id, True
        for row in self._rows:
            if row is not None:
                row.is_stale = row.rests
        for completion in self._completions():
            completion.switched = True
        for group in {row.group for row in self._rows if row} | set(self._waiting):
            group.follows = None

    def news_of_draws(self) -> Iterator[tuple[int, Prefix]]:
        """Yield new tokens of running completions, by request, since the last call.

        Only tokens under the head that the batch began with count: completions could not be
        resumed beyond them.
        """
        for each in self._completions():
            if each.rules is not None or each.spans[0].head_id != self._first_head:
                continue
            end = each.spans[1].start if len(each.spans) > 1 else len(each.ids)
            if end >= WORTH_KEEPING and end > each.reported:
                new = slice(each.reported, end)
                ids, logprobs = np.array(each.ids[new], np.int64), np.array(each.logprobs[new])
                each.reported = end
                yield each.group.number, Prefix(each.number, ids, logprobs)

    def step(self) -> list[Finished]:
        """Draw one token for every running completion, the first for new ones."""
        before = time.perf_counter()
        finished: list[Finished] = []
        self._take_replies(finished)
        rows = [row for row in self._rows if row and not row.rests]  # in front: see `_close_up`
        if rows:
            if self._stale:
                logits = self._decoder.prefill(range(len(rows)), [row.sequence() for row in rows])
            else:
                logits = self._decoder.decode(np.array([row.last for row in rows], np.int64))
            self._grow(range(len(rows)), logits, finished)
        self._stale = False
        while self._start(finished):
            pass
        self._close_up()
        self.seconds += time.perf_counter() - before
        return finished

    def _ready(self) -> list[tuple[int, _Row]]:
        """Rows whose environment has answered, with their places."""
        return [(place, row) for place, row in enumerate(self._rows) if row and row.reply is not None]

    def _take_replies(self, finished: list[Finished]) -> None:
        """Extend rows by their replies and draw the first token of their next turn."""
        for stale in (True, False):
            some = [(place, row) for place, row in self._ready() if row.is_stale == stale]
            if not some:
                continue
            added = []
            for _, row in some:
                reply = _known_ids(row.reply)
                added.append(np.concatenate(([row.last], reply)).astype(np.int64))
                for completion in row.completions:
                    completion.extend(reply, self._head)
                row.reply, row.rests, row.is_stale = None, False, False
            places = [place for place, _ in some]
            if stale:
                logits = self._decoder.prefill(places, [row.sequence() for _, row in some])
            else:
                logits = self._decoder.extend(places, added)
            self._grow(places, logits, finished)
        self._close_up()

    def _completions(self) -> Iterator[_Completion]:
        return (completion for row in self._rows if row for completion in row.completions)

    def _start(self, finished: list[Finished]) -> bool:
        """Start as many completions as there is room for. Whether there were any."""
        afresh: list[int] = []
        places: list[int] = []
        resumed = False
        for group, numbers in self._next():
            started = [_Completion(group, number, self._head) for number in numbers]
            if started[0].ids:
                self._resume(started[0], finished)
                resumed = True
                continue
            self._living += len(started)
            place = self._place(_Row(started))
            places.append(place)
            sibling = None if group.follows is None else self._sibling(group, place)
            if sibling is None:
                afresh.append(place)
            else:
                self._decoder.copy(sibling, place, group.request.prompt.size)
        if afresh:
            groups = [self._at(place).group for place in afresh]
            follows = self._decoder.prefill(afresh, [group.request.prompt for group in groups])
            for number, group in enumerate(groups):
                group.follows = row_of(follows, number)
        if places:
            logits = stacked([_known(self._at(place).group.follows) for place in places])
            self._grow(places, logits, finished)
        return bool(places) or resumed

    def _resume(self, completion: _Completion, finished: list[Finished]) -> None:
        """Continue a completion after its prefix, by one prefill of prompt and prefix."""
        if (finish := completion.finish()) is not None:
            finished.append(completion.finished(finish))
            return
        self._living += 1
        row = _Row([completion])
        place = self._place(row)
        self._grow([place], self._decoder.prefill([place], [row.sequence()]), finished)

    def _next(self) -> Iterator[tuple[_Group, range]]:
        """Return the groups that start now, and which of their completions."""
        free = self._most - self._living
        while free and self._waiting:
            group = self._waiting[0]
            spare = 0 if group.request.turns is None else 1
            if group.length > self._length or spare > self._spare:
                if any(self._rows):
                    return  # longer rows are made when none is in use
                self._spare = max(spare, self._spare)
                self._make_room(max(group.length, self._length))
                free = min(free, self._most)
            numbers = group.take(free)
            free -= len(numbers)
            if not group.left:
                self._waiting.popleft()
            yield group, numbers

    def _make_room(self, length: int) -> None:
        """Grow the rows, as far as this machine has memory."""
        self._length = _rounded(length, self._decoder.context)
        while True:
            try:
                self._decoder.make_room(self._most + self._spare, self._length)
            except NoRoomError:
                if self._most == 1:
                    raise
                self._most //= 2
                _log.warning("too little memory: %d completions at once instead of twice as many", self._most)
            else:
                return

    def _sibling(self, group: _Group, beside: int) -> int | None:
        """Another row that begins with the group's prompt."""
        found = (place for place, row in enumerate(self._rows) if row and row.group is group)
        return next((place for place in found if place != beside), None)

    def _grow(self, places: Sequence[int], logits: Follows, finished: list[Finished]) -> None:
        """Draw a token for each completion in these rows, by its row of `logits`."""
        rows = [self._at(place) for place in places]
        completions = [completion for row in rows for completion in row.completions]
        of = np.repeat(np.arange(len(rows)), [len(row.completions) for row in rows])
        _draw_each(completions, of, logits, self._head)
        self.tokens += len(completions)
        born: list[tuple[int, _Row]] = []
        for place, row in zip(places, rows, strict=True):
            branches: dict[int, list[_Completion]] = {}
            for completion in row.completions:
                if (finish := completion.finish()) is not None:
                    finished.append(completion.finished(finish))
                    self._living -= 1
                else:
                    branches.setdefault(completion.ids[-1], []).append(completion)
            going = [_Row(branch) for branch in branches.values()]
            self._rows[place] = going[0] if going else None
            born += [(place, row) for row in going[1:]]
            for resting in (each for each in going if each.rests):
                self._asked[resting.group.number, resting.completions[0].number] = resting
                self._unasked.append(resting)
        for source, row in born:
            self._decoder.copy(source, self._place(row), row.filled)

    def _place(self, row: _Row) -> int:
        """Claim a free place for a row."""
        place = next((place for place, there in enumerate(self._rows) if there is None), len(self._rows))
        self._rows[place : place + 1] = [row]
        return place

    def _at(self, place: int) -> _Row:
        row = self._rows[place]
        if row is None:
            raise DefectError(f"row {place} of a batch is free")
        return row

    def _close_up(self) -> None:
        """Move the running rows to the front, without a hole, before rows at rest."""
        active = sum(row is not None and not row.rests for row in self._rows)
        for place in range(active):
            if self._rows[place] is None:
                self._change_place(self._last_active(), place)
        for place in range(active):
            if self._at(place).rests:  # there is one place more than rows, so one beyond is free
                self._change_place(place, self._free_from(active))
                self._change_place(self._last_active(), place)
        while self._rows and self._rows[-1] is None:
            self._rows.pop()
        if self._spare:
            self._decoder.rest([place for place, row in enumerate(self._rows) if row and row.rests])

    def _last_active(self) -> int:
        return max(place for place, row in enumerate(self._rows) if row and not row.rests)

    def _free_from(self, first: int) -> int:
        """Return a free place, the first one at or beyond this."""
        holes = (place for place in range(first, len(self._rows)) if self._rows[place] is None)
        found = next(holes, None)
        if found is None:
            self._rows.append(None)
            found = len(self._rows) - 1
        return found

    def _change_place(self, source: int, target: int) -> None:
        row = self._at(source)
        self._decoder.copy(source, target, row.filled)
        self._rows[target], self._rows[source] = row, None


def _draw_each(completions: Sequence[_Completion], of: Ids, logits: Follows, head_id: bytes) -> None:
    """Draw each completion's next token under a head; `of` is its logits row."""
    for completion in completions:
        if completion.spans[-1].head_id != head_id:
            completion.spans.append(Span(len(completion.ids), head_id))
    by_limits: dict[SamplingLimits, list[int]] = {}
    for place, completion in enumerate(completions):
        by_limits.setdefault(completion.limits, []).append(place)
    for limits, places in by_limits.items():
        luck = np.array([completions[place].luck[len(completions[place].ids)] for place in places])
        known = first_ids(logits, limits.vocab_size)
        tokens, logprobs = draw(known, of[places], luck, limits.temperature)
        for place, token, logprob in zip(places, tokens.tolist(), logprobs.tolist(), strict=True):
            completions[place].ids.append(token)
            completions[place].logprobs.append(logprob)


def _known_ids(ids: Ids | None) -> Ids:
    if ids is None:
        raise DefectError("a reply that has not come")
    return ids


def _known(logits: Follows | None) -> Follows:
    if logits is None:
        raise DefectError("a prompt that was not filled in")
    return logits


def _rounded(length: int, context: int | None) -> int:
    """Return the smallest of 64, 128, 256 … that is enough, within the context."""
    room = _ROUNDING
    while room < length:
        room *= 2
    return room if context is None else max(length, min(room, context))
