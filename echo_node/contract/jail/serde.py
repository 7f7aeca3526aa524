"""Serialization of prompts for the jail's pipe, with a bound on their size."""

from __future__ import annotations

from typing import Any, Final

from echo_node.contract.api import Prompt

TEMPLATE: Final = "chat-template"
"""Name of a jail that renders the template in its parameters and has no contract."""
TEXT_BYTES: Final = 2**20
"""Most bytes of one completion, and of one prompt with its system text and data."""


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


def prompt_bytes(prompt: Prompt) -> int:
    """Return the prompt's size in UTF-8 bytes; raise `UnicodeEncodeError` for lone surrogates."""
    texts = [prompt.text, prompt.system, *prompt.data.keys(), *prompt.data.values()]
    return sum(len(text.encode()) for text in texts)
