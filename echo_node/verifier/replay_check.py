"""Seed-replay check of a group: prefill completions, recompute rewards.

Checks go from cheap to expensive and stop at the first breach: long completions are cut into
pieces, and several short pieces share a forward pass. With an environment, turn after turn: first
the draws, then the reply. What needs no model (limits, roster, prompt, structure) was checked
before, by `rollouts.admission`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from echo_node.contract import Score
from echo_node.contract.jail.worker import Failed
from echo_node.engine.base import Claim, Engine, Floats, Ids, SamplingLimits, Scores
from echo_node.errors import ContractError
from echo_node.rollouts import claims
from echo_node.rollouts.record import RolloutRecord
from echo_node.runs.episodes import EpisodeReplay, is_proven
from echo_node.runs.run import Run, Scorable
from echo_node.verifier.class_breaches import NARROW
from echo_node.verifier.evidence import Evidence, evidence
from echo_node.verifier.tolerance import Breach, Tolerance
from protocol.sampling import uniforms
from protocol.trajectory import Completion
from protocol.turns import TurnTokens

PIECE: Final = 64
"""Tokens of the first piece of a completion; each further one is twice as long."""
PASS: Final = 4 * PIECE
"""Padded tokens per forward pass; its pieces share their prompt, and a breach in one ends all."""
TEMPERATURES: Final = (0.9, 1.1)
"""Other temperatures that are tried, as multiples of the run's."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens `start` to `end` of completion number `index`, all drawn under one head."""

    head: bytes
    index: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Finding:
    """Outcome of a check: breach (None: honest), evidence of checked tokens."""

    breach: Breach | None
    evidence: Evidence
    reward: float | None
    """The contract's mean reward, if the check got as far as recomputing it."""
    rewards: tuple[float, ...] = ()
    """The contract's reward of each completion of an honest group."""


@dataclass(frozen=True, slots=True, eq=False)
class ScoredPiece:
    """A piece per token: own scores, the slot's uniforms, claimed logprobs."""

    piece: Piece
    scores: Scores
    luck: Floats
    claimed: Floats


