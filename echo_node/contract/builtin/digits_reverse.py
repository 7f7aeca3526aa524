"""`digits-reverse`: say some digits backwards, `r48213=` → `31284`.

The task of the embedded model.

All or nothing: the exact digits and no character more score 1, anything else 0.
"""

from __future__ import annotations

from echo_node.contract.api import Contract, Params, Prompt, Score
from echo_node.contract.keyed_rng import random_from

SHOWN = 40  # characters of a wrong answer that its reason quotes


class DigitsReverse(Contract):
    """Parameters: `digits`, how many there are to reverse (1 to 32, 5 unless given)."""

    name = "digits-reverse"
    version = "1"

    def configure(self, params: Params) -> None:
        self.digits = params.whole("digits", default=5, low=1, high=32)

    def prompt(self, key: bytes) -> Prompt:
        digits = random_from(key).digits(self.digits)
        return Prompt(f"r{digits}=", {"answer": digits[::-1]})

    def score(self, prompt: Prompt, completion: str) -> Score:
        wanted = prompt.data["answer"]
        if completion == wanted:
            return Score(1.0, f"{wanted} is exact")
        return Score(0.0, f"{_quoted(completion)} is not {wanted}")

    def answer(self, prompt: Prompt) -> str:
        return prompt.data["answer"]


def _quoted(text: str) -> str:
    if len(text) > SHOWN:
        return f"{text[:SHOWN]!r}… of {len(text)} characters"
    return repr(text) if text else "nothing"
