"""Separate a completion's thought from its answer.

Models that think write `<think>…</think>` before they answer; some chat templates open the thought
at the end of the prompt. Only what follows the last `</think>` is an answer. A thought that the
token limit cut short has none.
"""

from __future__ import annotations

from typing import Final

OPEN: Final = "<think>"
CLOSE: Final = "</think>"


def opens_thought(prompt: str) -> bool:
    """Return whether a rendered prompt ends inside a thought."""
    return prompt.rfind(OPEN) > prompt.rfind(CLOSE)


def answer_of(completion: str, *, opened: bool) -> str | None:
    """Return what follows the thought; None if a thought was begun and not ended."""
    end = completion.rfind(CLOSE)
    if opened or OPEN in completion:
        thought = completion.rfind(OPEN)
        if end < 0 or thought > end:
            return None
    return completion[end + len(CLOSE) :].lstrip() if end >= 0 else completion
