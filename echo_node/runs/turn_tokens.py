"""Token ids of an environment's replies, from one rendering of the chat template.

The template is rendered once, with sentinels as the contents of the assistant's message and of the
reply. What stands between them closes the model's turn and opens the reply; what follows opens the
next turn. Ids that were drawn are never encoded again, and the reply's own text never becomes a
special or added token.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from echo_node.errors import ConfigError, ContractError
from echo_node.runs.tokenizer import Tokenizer
from protocol.manifest import Template

Ids = NDArray[np.int64]
_ASKED, _SAID, _REPLIED = (f"echo{word}sentinel7c21f0" for word in ("asked", "said", "replied"))
_ADVICE: Final = "give the model another chat template, or take a contract of one turn"


@dataclass(frozen=True, slots=True, eq=False)
class TurnTemplate:
    """Ids around a reply; `opening` begins with what closes the model's turn."""

    tokenizer: Tokenizer
    opening: Ids
    after_end: Ids
    """The opening without what a model that ended its turn has drawn itself."""
    closing: Ids
    forbidden: frozenset[int]

    def ids(self, text: str, *, ended: bool) -> Ids:
        """Return the ids of a reply; `ended` says that the end-of-turn token was drawn."""
        content = self.tokenizer.encode_content(text, self.forbidden)
        found = np.concatenate((self.after_end if ended else self.opening, content, self.closing))
        if not found.size:
            raise ContractError("a reply without a token")
        return found.astype(np.int64)

    def text(self, ids: Ids, *, ended: bool) -> str:
        """Return the text within a reply's ids; of what only a named sampler can have computed."""
        before = self.after_end if ended else self.opening
        inner = ids[before.size : ids.size - self.closing.size]
        return self.tokenizer.decode(inner, ())


def plain_template(tokenizer: Tokenizer, end_tokens: Collection[int]) -> TurnTemplate:
    """Return the form of replies to prompts that are no chat: their text alone."""
    nothing = np.array([], np.int64)
    return TurnTemplate(tokenizer, nothing, nothing, nothing, frozenset(end_tokens))


def chat_template(
    tokenizer: Tokenizer, template: Template, end: int, end_tokens: Collection[int], role: str
) -> TurnTemplate:
    """Return the ids around replies of a chat."""
    opening, closing = turn_pieces(tokenizer, template, role)
    ids = tokenizer.encode(opening)
    places = np.flatnonzero(ids == end)
    if not places.size:
        raise ConfigError(
            f"the chat template does not end an assistant's message with the token {end}", advice=_ADVICE
        )
    return TurnTemplate(
        tokenizer, ids, ids[places[0] + 1 :], tokenizer.encode(closing), frozenset(end_tokens)
    )


def end_of_turn(tokenizer: Tokenizer, template: Template, end_tokens: Collection[int], role: str) -> int:
    """Return the token with which the chat template ends an assistant's message."""
    opening, _ = turn_pieces(tokenizer, template, role)
    ids = tokenizer.encode(opening).tolist()
    found = next((each for each in ids if each in end_tokens), None)
    if found is None:
        raise ConfigError(
            "the chat template ends an assistant's message with none of the run's end tokens",
            advice="name the text that ends a turn under sampling.stop",
        )
    return int(found)


def turn_pieces(tokenizer: Tokenizer, template: Template, role: str) -> tuple[str, str]:
    """Return the template's text between an assistant's message and a reply, and after it."""
    own = {"self", "conversations", "messages", "add_generation_prompt"}
    variables: dict[str, Any] = {name: value for name, value in template.variables.items() if name not in own}
    system = [{"role": "system", "content": template.system}] if template.system else []
    messages = [
        *system,
        {"role": "user", "content": _ASKED},
        {"role": "assistant", "content": _SAID},
        {"role": role, "content": _REPLIED},
    ]
    text = tokenizer.render(messages, **variables)
    if text.count(_SAID) != 1 or text.count(_REPLIED) != 1 or text.index(_SAID) > text.index(_REPLIED):
        raise ConfigError(
            f"the chat template does not write an assistant's message and a {role}'s after it once each",
            advice=_ADVICE,
        )
    _, _, after = text.partition(_SAID)
    opening, _, closing = after.partition(_REPLIED)
    return opening, closing
