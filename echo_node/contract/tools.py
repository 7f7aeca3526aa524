"""Tool calls in a model's turn: parse, run deterministic tools, format results.

Calls are JSON in `<tool_call>` tags, as Qwen and Hermes write them, or for small models a plain
line `name: argument`. Tools are pure: the same call has the same result on every machine. A
malformed call is answered in words of our own, never in Python's, which differ by version.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

OPEN: Final = "<tool_call>"
CLOSE: Final = "</tool_call>"
LONGEST_CALL: Final = 4_096
"""Most characters of one call."""
LONGEST_RESULT: Final = 2_048
"""Most characters of a result; the rest is cut off."""

Tool = Callable[[Mapping[str, Any]], str]
"""Takes the arguments of a call; raises `ToolError` in words for the model."""


class ToolError(Exception):
    """A call that has no result, in one sentence for the model."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call: the tool's name and its arguments."""

    name: str
    arguments: Mapping[str, Any]


def find_call(text: str) -> ToolCall | None:
    """Return the first call in tags, or None; raise `ToolError` if it is malformed."""
    start = text.find(OPEN)
    if start < 0:
        return None
    end = text.find(CLOSE, start)
    if end < 0:
        raise ToolError("the tool call has no end")
    body = text[start + len(OPEN) : end]
    if len(body) > LONGEST_CALL:
        raise ToolError("the tool call is too long")
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        raise ToolError("the tool call is no JSON") from None
    match found:
        case {"name": str(name), "arguments": dict(arguments)}:
            return ToolCall(name, arguments)
    raise ToolError('the tool call is no object with "name" and "arguments"')


_PLAIN: Final = re.compile(r"^[ \t]*([a-z]+):[ \t]*(\S[^\n]*)$", re.MULTILINE)


def find_plain_call(text: str, names: Mapping[str, str]) -> ToolCall | None:
    """Return the first line `name: argument` with a known name, as a call.

    `names` has the name of each tool's one argument.
    """
    for match in _PLAIN.finditer(text[:LONGEST_CALL]):
        if match[1] in names:
            return ToolCall(match[1], {names[match[1]]: match[2].strip()})
    return None


def run_call(call: ToolCall, tools: Mapping[str, Tool]) -> str:
    """Return the result of a call, or what is wrong with it, in words for the model."""
    if call.name not in tools:
        return f"error: there is no tool {call.name[:64]!a}, only {', '.join(sorted(tools))}"
    try:
        return tools[call.name](call.arguments)[:LONGEST_RESULT]
    except ToolError as error:
        return f"error: {error}"
