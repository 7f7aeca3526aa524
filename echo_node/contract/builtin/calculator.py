"""`calculator`: word sums solved with a calculator tool in a few turns.

    How much is 37 boxes of 48 apples and 19 more?
    calculator: 37 * 48 + 19
    result: 1795
    answer: 1795

A call is JSON in `<tool_call>` tags, or the plain line above. A turn with `answer: N` ends the
episode. The score is 1 for the right number and 0 otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from echo_node.contract.api import Contract, Params, Prompt, Reply, Score, Turn
from echo_node.contract.arithmetic import calculate
from echo_node.contract.keyed_rng import random_from
from echo_node.contract.tools import Tool, ToolError, find_call, find_plain_call, run_call

TOOLS: Final[dict[str, Tool]] = {"calculator": calculate}
THINGS: Final = (("boxes", "apples"), ("shelves", "books"), ("buses", "seats"), ("bags", "coins"))
_ANSWER: Final = re.compile(r"answer:[ \t]*(-?\d{1,12})\b")
NO_CALL: Final = "error: neither a call nor an answer; write `calculator: 1 + 2` or `answer: 3`"


class Calculator(Contract):
    """Word sums; parameters: `digits` per number (1 to 4, default 2), `chat` (true)."""

    name = "calculator"
    version = "1"

    def configure(self, params: Params) -> None:
        self.digits = params.whole("digits", default=2, low=1, high=4)
        self.chat = params.flag("chat", default=True)

    def prompt(self, key: bytes) -> Prompt:
        stream = random_from(key)
        high = 10**self.digits - 1
        one, two, three = stream.between(2, high), stream.between(2, high), stream.between(1, high)
        many, few = THINGS[stream.below(len(THINGS))]
        text = (
            f"How many {few} are {one} {many} of {two} {few} and {three} more?\n"
            "Write `calculator: 12 * 3 + 4` on a line to use the calculator, or `answer: 40` to answer."
        )
        data = {"answer": str(one * two + three), "sum": f"{one} * {two} + {three}"}
        return Prompt(text if self.chat else f"{text}\n", data, chat=self.chat)

    def reply(self, prompt: Prompt, turns: Sequence[Turn]) -> Reply:  # noqa: ARG002 -- the call says all
        text = turns[-1].text
        if _ANSWER.search(text):
            return Reply(done=True)
        try:
            call = find_call(text) or find_plain_call(text, {"calculator": "expression"})
        except ToolError as error:
            return Reply(f"error: {error}")
        return Reply(NO_CALL if call is None else f"result: {run_call(call, TOOLS)}")

    def score(self, prompt: Prompt, turns: Sequence[Turn]) -> Score:
        found = _ANSWER.search(turns[-1].text) if turns else None
        if found is None:
            return Score(0.0, "there is no answer")
        right = found[1] == prompt.data["answer"]
        return Score(float(right), f"{found[1]} is {'right' if right else 'not ' + prompt.data['answer']}")

    def act(self, prompt: Prompt, turns: Sequence[Turn]) -> str:
        if not turns:
            return f"calculator: {prompt.data['sum']}"
        return f"answer: {prompt.data['answer']}"
