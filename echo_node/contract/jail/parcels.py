"""Prompts as they go through the pipe, and how large they may be. It knows nothing of the pipe itself."""

from __future__ import annotations

from typing import Any, Final

from echo_node.contract.api import Prompt

TEXT_BYTES: Final = 2**20
"""Bytes of one completion, and of one prompt with all that belongs to it."""


def pack_prompt(prompt: Prompt) -> list[Any]:
    """A prompt as a list of plain values."""
    return [prompt.text, dict(prompt.data), prompt.system, prompt.chat]


def unpack_prompt(packed: object) -> Prompt:
    """The prompt, if that is one; a `ValueError` if not."""
    match packed:
        case [str(text), dict(data), str(system), bool(chat)]:
            if all(type(one) is str for one in [*data.keys(), *data.values()]):
                return Prompt(text, data, system, chat)
    raise ValueError("that is no prompt of texts")


def prompt_bytes(prompt: Prompt) -> int:
    """How large it is. A text that is no Unicode is a `UnicodeEncodeError`."""
    texts = [prompt.text, prompt.system, *prompt.data.keys(), *prompt.data.values()]
    return sum(len(text.encode()) for text in texts)
