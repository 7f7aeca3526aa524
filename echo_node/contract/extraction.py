"""Extract the answer from a completion: tags, box, word, last line, or whole.

Shared by all contracts, so that an answer is the same everywhere: the last complete one. Every way
reads the text in linear time.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

LONGEST: Final = 4096  # characters: whoever writes more between the tags has not answered
WAYS: Final = ("tags", "boxed", "after", "last-line", "whole")
"""Places of an answer: <answer>…</answer>, \\boxed{…}, the rest of the line after `Answer:`, the
last line, or the whole completion."""

_ASKING: Final = {
    "tags": "Give the final answer between <answer> and </answer>.",
    "boxed": "Put the final answer into \\boxed{}.",
    "after": "End with a line that starts with `Answer:` and then has the final answer alone.",
    "last-line": "End with a line that has the final answer alone.",
    "whole": "Write the final answer alone.",
}
_OPEN, _CLOSE = "<answer>", "</answer>"
_BRACES: Final = re.compile(r"\\boxed\s*\{|\\.|[{}]", re.DOTALL)
_WORD: Final = re.compile(r"\banswer\s*:", re.IGNORECASE | re.ASCII)


def extract(completion: str, way: str, *, longest: int = LONGEST) -> str | None:
    """Return the stripped answer; None if it is missing, empty or too long."""
    found = _FINDERS[way](completion)
    if found is None:
        return None
    answer = found.strip()
    return answer if 0 < len(answer) <= longest else None


def asking(way: str) -> str:
    """Return the sentence that asks a model to answer in this way."""
    return _ASKING[way]


def written(answer: str, way: str) -> str:
    """Return an answer in the form of this way, such that `extract` returns it."""
    return {
        "tags": f"{_OPEN}{answer}{_CLOSE}",
        "boxed": f"\\boxed{{{answer}}}",
        "after": f"Answer: {answer}",
    }.get(way, answer)


def _tags(text: str) -> str | None:
    """Return the text between the last closing tag and the last opening tag before it."""
    end = text.rfind(_CLOSE)
    start = text.rfind(_OPEN, 0, end) if end >= 0 else -1
    return text[start + len(_OPEN) : end] if start >= 0 else None


def _boxed(text: str) -> str | None:
    """Return the closed box that opens last: the inner one where they are nested."""
    open_braces: list[int] = []  # where the content of a box starts, -1 for a brace that is none
    best, end = -1, -1
    for token in _BRACES.finditer(text):
        word = token.group()
        if word == "{":
            open_braces.append(-1)
        elif word.startswith("\\boxed"):
            open_braces.append(token.end())
        elif word == "}" and open_braces:
            start = open_braces.pop()
            if start > best:
                best, end = start, token.start()
    return text[best:end] if best >= 0 else None


def _after(text: str) -> str | None:
    last = None
    for last in _WORD.finditer(text):  # noqa: B007 -- the last one is what counts
        pass
    if last is None:
        return None
    lines = text[last.end() :].lstrip(" \t*").splitlines()
    return lines[0].rstrip().rstrip("*") if lines else None


def _last_line(text: str) -> str | None:
    lines = text.rstrip().splitlines()
    return lines[-1] if lines else None


_FINDERS: Final[dict[str, Callable[[str], str | None]]] = {
    "tags": _tags,
    "boxed": _boxed,
    "after": _after,
    "last-line": _last_line,
    "whole": str,
}
