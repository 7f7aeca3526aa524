"""Trajectory group: the completions of one prompt, sealed by their sampler.

A group names the slot that it fills, and by its hash the head under which its tokens were drawn.
Sampler and run stand in the envelope. Completions travel in columns: all token ids, then all
log-probabilities, and so on. Whether ids lie in the vocabulary, the limits of the run are kept and
the head is fresh is checked by those who hold the manifest.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Annotated, ClassVar, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from protocol import limits
from protocol.errors import InconsistentError
from protocol.fields import (
    Counter,
    Digest,
    EngineClass,
    Ext,
    array,
    blob,
    choice,
    digest,
    number,
    optional,
    uint,
)
from protocol.tokens import (
    LOGPROB_BYTES,
    bits_for,
    check_packed,
    pack_ids,
    pack_logprobs,
    unpack_ids,
    unpack_logprobs,
)
from protocol.wire import of, record, row

FINISHED: Final = ("done", "end", "length", "turns")
"""How a completion ended: by the environment, an end token, a limit of tokens or of turns."""
TURN_ENDS: Final = ("end", "length", "turn")
"""How a turn ended: by another end token, a limit of tokens, or the end-of-turn token."""
_PACKED_BYTES: Final = limits.VOCABULARY_BITS // 8


class Stretch(NamedTuple):
    """Tokens `start` to `end` of a completion, drawn under `heads[head]`.

    No head means the environment's.
    """

    start: int
    end: int
    head: int | None


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """One completion: a view of a group's columns, or what a group is made from."""

    ids: NDArray[np.int64]
    logprobs: NDArray[np.float64]
    """Log-probability of each token when it was drawn; zero on the environment's tokens."""
    finish: str
    reward: float | None
    """Reward that the sampler claims; None where the run has no claims."""
    stretches: tuple[Stretch, ...]
    """Origins of the tokens, without a gap from the first to the last."""
    ends: tuple[str, ...] | None = None
    """How each turn ended; None in a run without an environment."""

    @property
    def drawn(self) -> NDArray[np.bool_]:
        """Return which tokens the policy drew; the others are the environment's."""
        mask = np.ones(len(self.ids), np.bool_)
        for stretch in self.stretches:
            mask[stretch.start : stretch.end] = stretch.head is not None
        return mask


@row
class Span:
    """Tokens of a later head, or of the environment (no head).

    All other tokens were drawn under the slot's head.
    """

    start: Annotated[int, uint(limits.TOKENS - 1)]
    length: Annotated[int, uint(limits.TOKENS, 1)]
    head: Annotated[int | None, optional(uint(limits.HEADS - 1, 1))]


