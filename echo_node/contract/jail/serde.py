"""Serialisation of prompts and turns for the jail's pipe, with bounded size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from echo_node.contract.api import Prompt, Turn

TEMPLATE: Final = "chat-template"
"""Name of a jail that renders the template in its parameters and has no contract."""
TEXT_BYTES: Final = 2**20
"""Most bytes of one completion or its turns, and of one prompt with its system text and data."""


def pack_prompt(prompt: Prompt) -> list[Any]:
    """Return a prompt as a list of plain values."""
    return [prompt.text, dict(prompt.data), prompt.system, prompt.chat]


def unpack_prompt(packed: object) -> Prompt:
    """Return the packed prompt; raise `ValueError` if it is malformed."""
    match packed:
        case [str(text), dict(data), str(system), bool(chat)]:
            if all(type(one) is str for one in [*data.keys(), *data.values()]):
                return Prompt(text, data, system, chat)
    raise ValueError("a packed prompt that is malformed")


def pack_turns(turns: Sequence[Turn]) -> list[Any]:
    """Return turns as a list of plain values."""
    return [[turn.text, turn.reply] for turn in turns]


def unpack_turns(packed: object) -> list[Turn]:
    """Return the packed turns; raise `ValueError` if they are malformed."""
    found: list[Turn] = []
    for each in packed if isinstance(packed, list) else [None]:
        match each:
            case [str(text), str() | None as reply]:
                found.append(Turn(text, reply))
            case _:
                raise ValueError("packed turns that are malformed")
    return found


def turns_bytes(turns: Sequence[Turn]) -> int:
    """Return the size of turns in UTF-8 bytes.

    Raise `UnicodeEncodeError` for lone surrogates.
    """
    return sum(len(turn.text.encode()) + len((turn.reply or "").encode()) for turn in turns)


def prompt_bytes(prompt: Prompt) -> int:
    """Return the prompt's size in UTF-8 bytes.

    Raise `UnicodeEncodeError` for lone surrogates.
    """
    texts = [prompt.text, prompt.system, *prompt.data.keys(), *prompt.data.values()]
    return sum(len(text.encode()) for text in texts)
