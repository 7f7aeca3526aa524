"""Continuous batching: completions of many prompts decode together.

A row that falls free is reused at once. Completions of one request that agree so far share a row of
the decoder, and split where their draws differ. New weights can be applied between two tokens:
running completions continue under them, at most one change each. Draws depend on the requests' keys
alone, so a completion does not depend on the others in its batch.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

import numpy as np

from echo_node.engine.base import Draw, Finished, Ids, SamplingLimits, SlotRequest, Span, Update
from echo_node.engine.decoder import Decoder
from echo_node.engine.host_resources import NoRoomError
from echo_node.engine.request_checks import Reach
from echo_node.engine.token_sampling import Logits, draw
from echo_node.errors import DefectError
from protocol.sampling import uniforms

_log = logging.getLogger(__name__)
_ROUNDING: Final = 64
"""Room is made for lengths in steps of this and then doubling, so that it is seldom made again."""


class _Group:
    """A request in progress: completions that have not started, logits of its prompt."""

    def __init__(self, number: int, request: SlotRequest) -> None:
        self.number = number
        self.request = request
        self.started = 0
        self.follows: Logits | None = None
        """Logits after the prompt under the loaded weights; None if not yet computed."""

    @property
    def left(self) -> int:
        return self.request.group_size - self.started

    @property
    def length(self) -> int:
        return self.request.prompt.size + self.request.limits.max_tokens


class _Completion:
    """One completion on its way."""

    def __init__(self, group: _Group, number: int, head_id: bytes) -> None:
        self.group = group
        self.number = number
        self.limits = group.request.limits
        self.luck = uniforms(group.request.slot_key, number, self.limits.max_tokens)
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.spans = [Span(0, head_id)]

    @property
    def has_ended(self) -> bool:
        return self.ids[-1] in self.limits.end_tokens or len(self.ids) == self.limits.max_tokens

    def finished(self) -> Finished:
        ends = self.ids[-1] in self.limits.end_tokens
        ids, logprobs = np.array(self.ids, np.int64), np.array(self.logprobs)
        drawn = Draw(ids, logprobs, "end" if ends else "length", tuple(self.spans))
        return Finished(self.group.number, self.number, drawn)


class _Row:
    """Completions that agree, on one row of the decoder. Their last token is not in the row yet."""

    def __init__(self, completions: list[_Completion]) -> None:
        self.completions = completions

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

    def sequence(self) -> Ids:
        drawn = np.array(self.completions[0].ids, np.int64)
        return np.concatenate((self.group.request.prompt, drawn)).astype(np.int64)


class Batch:
    """The running batch of one engine: up to `rows` completions.

    `put` applies an update to the decoder.
    """

    def __init__(self, decoder: Decoder, head_id: bytes, *, rows: int, put: Callable[[Update], None]) -> None:
        self._decoder = decoder
        self._head = head_id
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
    def updatable(self) -> bool:
        """Return whether no running completion has changed its head yet."""
        return all(len(each.spans) == 1 for each in self._completions())

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
        for completion in self._completions():
            completion.spans.append(Span(len(completion.ids), update.head_id))
        for group in {row.group for row in self._rows if row} | set(self._waiting):
            group.follows = None

    def step(self) -> list[Finished]:
        """One token for every completion that runs, and the first one for those that now start."""
        before = time.perf_counter()
        finished: list[Finished] = []
        if self._living:
            rows = [row for row in self._rows if row]  # all of them: `_close_up` has left no hole
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

    def _completions(self) -> Iterator[_Completion]:
        return (completion for row in self._rows if row for completion in row.completions)

    def _start(self, finished: list[Finished]) -> bool:
        """Start as many completions as there is room for. Whether there were any."""
        afresh: list[int] = []
        places: list[int] = []
        for group, numbers in self._next():
            started = [_Completion(group, number, self._head) for number in numbers]
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
            for group, logits in zip(groups, follows, strict=True):
                group.follows = logits.copy() if group.left else logits
        if places:
            logits = np.stack([_known(self._at(place).group.follows) for place in places])
            self._grow(places, logits, finished)
        return bool(places)

    def _next(self) -> Iterator[tuple[_Group, range]]:
        """Return the groups that start now, and which of their completions."""
        free = self._most - self._living
        while free and self._waiting:
            group = self._waiting[0]
            if group.length > self._length:
                if any(self._rows):
                    return  # longer rows are made when none is in use
                self._make_room(group.length)
                free = min(free, self._most)
            first, count = group.started, min(group.left, free)
            group.started += count
            free -= count
            if not group.left:
                self._waiting.popleft()
            yield group, range(first, first + count)

    def _make_room(self, length: int) -> None:
        """Grow the rows, as far as this machine has memory."""
        self._length = _rounded(length, self._decoder.context)
        while True:
            try:
                self._decoder.make_room(self._most, self._length)
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

    def _grow(self, places: Sequence[int], logits: Logits, finished: list[Finished]) -> None:
        """Draw a token for each completion in these rows; `logits` has one row for each of them."""
        rows = [self._at(place) for place in places]
        completions = [completion for row in rows for completion in row.completions]
        of = np.repeat(np.arange(len(rows)), [len(row.completions) for row in rows])
        _draw_each(completions, of, logits)
        self.tokens += len(completions)
        born: list[tuple[int, _Row]] = []
        for place, row in zip(places, rows, strict=True):
            branches: dict[int, list[_Completion]] = {}
            for completion in row.completions:
                if completion.has_ended:
                    finished.append(completion.finished())
                    self._living -= 1
                else:
                    branches.setdefault(completion.ids[-1], []).append(completion)
            going = [_Row(branch) for branch in branches.values()]
            self._rows[place] = going[0] if going else None
            born += [(place, row) for row in going[1:]]
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
        """Leave no hole among the rows: the last ones move there."""
        holes = [place for place, row in enumerate(self._rows) if row is None]
        for hole in holes:
            while self._rows and self._rows[-1] is None:
                self._rows.pop()
            if hole >= len(self._rows):
                return
            last = len(self._rows) - 1
            row = self._at(last)
            self._decoder.copy(last, hole, row.filled)
            self._rows[hole], self._rows[last] = row, None


def _draw_each(completions: Sequence[_Completion], of: Ids, logits: Logits) -> None:
    """Give each completion its next token. `of` is its row of the logits."""
    by_limits: dict[SamplingLimits, list[int]] = {}
    for place, completion in enumerate(completions):
        by_limits.setdefault(completion.limits, []).append(place)
    for limits, places in by_limits.items():
        luck = np.array([completions[place].luck[len(completions[place].ids)] for place in places])
        known = logits[:, : limits.vocab_size]
        tokens, logprobs = draw(known, of[places], luck, limits.temperature)
        for place, token, logprob in zip(places, tokens.tolist(), logprobs.tolist(), strict=True):
            completions[place].ids.append(token)
            completions[place].logprobs.append(logprob)


def _known(logits: Logits | None) -> Logits:
    if logits is None:
        raise DefectError("a prompt that was not filled in")
    return logits


def _rounded(length: int, context: int | None) -> int:
    """Return the smallest of 64, 128, 256 … that is enough, within the context."""
    room = _ROUNDING
    while room < length:
        room *= 2
    return room if context is None else max(length, min(room, context))
