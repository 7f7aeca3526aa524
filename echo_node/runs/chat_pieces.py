"""Text of a chat template around message contents, and prompts made of it.

The template is rendered with sentinels as contents. Contents are put in afterwards, as text that
never becomes a special or added token: a row of data that spells `<|im_end|>` ends no message.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from echo_node.contract import Prompt
from echo_node.errors import ContractError
from echo_node.runs.thought_split import opens_thought
from echo_node.runs.tokenizer import Part, Tokenizer
from protocol.manifest import Template

_SENTINELS: Final = tuple(f"Echo{word}Sentinel7c21f0" for word in ("First", "Second", "Third", "Fourth"))
_MARKS: Final = "\"'\\<&{}"
_LEFT, _RIGHT = f"\n {_MARKS}", f"{_MARKS} \n"
"""Around a sentinel they show whether the template trims contents, and that it changes no more."""
_STRIPS: Final = {"\n ": "", " \n": "", " ": "\n", "": None}
"""What `str.strip` takes away, by the white space that the template leaves."""
_OWN: Final = frozenset({"self", "conversations", "messages", "add_generation_prompt"})


@dataclass(frozen=True, slots=True)
class ChatPieces:
    """Template texts before, between and after contents, and what is stripped."""

    texts: tuple[str, ...]
    strips: tuple[tuple[str | None, str | None], ...]

    def content(self, number: int, text: str) -> Part:
        """Return a message's content, stripped as the template does."""
        left, right = self.strips[number]
        return Part(text.lstrip(left).rstrip(right), is_content=True)

    def parts(self, contents: Sequence[str]) -> list[Part]:
        """Return the conversation with these contents."""
        found = [Part(self.texts[0])]
        for number, text in enumerate(contents):
            found += [self.content(number, text), Part(self.texts[number + 1])]
        return found


def chat_pieces(tokenizer: Tokenizer, template: Template, roles: Sequence[str]) -> ChatPieces:
    """Return the template's own text around messages of these roles.

    It includes the generation prompt. Refuses a template that does not write each content once, in
    order, and unchanged but for white space at its ends.
    """
    _check_variables(tokenizer, list(template.variables.values()))
    variables = {name: value for name, value in template.variables.items() if name not in _OWN}
    bare = [
        {"role": role, "content": sentinel}
        for role, sentinel in zip(roles, _SENTINELS[: len(roles)], strict=True)
    ]
    padded = [each | {"content": _LEFT + each["content"] + _RIGHT} for each in bare]
    drawn = [role == "assistant" for role in roles]  # drawn ids are never written again
    probe = [old if is_drawn else new for old, new, is_drawn in zip(bare, padded, drawn, strict=True)]
    text, probed = tokenizer.render_all([bare, probe], **variables)
    sentinels = "(.*)".join(("", *_SENTINELS[: len(roles)], ""))
    found = re.fullmatch(sentinels, text, re.DOTALL)
    if found is None or any(text.count(each["content"]) != 1 for each in bare):
        raise _refused(roles, "once each")
    texts = found.groups()
    around = (r"((?:\n | )?)" + re.escape(_MARKS), re.escape(_MARKS) + r"((?: \n| )?)")
    pattern = re.escape(texts[0])
    for each, is_drawn, after in zip(bare, drawn, texts[1:], strict=True):
        left, right = ("()", "()") if is_drawn else around
        pattern += left + each["content"] + right + re.escape(after)
    if (kept := re.fullmatch(pattern, probed)) is None:
        raise _refused(roles, "as they are")
    spaces = [
        (None, None) if is_drawn else (kept[2 * at + 1], kept[2 * at + 2])
        for at, is_drawn in enumerate(drawn)
    ]
    strips = tuple((_STRIPS[left or ""], _STRIPS[right or ""]) for left, right in spaces)
    return ChatPieces(tuple(texts), strips)


class ChatPrompts:
    """Token ids and texts of a run's first prompts, by its template settings."""

    def __init__(self, tokenizer: Tokenizer, template: Template) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._pieces: dict[bool, ChatPieces] = {}

    def ids(self, prompt: Prompt) -> NDArray[np.int64]:
        """Return the ids of a prompt; contents of a chat yield no special ones.

        Only the template yields special or added ids there.
        """
        if not self.is_chat(prompt):
            return self._tokenizer.encode(prompt.text)
        return self._tokenizer.encode_parts(self._parts(prompt))

    def text(self, prompt: Prompt) -> str:
        """Return the text that the model reads."""
        return "".join(each.text for each in self._parts(prompt)) if self.is_chat(prompt) else prompt.text

    def opens_thought(self, prompt: Prompt) -> bool:
        """Return whether a prompt ends inside a thought; contents of a chat open none."""
        return opens_thought(self._parts(prompt)[-1].text if self.is_chat(prompt) else prompt.text)

    def is_chat(self, prompt: Prompt) -> bool:
        """Return whether the model reads a prompt through its chat template."""
        return self._template.chat or prompt.chat

    def system(self, prompt: Prompt) -> str:
        """Return the system message: the run's own, else the contract's."""
        return self._template.system or prompt.system

    def _parts(self, prompt: Prompt) -> list[Part]:
        system = self.system(prompt)
        if (found := self._pieces.get(bool(system))) is None:
            roles = ("system", "user") if system else ("user",)
            found = self._pieces[bool(system)] = chat_pieces(self._tokenizer, self._template, roles)
        return found.parts((system, prompt.text) if system else (prompt.text,))


def _check_variables(tokenizer: Tokenizer, value: Any) -> None:
    """Refuse values of a template that would become special or added tokens."""
    if isinstance(value, dict):
        for each in (*value, *value.values()):
            _check_variables(tokenizer, each)
    elif isinstance(value, list | tuple):
        for each in value:
            _check_variables(tokenizer, each)
    elif isinstance(value, str) and (name := tokenizer.added_in(value)) is not None:
        raise ContractError(
            f"a variable of the chat template spells {name!r}, which only the template may write",
            advice="leave it out of the table template",
        )


def _refused(roles: Sequence[str], how: str) -> ContractError:
    return ContractError(
        f"the chat template does not write messages of {', '.join(roles)} in this order and {how}",
        advice="give the model another chat template",
    )
