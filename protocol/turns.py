"""Rules of turns: where a turn of the policy ends, and when an episode is over.

Everybody applies the same rules: who samples to know when to ask the environment, who checks to
know what must stand where. The environment itself is a contract's, and not known here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from protocol.errors import InconsistentError
from protocol.manifest import Manifest
from protocol.trajectory import Completion, Stretch


class TurnTokens(NamedTuple):
    """Tokens `start` to `end`, drawn in one turn; the reply up to `replied`."""

    start: int
    end: int
    replied: int


@dataclasses.dataclass(frozen=True, slots=True)
class TurnRules:
    """Limits of a run's episodes, in tokens and turns.

    `end` is the end-of-turn token, which is one of `end_tokens`.
    """

    end: int
    end_tokens: frozenset[int]
    environment: int
    max_tokens: int
    most: int
    tokens: int

    @classmethod
    def of(cls, manifest: Manifest) -> TurnRules | None:
        """Return the rules of a run; None if it has no environment."""
        turns = manifest.turns
        if turns is None:
            return None
        return cls(
            turns.end,
            frozenset(manifest.model.end_tokens),
            turns.environment,
            manifest.sampling.max_tokens,
            turns.most,
            turns.tokens,
        )

    def turn_end(self, last: int, in_turn: int, total: int) -> str | None:
        """Return how a turn ends with its newest token; None if it goes on.

        `in_turn` counts the tokens of the turn, `total` all of the completion.
        """
        if last in self.end_tokens:
            return "turn" if last == self.end else "end"
        return "length" if in_turn == self.tokens or total == self.max_tokens else None

    def finish(self, end: str, turns: int, total: int) -> str | None:
        """Return how a completion ends with this turn; None if the environment is asked."""
        if end == "end":
            return "end"
        if turns == self.most:
            return "turns"
        return "length" if total == self.max_tokens else None

    def fits(self, reply: int, total: int, environment: int) -> bool:
        """Return whether a reply of so many tokens leaves room for another turn.

        `environment` counts the environment's tokens before it.
        """
        return total + reply < self.max_tokens and environment + reply <= self.environment

    def check(self, completion: Completion) -> None:
        """Raise unless turns, limits, ends and finish fit the tokens.

        Whether the environment answered so is not known here.
        """
        turns = turns_of(completion.stretches)
        environment = sum(turn.replied - turn.end for turn in turns)
        if len(turns) > self.most or environment > self.environment:
            raise InconsistentError("more turns, or tokens of the environment, than the run allows", "spans")
        for number, turn in enumerate(turns, 1):
            ids = completion.ids[turn.start : turn.end]
            self._check_turn(ids, turn, completion.ends[number - 1] if completion.ends else "")
            finish = self.finish(completion.ends[number - 1] if completion.ends else "", number, turn.end)
            if number < len(turns) and finish is not None:
                raise InconsistentError("a turn after the last", "spans")
        wanted = {finish} if finish is not None else {"done", "length"}
        if completion.finish not in wanted:
            raise InconsistentError(f"finished as {completion.finish}, not as {min(wanted)}", "finish")

    def _check_turn(self, ids: NDArray[np.int64], turn: TurnTokens, claimed: str) -> None:
        ends = np.flatnonzero(np.isin(ids, list(self.end_tokens)))
        if ends.size and ends[0] != ids.size - 1:
            raise DrawnReplyError("tokens after the end of a turn are called drawn", "tokens")
        if ids.size > self.tokens:
            raise DrawnReplyError(f"a turn of {ids.size} tokens, at most {self.tokens} are drawn", "tokens")
        if self.turn_end(int(ids[-1]), ids.size, turn.end) != claimed:
            raise InconsistentError(f"a turn that does not end as claimed, {claimed}", "ends")


class DrawnReplyError(InconsistentError):
    """Tokens that only the environment can have written are claimed to be drawn."""


def turns_of(stretches: Sequence[Stretch]) -> list[TurnTokens]:
    """Return a completion's turns: drawn tokens, and the reply's after them."""
    found: list[TurnTokens] = []
    start: int | None = None
    for stretch in stretches:
        if stretch.head is None and start is not None:
            found.append(TurnTokens(start, stretch.start, stretch.end))
            start = None
        elif stretch.head is not None and start is None:
            start = stretch.start
    if start is not None:
        found.append(TurnTokens(start, stretches[-1].end, stretches[-1].end))
    return found


def turn_ends(
    ids: NDArray[np.int64], stretches: Sequence[Stretch], end: int, ends: Collection[int]
) -> tuple[str, ...]:
    """Return how each turn of a completion ended, by its last token."""
    lasts = [int(ids[turn.end - 1]) for turn in turns_of(stretches)]
    return tuple("turn" if last == end else "end" if last in ends else "length" for last in lasts)
