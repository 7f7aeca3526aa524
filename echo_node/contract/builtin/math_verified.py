r"""`math`: problems from a file, exact answers compared by math-verify.

1/2, 0.5 and \frac{2}{4} are one answer. Only the LaTeX reader is used, which builds expressions
with a grammar; the reader of plain expressions hands text to Python and is left out. No signals are
set, so it works in any thread; time is bounded by what may be asked of sympy.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

from echo_node.contract import extraction
from echo_node.contract.api import Contract, Params, Prompt, Score
from echo_node.contract.builtin import plain_latex
from echo_node.contract.builtin.problems import SAMPLE, SAMPLE_HASH, read_problems
from echo_node.contract.keyed_rng import random_from
from echo_node.errors import ContractError

RELEASE: Final = "0.9.0"
_INSTALL: Final = "pip install 'echo-node[math]'"
_AROUND: Final = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"))


class Math(Contract):
    """Mathematical problems with exact answers.

    Problems are the rows of the run's data set. Without one, `data` is the name of a file of JSON
    lines in the data folder (default: a sample), and `blake3` its hash. Other parameters: `way`,
    where the answer stands (default boxed); `chat`, whether the model's chat template is used.
    """

    name = "math"
    version = "1"
    reads_rows = True

    def configure(self, params: Params) -> None:
        data = params.text("data", default=SAMPLE, longest=100)
        pinned = params.text("blake3", default=SAMPLE_HASH if data == SAMPLE else "", longest=64)
        self.way = params.choice("way", *extraction.WAYS, default="boxed")
        self.chat = params.flag("chat", default=False)
        self._parser, self._grader = _library()
        if self.rows and (data, pinned) != (SAMPLE, SAMPLE_HASH):
            raise ContractError("math: the run has a data set, so that the parameter `data` names another")
        self.problems = [] if self.rows else read_problems(data, pinned)

    def prompt(self, key: bytes) -> Prompt:
        if self.rows:
            return self.row_prompt(random_from(key).choice(self.rows))
        problem = random_from(key).choice(self.problems)
        return self.row_prompt({"problem": problem.text, "answer": problem.answer})

    def row_prompt(self, row: Mapping[str, str]) -> Prompt:
        asking, data = extraction.asking(self.way), {"answer": row["answer"]}
        if self.chat:
            return Prompt(row["problem"], data, system=asking, chat=True)
        return Prompt(f"{row['problem']}\n{asking}\n", data)

    def score(self, prompt: Prompt, completion: str) -> Score:
        answer = extraction.extract(completion, self.way)
        if answer is None:
            return Score(0.0, "there is no answer")
        wanted, given = prompt.data["answer"], _bare(answer)
        if given == _bare(wanted):
            return Score(1.0, f"{given!r} is exact")
        if trouble := plain_latex.trouble_with(given, wanted):
            return Score(0.0, f"{given[:80]!r} was not compared: {trouble}")
        if self._equal(wanted, given):
            return Score(1.0, f"{given!r} equals {wanted!r}")
        return Score(0.0, f"{given!r} is not {wanted!r}")

    def answer(self, prompt: Prompt) -> str:
        return extraction.written(prompt.data["answer"], self.way)

    def _equal(self, wanted: str, given: str) -> bool:
        gold, parsed = self._read(_bare(wanted)), self._read(given)
        if not gold or not parsed:
            return False
        return bool(self._grader.verify(gold, parsed, timeout_seconds=None))

    def _read(self, latex: str) -> list[Any]:
        config = [self._parser.LatexExtractionConfig(boxed_match_priority=-1)]
        read: list[Any] = self._parser.parse(
            f"${latex}$",
            config,
            fallback_mode="no_fallback",
            extraction_mode="first_match",
            parsing_timeout=None,
        )
        return read


def _bare(text: str) -> str:
    """Return the expression without delimiters, on one line."""
    bare = " ".join(text.split())
    for start, end in _AROUND:
        if bare.startswith(start) and bare.endswith(end) and len(bare) >= len(start) + len(end):
            return bare[len(start) : len(bare) - len(end)].strip()
    return bare.removesuffix(".").rstrip()


def _library() -> tuple[Any, Any]:
    """Return math-verify's parser and grader, of the one pinned release.

    All machines compare with the same release.
    """
    try:
        found = version("math-verify")
        from math_verify import grader, parser  # noqa: PLC0415 -- brings sympy, which most runs never need
    except (PackageNotFoundError, ModuleNotFoundError) as error:
        missing = getattr(error, "name", None) or "math-verify"
        raise ContractError(f"this contract needs {missing}, which is not here", advice=_INSTALL) from error
    if found != RELEASE:
        raise ContractError(
            f"math-verify {found} is here, {RELEASE} is what runs compare with", advice=_INSTALL
        )
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that nobody sets an alarm
    return parser, grader
