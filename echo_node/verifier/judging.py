"""Whether a group was honestly sampled: its completions prefilled at the named heads, and only then its reward.

Checks go from cheap to dear and stop at the first breach: long completions go in pieces, of short ones several share a
pass. What needs no model (limits, roster, prompt, end) is
`admission`'s, which comes before. It knows no network; the engine and the weights are the caller's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from echo_node.admission import Admitted
from echo_node.contract import Score
from echo_node.contract.jail.seat import Failed
from echo_node.engine.base import Claim, Engine, Floats, Ids, SamplingLimits, Scores
from echo_node.errors import ContractError
from echo_node.run import Run
from echo_node.verifier.bands import Bands, Breach
from echo_node.verifier.evidence import Evidence, evidence
from protocol.sampling import uniforms
from protocol.trajectory import Completion

PIECE: Final = 64
"""Tokens of the first piece of a completion; each further one is twice as long."""
PASS: Final = 4 * PIECE
"""Tokens of pieces that are looked at in one pass: they share their prompt, and a breach in one ends it for all."""
TEMPERATURES: Final = (0.9, 1.1)
"""What else a sampler might have drawn at, times the run's."""
REWARD_SLACK: Final = 1e-9


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens `start` to `end` of completion number `index`, all drawn under one head."""

    head: bytes
    index: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Finding:
    """What came of a group: honest if there is no breach. Evidence is of all tokens that were looked at."""

    breach: Breach | None
    evidence: Evidence
    reward: float | None
    """The mean reward that the contract gives, if it came to that."""


@dataclass(frozen=True, slots=True, eq=False)
class Seen:
    """A piece token by token: what the judge's engine says of it, its luck, and the log-probabilities that were claimed."""

    piece: Piece
    scores: Scores
    luck: Floats
    claimed: Floats


class Judge:
    """Judges the groups of a run. `at(head_id)` gives an engine that holds the weights of a head; `saw` is shown each piece."""

    def __init__(
        self, run: Run, at: Callable[[bytes], Engine], saw: Callable[[Seen], None] | None = None
    ) -> None:
        self._run = run
        self._at = at
        self._saw = saw
        self._bands = {told.engine: Bands(told) for told in run.told.engines}

    def judge(self, admitted: Admitted, cancelled: Callable[[], bool] = lambda: False) -> Finding | None:
        """Look at a whole group. It takes a while: run it in a thread. None: it was cancelled."""
        group = admitted.group.message
        bands = self._bands[group.engine]
        key = self._run.slot_key(group.heads[0], admitted.group.signer, group.slot)
        completions = group.completions()
        whole = Evidence()
        for pieces in passes(_by_head(group.heads, completions)):
            if cancelled():
                return None
            for found in self._look(pieces, group.prompt_ids(), completions, key, bands):
                whole += found
                breach = bands.breach(found)
                if breach is not None:
                    return Finding(breach, whole, None)
        breach = bands.breach(whole)
        if breach is not None:
            return Finding(breach, whole, None)
        return self._reward(admitted, completions, whole)

    def _look(
        self,
        pieces: Sequence[Piece],
        prompt: Ids,
        completions: Sequence[Completion],
        key: bytes,
        bands: Bands,
    ) -> Iterator[Evidence]:
        """Evidence of pieces under one head, by one pass (and one for each other temperature, where one could hide)."""
        engine, limits = self._at(pieces[0].head), self._run.limits
        claims = [_claim(prompt, completions[piece.index].ids, piece) for piece in pieces]
        scores = engine.score_many(claims, limits)
        others = [engine.score_many(claims, other) for other in self._other_limits()] if bands.wide else []
        for place, piece in enumerate(pieces):
            luck = uniforms(key, piece.index, piece.end - piece.start, piece.start)
            claimed = completions[piece.index].logprobs[piece.start : piece.end]
            if self._saw is not None:
                self._saw(Seen(piece, scores[place], luck, claimed))
            yield evidence(scores[place], luck, claimed, tuple(other[place] for other in others))

    def _other_limits(self) -> Iterator[SamplingLimits]:
        limits = self._run.limits
        return (replace(limits, temperature=limits.temperature * factor) for factor in TEMPERATURES)

    def _reward(self, admitted: Admitted, completions: Sequence[Completion], found: Evidence) -> Finding:
        """Only what was honestly sampled is worth the risk of scoring it."""
        try:
            results = self._run.results(admitted.prompt, [completion.ids for completion in completions])
        except ContractError as error:
            return Finding(
                Breach("not-scored", f"the contract fails here: {error.what}", sure=False), found, None
            )
        failed = next((each for each in results if isinstance(each, Failed)), None)
        if failed is not None:  # by the text, or by this machine: nobody is condemned for it
            return Finding(
                Breach("not-scored", f"the contract fails here: {failed.reason}", sure=False), found, None
            )
        rewards = [each.value for each in results if isinstance(each, Score)]
        for completion, reward in zip(completions, rewards, strict=True):
            if abs(reward - completion.reward) > REWARD_SLACK:
                what = f"a reward of {completion.reward:g} is claimed, and the contract gives {reward:g}"
                return Finding(Breach("wrong-reward", what), found, float(np.mean(rewards)))
        return Finding(None, found, float(np.mean(rewards)))


def passes(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Pieces that go through the model together: of one head, and padded to the longest no more than a few long pieces."""
    together: list[Piece] = []
    for piece in pieces:
        longest = max(each.end - each.start for each in [*together, piece])
        if together and (piece.head != together[0].head or longest * (len(together) + 1) > PASS):
            yield together
            together = []
        together.append(piece)
    if together:
        yield together


def _by_head(heads: Sequence[bytes], completions: Sequence[Completion]) -> Iterator[Piece]:
    """Every stretch of every completion, in pieces, those of one head together: weights change as seldom as can be."""
    for place, head in enumerate(heads):
        pieces = [
            piece
            for index, completion in enumerate(completions)
            for stretch in completion.stretches
            if stretch.head == place
            for piece in _cut(Piece(head, index, stretch.start, stretch.end))
        ]
        yield from sorted(
            pieces, key=lambda piece: piece.start
        )  # all beginnings first: they share the prompt


def _cut(whole: Piece) -> Iterator[Piece]:
    """A stretch in pieces, so that a breach ends it early; they grow, since each begins with all that is before it."""
    start, size = whole.start, PIECE
    while start < whole.end:
        stop = whole.end if whole.end - start <= 2 * size else start + size
        yield replace(whole, start=start, end=stop)
        start, size = stop, 2 * size


def _claim(prompt: Ids, ids: Ids, piece: Piece) -> Claim:
    before = np.concatenate((prompt, ids[: piece.start])).astype(np.int64)
    return Claim(before, ids[piece.start : piece.end])
