"""Token ids of an environment's replies, from one rendering of the chat template.

What stands between an assistant's message and a reply closes the model's turn and opens the reply;
what follows the reply opens the next turn. Ids that were drawn are never encoded again, and the
reply's own text never becomes a special or added token.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from echo_node.errors import ConfigError, ContractError
from echo_node.runs.chat_pieces import ChatPieces, chat_pieces
from echo_node.runs.tokenizer import Part, Tokenizer
from protocol.manifest import Template

Ids = NDArray[np.int64]
_ADVICE: Final = "give the model another chat template, or take a contract of one turn"
_PLAIN: Final = ChatPieces(("", ""), (("", ""),))


@dataclass(frozen=True, slots=True, eq=False)
class TurnTemplate:
    """Template text around a reply; `opening` first closes the model's turn."""

    tokenizer: Tokenizer
    opening: str
    after_end: str
    """The opening without what a model that ended its turn has drawn itself."""
    closing: str
    forbidden: frozenset[int]
    pieces: ChatPieces = _PLAIN

    def ids(self, text: str, *, ended: bool) -> Ids:
        """Return the ids of a reply; `ended` says that the end-of-turn token was drawn."""
        content = self.pieces.content(-1, text)
        parts = [Part(self.after_end if ended else self.opening), content, Part(self.closing)]
        found = self.tokenizer.encode_parts(parts, self.forbidden, first=False)
        if not found.size:
            raise ContractError("a reply without a token")
        return found

    def text(self, ids: Ids, *, ended: bool) -> str:
        """Return the text within a reply's ids.

        It is for replies that only a named sampler can have computed.
        """
        whole = self.tokenizer.decode(ids, ())
        return whole.removeprefix(self.after_end if ended else self.opening).removesuffix(self.closing)


def plain_template(tokenizer: Tokenizer, end_tokens: Collection[int]) -> TurnTemplate:
    """Return the form of replies to prompts that are no chat: their text alone."""
    return TurnTemplate(tokenizer, "", "", "", frozenset(end_tokens))


def chat_template(
    tokenizer: Tokenizer,
    template: Template,
    end: int,
    end_tokens: Collection[int],
    role: str,
    *,
    system: bool,
) -> TurnTemplate:
    """Return the text around replies of a chat; `system`: it has such a message."""
    pieces = turn_pieces(tokenizer, template, role, system=system)
    opening, closing = pieces.texts[-2:]
    if (after := tokenizer.text_after(opening, end)) is None:
        raise ConfigError(
            f"the chat template does not end an assistant's message with the token {end}", advice=_ADVICE
        )
    return TurnTemplate(tokenizer, opening, after, closing, frozenset(end_tokens), pieces)


def end_of_turn(
    tokenizer: Tokenizer, template: Template, end_tokens: Collection[int], role: str, *, system: bool
) -> int:
    """Return the token with which the chat template ends an assistant's message."""
    opening = turn_pieces(tokenizer, template, role, system=system).texts[-2]
    ids = tokenizer.encode(opening).tolist()
    found = next((each for each in ids if each in end_tokens), None)
    if found is None:
        raise ConfigError(
            "the chat template ends an assistant's message with none of the run's end tokens",
            advice="name the text that ends a turn under sampling.stop",
        )
    return int(found)


def turn_pieces(tokenizer: Tokenizer, template: Template, role: str, *, system: bool) -> ChatPieces:
    """Return the template's text around a prompt, an assistant's message and a reply."""
    return chat_pieces(tokenizer, template, (*(("system",) if system else ()), "user", "assistant", role))
