"""`few-shot`: one-line tasks for small models, after two worked examples.

    larger of 12 and 57: 57
    larger of 83 and 21: 83
    larger of 40 and 9:

The answer is the first line of the completion; give the newline as a stop text of the run, so that
nothing is drawn after it. All or nothing. A tenth of all problems, by their hash, is held out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from blake3 import blake3

from echo_node.contract.api import Contract, Params, Prompt, Score
from echo_node.contract.keyed_rng import KeyStream, random_from

HELD_OUT: Final = 26
"""Problems are held out where the first byte of their hash is below this, of 256."""
SHOWN: Final = 40
"""Characters of a wrong answer that its reason quotes."""
WORDS: Final = (
    *("apple", "river", "stone", "cloud", "green", "table", "horse", "light", "paper", "bread"),
    *("ocean", "chair", "tiger", "music", "glass", "house", "plant", "sugar", "train", "night"),
    *("field", "queen", "metal", "smile", "beach", "clock", "fruit", "wheel", "snake", "dress"),
)
ORDINALS: Final = ("first", "second", "third", "fourth")


class Problem(NamedTuple):
    """A question of one line, and its answer."""

    question: str
    answer: str


def _larger(stream: KeyStream) -> Problem:
    one = stream.between(1, 99)
    other = stream.between(1, 98)
    other += other >= one  # never the same number
    return Problem(f"larger of {one} and {other}:", str(max(one, other)))


def _sum(high: int) -> Callable[[KeyStream], Problem]:
    def draw(stream: KeyStream) -> Problem:
        one, other = stream.between(high // 9, high), stream.between(high // 9, high)
        return Problem(f"{one} + {other} =", str(one + other))

    return draw


def _even_or_odd(stream: KeyStream) -> Problem:
    number = stream.between(1, 999)
    return Problem(f"{number} is even or odd:", "odd" if number % 2 else "even")


def _last_word(stream: KeyStream) -> Problem:
    words = [WORDS[stream.below(len(WORDS))] for _ in range(4)]
    return Problem(f"last of {' '.join(words)}:", words[-1])


def _nth_word(stream: KeyStream) -> Problem:
    words = [WORDS[stream.below(len(WORDS))] for _ in range(4)]
    place = stream.below(len(ORDINALS))
    return Problem(f"{ORDINALS[place]} of {' '.join(words)}:", words[place])


TASKS: Final[Mapping[str, Callable[[KeyStream], Problem]]] = {
    "larger": _larger,
    "even-or-odd": _even_or_odd,
    "last-word": _last_word,
    "nth-word": _nth_word,
    "one-digit-sums": _sum(9),
    "two-digit-sums": _sum(99),
}
EXAMPLES: Final[Mapping[str, tuple[Problem, Problem]]] = {
    "larger": (Problem("larger of 12 and 57:", "57"), Problem("larger of 83 and 21:", "83")),
    "even-or-odd": (Problem("482 is even or odd:", "even"), Problem("317 is even or odd:", "odd")),
    "last-word": (
        Problem("last of moon brush seven coat:", "coat"),
        Problem("last of ring lamp north ball:", "ball"),
    ),
    "nth-word": (
        Problem("second of moon brush seven coat:", "brush"),
        Problem("fourth of ring lamp north ball:", "ball"),
    ),
    "one-digit-sums": (Problem("3 + 4 =", "7"), Problem("8 + 5 =", "13")),
    "two-digit-sums": (Problem("23 + 45 =", "68"), Problem("58 + 17 =", "75")),
}


class FewShot(Contract):
    """One-line tasks; parameter: `task`.

    It is one of larger, even-or-odd, last-word, nth-word and the sums.
    """

    name = "few-shot"
    version = "1"

    def configure(self, params: Params) -> None:
        task = params.choice("task", *TASKS, default="larger")
        self._draw = TASKS[task]
        self._examples = EXAMPLES[task]

    def prompt(self, key: bytes) -> Prompt:
        return self._ask(key, held_out=False)

    def held_out(self, key: bytes) -> Prompt:
        return self._ask(key, held_out=True)

    def score(self, prompt: Prompt, completion: str) -> Score:
        wanted, found = prompt.data["answer"], completion.partition("\n")[0].strip()
        if found == wanted:
            return Score(1.0, f"{wanted} is exact")
        return Score(0.0, f"{found[:SHOWN]!r} is not {wanted}")

    def answer(self, prompt: Prompt) -> str:
        return f" {prompt.data['answer']}\n"

    def _ask(self, key: bytes, *, held_out: bool) -> Prompt:
        stream = random_from(key)
        while True:  # a tenth or nine tenths of the problems fit
            problem = self._draw(stream)
            if is_held_out(problem.question) == held_out and problem not in self._examples:
                break
        lines = [f"{each.question} {each.answer}" for each in self._examples]
        return Prompt("\n".join([*lines, problem.question]), {"answer": problem.answer})


def is_held_out(question: str) -> bool:
    """Return whether a problem is never drawn for training."""
    return blake3(question.encode()).digest()[0] < HELD_OUT