@record
class TrajectoryGroup:
    """Completions of one slot.

    `bits` is the width of an id; `heads[0]` is the head whose beacon keys the slot, and under which
    every token was drawn of which `spans`, one list per completion, does not say otherwise. `ends`
    are the ends of each completion's turns, in runs with an environment. `rewards` are what the
    sampler claims, in runs whose contract is known to be pure; elsewhere there are none.
    """

    KIND: ClassVar[str] = "group"
    LIMIT: ClassVar[int] = limits.GROUP_BYTES

    bits: Annotated[int, uint(limits.VOCABULARY_BITS, 1)]
    ends: Annotated[
        tuple[tuple[str, ...], ...] | None,
        optional(array(array(choice(*TURN_ENDS), limits.TURNS, 1), limits.COMPLETIONS, 1)),
    ]
    engine: EngineClass
    finish: Annotated[tuple[str, ...], array(choice(*FINISHED), limits.COMPLETIONS, 1)]
    heads: Annotated[tuple[bytes, ...], array(digest, limits.HEADS, 1)]
    lengths: Annotated[tuple[int, ...], array(uint(limits.TOKENS, 1), limits.COMPLETIONS, 1)]
    logprobs: Annotated[bytes, blob(limits.GROUP_BYTES - 1, LOGPROB_BYTES, LOGPROB_BYTES)]
    prompt: Annotated[bytes, blob(_PACKED_BYTES * limits.TOKENS, 1)]
    prompt_length: Annotated[int, uint(limits.TOKENS, 1)]
    rewards: Annotated[
        tuple[float, ...] | None,
        optional(array(number(-limits.REWARD, limits.REWARD), limits.COMPLETIONS, 1)),
    ]
    slot: Counter
    spans: Annotated[
        tuple[tuple[Span, ...], ...], array(array(of(Span), limits.SPANS), limits.COMPLETIONS, 1)
    ]
    tokens: Annotated[bytes, blob(limits.GROUP_BYTES, 1)]
    ext: Ext = dataclasses.field(default_factory=dict)

    def check(self) -> None:
        claims = len(self.lengths) if self.rewards is None else len(self.rewards)
        turns = len(self.lengths) if self.ends is None else len(self.ends)
        if not len(self.finish) == len(self.lengths) == claims == len(self.spans) == turns:
            raise InconsistentError("columns for different numbers of completions", "lengths")
        check_packed(self.prompt, self.prompt_length, self.bits, "prompt")
        check_packed(self.tokens, self.token_count, self.bits, "tokens")
        if len(self.logprobs) != LOGPROB_BYTES * self.token_count:
            raise InconsistentError(
                f"not {LOGPROB_BYTES} bytes for each of {self.token_count} tokens", "logprobs"
            )
        if len(set(self.heads)) != len(self.heads):
            raise InconsistentError("one head named twice", "heads")
        named = {span.head for spans in self.spans for span in spans if span.head}
        if {0, *named} != set(range(len(self.heads))):
            raise InconsistentError("heads are not just the slot's and those that spans name", "heads")
        starts = [0, *itertools.accumulate(self.lengths)]
        for index, spans in enumerate(self.spans):
            if spans:
                self._check_spans(index, spans, starts[index])
            self._check_turns(index, spans)

    def _check_spans(self, index: int, spans: tuple[Span, ...], first: int) -> None:
        """Check one completion's spans; its first token is number `first` of the group's."""
        for before, span in itertools.pairwise(spans):
            if span.start < before.start + before.length:
                raise InconsistentError("spans that overlap or are out of order", "spans")
            if span.start == before.start + before.length and before.head == span.head:
                raise InconsistentError("two spans that are one", "spans")
        if spans[-1].start + spans[-1].length > self.lengths[index]:
            raise InconsistentError("a span beyond its completion", "spans")
        for span in spans:
            place = LOGPROB_BYTES * (first + span.start)
            if span.head is None and self.logprobs[place : place + LOGPROB_BYTES * span.length].strip(b"\0"):
                raise InconsistentError("log-probabilities on the environment's tokens", "spans")
        drawn = [stretch.head for stretch in self.stretches(index) if stretch.head is not None]
        if drawn != sorted(drawn):
            raise InconsistentError("tokens under an older head than those before them", "spans")

    def _check_turns(self, index: int, spans: tuple[Span, ...]) -> None:
        """Check that the environment's tokens divide a completion into its turns."""
        replies = [span for span in spans if span.head is None]
        finish = self.finish[index]
        if self.ends is None:
            if replies or finish not in {"end", "length"}:
                raise InconsistentError("an environment's doing, and no ends of turns", "ends")
            return
        ends = self.ends[index]
        if len(ends) != len(replies) + 1:
            raise InconsistentError("another number of ends than of turns", "ends")
        if replies and (
            not replies[0].start or replies[-1].start + replies[-1].length == self.lengths[index]
        ):
            raise InconsistentError("the first or the last token is the environment's", "spans")
        if "end" in ends[:-1] or (ends[-1] == "end") != (finish == "end"):
            raise InconsistentError("a turn after the end, or an end that is none", "ends")

    @classmethod
    def of(
        cls,
        *,
        prompt: Sequence[int] | NDArray[np.int64],
        completions: Sequence[Completion],
        engine: str,
        heads: tuple[bytes, ...],
        slot: int,
        vocabulary: int,
    ) -> TrajectoryGroup:
        """Make a group from completions."""
        return cls(
            bits=bits_for(vocabulary),
            ends=_ends(completions),
            engine=engine,
            finish=tuple(completion.finish for completion in completions),
            heads=heads,
            lengths=tuple(len(completion.ids) for completion in completions),
            logprobs=pack_logprobs(np.concatenate([completion.logprobs for completion in completions])),
            prompt=pack_ids(prompt, vocabulary),
            prompt_length=len(prompt),
            rewards=_claims(completions),
            slot=slot,
            spans=tuple(
                tuple(
                    Span(stretch.start, stretch.end - stretch.start, stretch.head)
                    for stretch in completion.stretches
                    if stretch.head != 0
                )
                for completion in completions
            ),
            tokens=pack_ids(np.concatenate([completion.ids for completion in completions]), vocabulary),
        )

    @property
    def token_count(self) -> int:
        """Return the tokens of all completions."""
        return sum(self.lengths)

    def prompt_ids(self) -> NDArray[np.int64]:
        return unpack_ids(self.prompt, self.prompt_length, self.bits)

    def completions(self) -> tuple[Completion, ...]:
        """Return the completions, taken out of their columns."""
        cuts = list(itertools.accumulate(self.lengths))[:-1]
        ids = np.split(unpack_ids(self.tokens, self.token_count, self.bits), cuts)
        logprobs = np.split(unpack_logprobs(self.logprobs), cuts)
        return tuple(
            Completion(
                ids[index],
                logprobs[index],
                self.finish[index],
                None if self.rewards is None else self.rewards[index],
                self.stretches(index),
                None if self.ends is None else self.ends[index],
            )
            for index in range(len(self.lengths))
        )

    def stretches(self, index: int) -> tuple[Stretch, ...]:
        """Return the origins of one completion's tokens, without a gap."""
        found: list[Stretch] = []
        at = 0
        for span in self.spans[index]:
            if span.start > at:
                found.append(Stretch(at, span.start, 0))
            at = span.start + span.length
            found.append(Stretch(span.start, at, span.head))
        if at < self.lengths[index]:
            found.append(Stretch(at, self.lengths[index], 0))
        return tuple(found)


def _claims(completions: Sequence[Completion]) -> tuple[float, ...] | None:
    """Return the claimed rewards: all of them, or none."""
    claimed = [float(each.reward) for each in completions if each.reward is not None]
    if claimed and len(claimed) != len(completions):
        raise InconsistentError("rewards of some completions only", "rewards")
    return tuple(claimed) or None


def _ends(completions: Sequence[Completion]) -> tuple[tuple[str, ...], ...] | None:
    """Return the ends of all completions' turns: of all of them, or of none."""
    found = tuple(each.ends for each in completions if each.ends is not None)
    if found and len(found) != len(completions):
        raise InconsistentError("ends of some completions' turns only", "ends")
    return found or None


@record
class GroupReference:
    """Reference in a batch to a sealed group too long for gossip, fetched as a blob."""

    KIND: ClassVar[str] = "group-reference"
    LIMIT: ClassVar[int] = limits.SMALL_BYTES

    blob: Digest
    group: Digest
    head: Digest
    size: Annotated[int, uint(limits.GROUP_BYTES + limits.ENVELOPE_BYTES, 1)]
    slot: Counter
    ext: Ext = dataclasses.field(default_factory=dict)