class ReplayCheck:
    """Seed-replay checker of a run's groups.

    `at(head_id)` returns an engine with the weights of a head; `on_piece` receives every piece.
    """

    def __init__(
        self, run: Run, at: Callable[[bytes], Engine], on_piece: Callable[[ScoredPiece], None] | None = None
    ) -> None:
        self._run = run
        self._at = at
        self._on_piece = on_piece
        self._tolerances = {each.engine: Tolerance(each) for each in run.manifest.engines}
        self._ends = np.array(sorted(run.limits.end_tokens), np.int64)

    def check(self, admitted: RolloutRecord, cancelled: Callable[[], bool] = lambda: False) -> Finding | None:
        """Check a whole group; return None if cancelled. Slow: run it in a thread."""
        group = admitted.message
        tolerance = self._tolerances[group.engine]
        key = self._run.slot_key(group.heads[0], admitted.sampler, group.slot)
        completions = group.completions()
        whole, worst = Evidence(), None
        episodes = None
        if self._run.turn_rules is not None:
            episodes = EpisodeReplay(self._run, admitted.prompt, completions)
        # The draws of a turn before the reply to it: nobody buys time of an environment with turns
        # that were not drawn.
        for number in range(episodes.most if episodes else 1):
            places = [each[number : number + 1] for each in episodes.places] if episodes else None
            for pieces in passes(_by_head(group.heads, completions, places)):
                if cancelled():
                    return None
                for found in self._score(pieces, group.prompt_ids(), completions, key, tolerance):
                    whole += found
                    worst = _worse(worst, tolerance.breach(found))
                    if worst is not None and worst.over > NARROW:  # a narrow one may hide a plain one
                        return Finding(worst, whole, None)
            if episodes is not None:
                breach = self._check_replies(admitted, completions, episodes, number)
                if breach is not None:
                    return Finding(breach, whole, None)
        worst = _worse(worst, tolerance.breach(whole))
        if worst is not None:
            return Finding(worst, whole, None)
        return self._check_rewards(admitted, completions, whole, episodes)

    def _check_replies(
        self,
        admitted: RolloutRecord,
        completions: Sequence[Completion],
        episodes: EpisodeReplay,
        number: int,
    ) -> Breach | None:
        """Recompute the environment's replies to one turn of all completions."""
        try:
            found = episodes.step(number)
        except ContractError as error:  # the text or this machine may be the cause: blame nobody
            return Breach("not-replayed", f"the environment failed on this machine: {error.what}", sure=False)
        if found is None:
            return None
        if not is_proven(self._run, admitted.prompt, completions, found):
            return Breach("not-replayed", f"replies that do not repeat: {found.what}", sure=False)
        return Breach(found.reason, found.what)

    def _score(
        self,
        pieces: Sequence[Piece],
        prompt: Ids,
        completions: Sequence[Completion],
        key: bytes,
        tolerance: Tolerance,
    ) -> Iterator[Evidence]:
        """Score pieces of one head in one forward pass.

        If the tolerance is wide, there is one more per other temperature.
        """
        engine, limits = self._at(pieces[0].head), self._run.limits
        asked = [_claim(prompt, completions[piece.index].ids, piece) for piece in pieces]
        scores = engine.score_many(asked, limits)
        others = [engine.score_many(asked, other) for other in self._other_limits()] if tolerance.wide else []
        for row, piece in enumerate(pieces):
            luck = uniforms(key, piece.index, piece.end - piece.start, piece.start)
            claimed = completions[piece.index].logprobs[piece.start : piece.end]
            if self._on_piece is not None:
                self._on_piece(ScoredPiece(piece, scores[row], luck, claimed))
            is_end = np.isin(completions[piece.index].ids[piece.start : piece.end], self._ends)
            yield evidence(scores[row], luck, claimed, is_end, tuple(other[row] for other in others))

    def _other_limits(self) -> Iterator[SamplingLimits]:
        limits = self._run.limits
        return (replace(limits, temperature=limits.temperature * factor) for factor in TEMPERATURES)

    def _check_rewards(
        self,
        admitted: RolloutRecord,
        completions: Sequence[Completion],
        found: Evidence,
        episodes: EpisodeReplay | None,
    ) -> Finding:
        """Recompute the rewards, as the last check.

        Only honest tokens are worth the risk of scoring.
        """
        answers: Sequence[Scorable] = episodes.turns if episodes else [each.ids for each in completions]
        try:
            results = self._run.results(admitted.prompt, answers)
        except ContractError as error:
            return Finding(
                Breach("not-scored", f"the contract failed on this machine: {error.what}", sure=False),
                found,
                None,
            )
        failed = next((each for each in results if isinstance(each, Failed)), None)
        if failed is not None:  # the text or this machine may be the cause: blame nobody
            return Finding(
                Breach("not-scored", f"the contract failed on this machine: {failed.reason}", sure=False),
                found,
                None,
            )
        rewards = [each.value for each in results if isinstance(each, Score)]
        if not claims.differ(admitted, rewards):
            return Finding(None, found, float(np.mean(rewards)), tuple(rewards))
        lie = claims.find_lie(self._run, admitted)
        if lie is None:  # fresh processes do not agree on another value: blame nobody
            return Finding(Breach("not-scored", "rewards that do not repeat", sure=False), found, None)
        return Finding(Breach("wrong-reward", lie), found, float(np.mean(rewards)))


def _worse(one: Breach | None, other: Breach | None) -> Breach | None:
    if one is None or other is None:
        return one or other
    return other if other.over > one.over else one


def passes(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Pack consecutive pieces of one head into passes of ≤ `PASS` padded tokens."""
    together: list[Piece] = []
    for piece in pieces:
        longest = max(each.end - each.start for each in [*together, piece])
        if together and (piece.head != together[0].head or longest * (len(together) + 1) > PASS):
            yield together
            together = []
        together.append(piece)
    if together:
        yield together


def _by_head(
    heads: Sequence[bytes],
    completions: Sequence[Completion],
    turns: Sequence[Sequence[TurnTokens]] | None = None,
) -> Iterator[Piece]:
    """Yield the pieces of all completions by head, so weights change rarely.

    With `turns` of each completion, only what was drawn in those.
    """
    for number, head in enumerate(heads):
        pieces = [
            piece
            for index, completion in enumerate(completions)
            for stretch in completion.stretches
            if stretch.head == number
            and (turns is None or any(each.start <= stretch.start < each.end for each in turns[index]))
            for piece in _cut(Piece(head, index, stretch.start, stretch.end))
        ]
        # All beginnings first: they share the prompt.
        yield from sorted(pieces, key=lambda piece: piece.start)


def _cut(whole: Piece) -> Iterator[Piece]:
    """Cut a stretch into pieces of doubling length, to end early at a breach.

    They grow because each is scored after a prefill of everything before it.
    """
    start, size = whole.start, PIECE
    while start < whole.end:
        stop = whole.end if whole.end - start <= 2 * size else start + size
        yield replace(whole, start=start, end=stop)
        start, size = stop, 2 * size


def _claim(prompt: Ids, ids: Ids, piece: Piece) -> Claim:
    before = np.concatenate((prompt, ids[: piece.start])).astype(np.int64)
    return Claim(before, ids[piece.start : piece.end])
