"""Table `[turns]` of a run's file: environment limits, measured by default."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from pydantic import BaseModel, ConfigDict, Field

from echo_node.contract import Contract, Prompt, play
from echo_node.contract.api import own_answer, script_of
from echo_node.errors import ConfigError
from echo_node.models.folder import read_model_config
from echo_node.runs.chat_pieces import ChatPrompts
from echo_node.runs.model_description import end_tokens
from echo_node.runs.tokenizer import Tokenizer
from echo_node.runs.turn_tokens import TurnTemplate, chat_template, end_of_turn, plain_template
from protocol import limits
from protocol.manifest import Template, Turns

_ROOM: Final = 2.0
"""Tokens of a turn for each of the contract's own longest one."""
_LEAST_TOKENS: Final = 32
_MARGIN: Final = 1.25
"""Of replies: those to the contract's own turns need not be the longest."""


class TurnsTable(BaseModel):
    """Limits of episodes, for contracts that answer the model."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    most: int = Field(default=4, ge=1, le=limits.TURNS)
    """Turns of a completion."""
    tokens: int | None = Field(default=None, ge=1, le=limits.TOKENS)
    """Most tokens of a turn; by the contract's own turns if left out."""
    environment: int | None = Field(default=None, ge=1, le=limits.TOKENS)
    """Most tokens of all replies together; by the contract's own replies if left out."""
    samplers: list[str] = Field(default_factory=list, max_length=limits.KEYS)
    """Peer ids that alone may sample, where replies cannot be recomputed; anybody if empty."""


def choose_turns(
    table: TurnsTable | None,
    contract: Contract,
    prompts: Sequence[Prompt],
    folder: Path,
    tokenizer: Tokenizer,
    template: Template,
    *,
    stop: Sequence[str],
    samplers: Sequence[bytes],
    exact: bool,
) -> Turns | None:
    """Return the manifest's settings of turns; None for a contract of one turn.

    `exact` leaves no room beyond the longest turn, for models that write nothing else.
    """
    if not contract.has_environment:
        if table is not None:
            raise ConfigError(
                f"turns: {contract.name} does not answer the model", advice="leave the table turns out"
            )
        return None
    if not contract.replayable and not samplers:
        raise ConfigError(
            f"turns.samplers: nobody can recompute the replies of {contract.name}",
            advice="name the peer ids that may sample",
        )
    table = table or TurnsTable()
    ends = end_tokens(folder, read_model_config(folder), stop)
    known = ChatPrompts(tokenizer, template)
    if (asked := next((each for each in prompts if known.is_chat(each)), None)) is not None:
        system = bool(known.system(asked))
        end = end_of_turn(tokenizer, template, ends, contract.role, system=system)
        around = chat_template(tokenizer, template, end, ends, contract.role, system=system)
    else:
        own = [tokenizer.stop_token(text) for text in stop] or sorted(tokenizer.end_tokens & set(ends))
        end = own[0] if own else ends[0]
        around = plain_template(tokenizer, ends)
    turn, replies = _measured(contract, prompts, tokenizer, around, table.most)
    tokens = table.tokens or (turn if exact else max(_LEAST_TOKENS, int(_ROOM * turn)))
    environment = table.environment or (replies if exact else int(_MARGIN * replies))
    return Turns(
        end=end,
        environment=max(1, environment),
        most=table.most,
        role=contract.role,
        samplers=tuple(sorted(samplers)),
        tokens=tokens,
    )


def _measured(
    contract: Contract, prompts: Sequence[Prompt], tokenizer: Tokenizer, around: TurnTemplate, most: int
) -> tuple[int, int]:
    """Return the longest turn and the most reply tokens of the contract's own play."""
    turn = reply = 1
    for prompt in prompts:
        turns, _ = play(contract, prompt, script_of(own_answer(contract, prompt, most)))
        turn = max(turn, *(len(tokenizer.encode_content(each.text)) + 1 for each in turns))
        lengths = [around.ids(each.reply, ended=False).size for each in turns if each.reply is not None]
        reply = max([reply, *lengths])
    return turn, reply * max(1, most - 1)
