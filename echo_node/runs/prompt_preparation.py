"""Prepare the prompts of a new run: data set, chat template and token limits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from echo_node.contract import Contract, Prompt, load, prompt_of
from echo_node.contract.data_rows import rows_of
from echo_node.errors import ConfigError, ContractError, boundary
from echo_node.models.folder import read_model_config
from echo_node.models.progress import Progress
from echo_node.runs.chat_pieces import ChatPrompts
from echo_node.runs.data_source import read_source
from echo_node.runs.dataset import DataTable, Row, check_rows, cut, describe, write_rows
from echo_node.runs.model_description import context_of
from echo_node.runs.prompt_lengths import Lengths
from echo_node.runs.tokenizer import Tokenizer
from echo_node.runs.turn_settings import choose_turns
from protocol import limits, public_key_of
from protocol.digest import derive
from protocol.manifest import DataSet, Template, Turns

if TYPE_CHECKING:
    from echo_node.runs.spec import RunSpec

EMBEDDED: Final = "embedded"
EMBEDDED_GUESS: Final = "embedded-guess"
"""The embedded model that guesses numbers."""
_SAMPLE: Final = 64
"""Prompts of a contract without data that are measured."""
_AT_ONCE: Final = 256
"""Rows that are rendered in one call."""


@dataclass(frozen=True, slots=True)
class Prompts:
    """A run's contract with its data, and limits of prompts and completions."""

    contract: Contract
    data: bytes | None
    described: DataSet | None
    max_prompt: int
    max_tokens: int
    turns: Turns | None = None


def template_of(spec: RunSpec) -> Template:
    """Return the manifest's template settings."""
    table = spec.template
    tools = {"tools": table.tools} if table.tools else {}
    with boundary(
        ConfigError, "reading the table template", advice="see its variables and its system message"
    ):
        return Template(
            chat=spec.chat,
            system=table.system,
            thinking=table.thinking,
            variables={**table.variables, **tools},
        )


def prepare_prompts(
    spec: RunSpec,
    name: str,
    version: str,
    folder: Path,
    nonce: bytes,
    progress: Progress,
    note: Callable[[str], None],
) -> Prompts:
    """Load the contract with its data; leave out prompts over the limit."""
    with closing(Tokenizer.from_folder(folder)) as tokenizer:
        measure = Measure(tokenizer, template_of(spec), progress)
        context = context_of(read_model_config(folder))
        contract = None if spec.data else load(name, version, spec.params)
        turns = None if contract is None else _turns(spec, contract, folder, nonce, measure)
        if turns is not None and spec.sampling.max_tokens is None:
            whole = min(turns.most * turns.tokens + turns.environment, limits.TOKENS)
            sampling = spec.sampling.model_copy(update={"max_tokens": whole})
            spec = spec.model_copy(update={"sampling": sampling})
        found = _prepare(spec, name, version, context, nonce, measure, note)
        return dataclasses.replace(found, turns=turns)


def _turns(spec: RunSpec, contract: Contract, folder: Path, nonce: bytes, measure: Measure) -> Turns | None:
    keys = [derive("measured prompt", nonce, number.to_bytes(8, "big")) for number in range(_SAMPLE)]
    with boundary(ConfigError, "reading turns.samplers", advice="give peer ids: echo-node keys show"):
        samplers = [public_key_of(each) for each in (spec.turns.samplers if spec.turns else ())]
    return choose_turns(
        spec.turns,
        contract,
        [prompt_of(contract, key) for key in keys],
        folder,
        measure.tokenizer,
        measure.template,
        stop=spec.sampling.stop,
        samplers=samplers,
        exact=spec.model in {EMBEDDED, EMBEDDED_GUESS},
    )


