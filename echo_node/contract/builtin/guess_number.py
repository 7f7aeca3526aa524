"""`guess-number`: find a number; the environment says higher or lower.

    48213=      the name of the game     4$
    +           higher                   7$
    -           lower                    5$

The score is 1 for the first guess, less for each further one, and 0 if the number was not found.
All is written with the characters of the embedded model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from echo_node.contract.api import Contract, Params, Prompt, Reply, Score, Turn
from echo_node.contract.keyed_rng import random_from

HIGHER, LOWER, NO_NUMBER = "+", "-", "="
LABEL: Final = 5
"""Digits of the name of a game."""
SHOWN: Final = 20
"""Characters of a wrong guess that its reason quotes."""


class GuessNumber(Contract):
    """Number guessing; parameters: `high`, the largest number (9), `guesses` (4)."""

    name = "guess-number"
    version = "1"

    def configure(self, params: Params) -> None:
        self.largest = params.whole("high", default=9, low=1, high=9)
        self.guesses = params.whole("guesses", default=4, low=1, high=16)

    def prompt(self, key: bytes) -> Prompt:
        stream = random_from(key)
        game = stream.digits(LABEL)  # says nothing of the number
        return Prompt(f"{game}=", {"number": str(stream.below(self.largest + 1))})

    def reply(self, prompt: Prompt, turns: Sequence[Turn]) -> Reply:
        guess, number = turns[-1].text, prompt.data["number"]
        if guess == number or len(turns) >= self.guesses:
            return Reply(done=True)
        if not _is_digit(guess):
            return Reply(NO_NUMBER)
        return Reply(HIGHER if guess < number else LOWER)

    def score(self, prompt: Prompt, turns: Sequence[Turn]) -> Score:
        number = prompt.data["number"]
        for place, turn in enumerate(turns[: self.guesses]):
            if turn.text == number:
                return Score(1.0 - place / self.guesses, f"{number} was guess {place + 1}")
        return Score(0.0, f"{number} was not found; the last guess was {turns[-1].text[:SHOWN]!r}")

    def act(self, prompt: Prompt, turns: Sequence[Turn]) -> str:  # noqa: ARG002 -- the replies say enough
        low, high = 0, self.largest
        for turn in turns:
            if turn.reply == HIGHER:
                low = int(turn.text) + 1
            elif turn.reply == LOWER:
                high = int(turn.text) - 1
        return str((low + high) // 2)


def _is_digit(text: str) -> bool:
    return len(text) == 1 and text in "0123456789"