def _prepare(
    spec: RunSpec,
    name: str,
    version: str,
    context: int,
    nonce: bytes,
    measure: Measure,
    note: Callable[[str], None],
) -> Prompts:
    if spec.data is None:
        contract = load(name, version, spec.params)
        lengths = measure.sample(contract, nonce)
        max_prompt, max_tokens = _choose(spec, lengths, context)
        lengths.check(max_prompt, name)
        if spec.model not in {EMBEDDED, EMBEDDED_GUESS}:
            note(f"{lengths.describe()}; max_prompt {max_prompt}, max_tokens {max_tokens}")
        return Prompts(contract, None, None, max_prompt, max_tokens)
    rows = check_rows(read_source(spec.data.source, spec.data.split), spec.data)
    lengths = measure.rows(_contract(spec, name, version, rows), rows)
    max_prompt, max_tokens = _choose(spec, lengths, context)
    lengths.check(max_prompt, name)
    kept = [row for row, length in zip(rows, lengths.prompts, strict=True) if length <= max_prompt]
    if len(kept) < len(rows):
        note(f"{len(rows) - len(kept)} of {len(rows)} prompts are over {max_prompt} tokens and left out")
    train, held_out = _cut(kept, nonce, spec.data)
    data = write_rows(train, held_out)
    described = describe(data, len(held_out))
    note(f"{lengths.describe()}; max_prompt {max_prompt}, max_tokens {max_tokens}")
    note(f"{len(train)} rows to train on, {len(held_out)} held out")
    contract = load(name, version, spec.params, rows_of(data, described.rows, described.held_out, "train"))
    return Prompts(contract, data, described, max_prompt, max_tokens)


def _choose(spec: RunSpec, lengths: Lengths, context: int) -> tuple[int, int]:
    return lengths.choose(
        context,
        max_prompt=spec.sampling.max_prompt,
        max_tokens=spec.sampling.max_tokens,
        thinking=spec.template.thinking,
        exact=spec.model in {EMBEDDED, EMBEDDED_GUESS} and spec.data is None,
    )


def _cut(rows: Sequence[Row], nonce: bytes, table: DataTable) -> tuple[list[Row], list[Row]]:
    train, held_out = cut(rows, nonce, table.held_out)
    if not train:
        raise ConfigError(
            f"all {len(rows)} rows of {table.source} are held out",
            advice="give more rows, or lower data.held_out",
        )
    return train, held_out


def _contract(spec: RunSpec, name: str, version: str, rows: Sequence[Row]) -> Contract:
    return load(name, version, spec.params, rows_of(write_rows(rows, ()), len(rows), 0, "train"))


@dataclass(frozen=True, slots=True)
class Measure:
    """Counts tokens as the model reads them."""

    tokenizer: Tokenizer
    template: Template
    progress: Progress

    def rows(self, contract: Contract, rows: Sequence[Row]) -> Lengths:
        """Measure the prompt and the answer of every row."""
        lengths, answers = [], []
        for start in range(0, len(rows), _AT_ONCE):
            some = rows[start : start + _AT_ONCE]
            with boundary(ContractError, f"{contract.name}: making the prompt of a row"):
                prompts = [
                    contract.row_prompt({"problem": row.problem, "answer": row.answer}) for row in some
                ]
            lengths += self._tokens(prompts)
            answers += [len(self.tokenizer.encode(row.worked)) for row in some]
            self.progress("measuring prompts", start, len(rows))
        return Lengths(lengths, answers, complete=True)

    def sample(self, contract: Contract, nonce: bytes) -> Lengths:
        """Measure some prompts that a contract generates, and its own answers to them."""
        keys = [derive("measured prompt", nonce, number.to_bytes(8, "big")) for number in range(_SAMPLE)]
        prompts = [prompt_of(contract, key) for key in keys]
        with boundary(ContractError, f"{contract.name}: answering its own prompt"):
            answers = [len(self.tokenizer.encode(contract.answer(each))) for each in prompts]
        return Lengths(self._tokens(prompts), answers, complete=False)

    def _tokens(self, prompts: Sequence[Prompt]) -> list[int]:
        known = ChatPrompts(self.tokenizer, self.template)
        return [known.ids(each).size for each in prompts]
