"""A run that is open: the manifest with its contract, tokenizer and limits.

An operator drafts a manifest from a model's folder and a contract; everyone else opens one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from echo_node.contract import (
    Contract,
    Prompt,
    Reply,
    Score,
    Turn,
    check_vectors,
    contract_vectors,
    load,
    prompt_of,
    reply_of,
    score_of,
)
from echo_node.contract.code_folder import WHEELS, check_installed, open_code
from echo_node.contract.data_rows import Part, read_rows
from echo_node.contract.jail import Layer
from echo_node.contract.jail.required import REQUIRED
from echo_node.contract.jail.worker import DataFile, Failed
from echo_node.contract.registry import entry_of, is_built_in
from echo_node.contract.sandbox import JailedContract, load_jailed, score_or_zero
from echo_node.contract.wheel_reader import file_of
from echo_node.engine.base import SamplingLimits
from echo_node.errors import ConfigError, ContractError, DefectError, boundary
from echo_node.models.adapter import map_weights
from echo_node.models.progress import Progress, no_progress
from echo_node.net.blobs.blob_registry import InFile
from echo_node.runs.adapter_folder import base_files, check_adapter_folder, describe_adapter
from echo_node.runs.algorithm import check_ranges
from echo_node.runs.chat_pieces import ChatPrompts
from echo_node.runs.dataset import FILE as DATA_FILE
from echo_node.runs.model_description import describe_model
from echo_node.runs.thought_split import answer_of
from echo_node.runs.tokenizer import Tokenizer
from echo_node.runs.turn_tokens import TurnTemplate, chat_template, plain_template
from echo_node.weights.tensors import State, from_mapped
from protocol import Identity, Manifest, Opened, Rules, blob_id, open_manifest, sampling, seal
from protocol.digest import ZERO, derive
from protocol.manifest import (
    Algorithm,
    ContractPin,
    DataSet,
    EngineTolerance,
    Joins,
    Sampling,
    Sync,
    Template,
    Terms,
    Turns,
    Verification,
    Wheel,
)
from protocol.turns import TurnRules

Scorable: TypeAlias = NDArray[np.int64] | Sequence[Turn]
"""Ids of a completion, or its turns in a run with an environment."""


@dataclasses.dataclass(frozen=True)
class Run:
    """A manifest with everything that it names opened."""

    sealed_manifest: Opened[Manifest]
    folder: Path
    contract: Contract
    tokenizer: Tokenizer
    data: Path | None = None
    """File of the data set, if the run has one."""
    wheels: Path | None = None
    """Folder of the wheels of the contract's code, if they travel with the run."""

    @classmethod
    def open(
        cls,
        sealed: bytes,
        folder: Path,
        *,
        jailed: bool = True,
        require: Sequence[str] = REQUIRED,
        data: Path | None = None,
        part: Part = "train",
        wheels: Path | None = None,
    ) -> Run:
        """Open a manifest, and check the model's small files in a folder against it.

        The contract runs in a sandbox, since completions are untrusted text; `jailed=False` is
        for its author. `require` names the layers of the jail without which it does not run.
        `data` is the file of the run's data set, by default beside the folder; `part` is what
        prompts are drawn from, held-out rows for evaluation alone. `wheels` is the folder of the
        wheels that travel with the run, by default beside the model's.
        """
        manifest = open_manifest(sealed)
        message = manifest.message
        for file in message.model.files:
            path = folder / file.name
            if not path.is_file() or blob_id(path.read_bytes()) != file.blob:
                raise ConfigError(
                    f"{path} is not the {file.name} that the manifest names",
                    advice="give the run's own model with --model",
                )
        check_adapter_folder(folder, message.model.adapter)
        data_file = _data_file(message, data or folder.parent / DATA_FILE, part)
        packages = (wheels or folder.parent / WHEELS) if message.contract.wheel else None
        contract = _load_contract(message, data_file, packages, require if jailed else None)
        if contract.has_environment != (message.turns is not None):
            raise ContractError(
                f"{contract.name} {contract.version} answers"
                f" {'turns' if contract.has_environment else 'nothing'}, and the manifest says otherwise",
                advice="its author can make the run anew: echo-node run new",
            )
        if part == "train":
            check_vectors(contract, message.contract.vectors)
        place = data_file.path if data_file else None
        return cls(manifest, folder, contract, Tokenizer.from_folder(folder), place, packages)

    @property
    def id(self) -> bytes:
        return self.sealed_manifest.id

    @property
    def manifest(self) -> Manifest:
        """The manifest's message."""
        return self.sealed_manifest.message

    @property
    def rules(self) -> Rules:
        return Rules.of(self.sealed_manifest)

    @property
    def limits(self) -> SamplingLimits:
        """Limits that every completion of this run is sampled with."""
        manifest = self.manifest
        return SamplingLimits(
            max_tokens=manifest.sampling.max_tokens,
            temperature=manifest.sampling.temperature,
            end_tokens=frozenset(manifest.model.end_tokens),
            vocab_size=manifest.model.vocab_size,
        )

    @cached_property
    def turn_rules(self) -> TurnRules | None:
        """Rules of the run's turns; None if it has no environment."""
        return TurnRules.of(self.manifest)

    @property
    def has_claims(self) -> bool:
        """Return whether samplers claim rewards: the contract is known to be pure."""
        return self.manifest.contract.pure

    def is_async(self, version: int) -> bool:
        """Return whether samplers push on their own at this version, or wait for requests."""
        start = self.manifest.sync.async_from
        return start is not None and version >= start

    def slot_key(self, head_id: bytes, sampler: bytes, slot: int) -> bytes:
        return sampling.slot_key(self.id, head_id, sampler, slot)

    def prompt(self, slot_key: bytes) -> tuple[Prompt, NDArray[np.int64]]:
        """Return a slot's prompt and its token ids."""
        return self.prompts([slot_key])[0]

    def prompts(
        self, slot_keys: Sequence[bytes], *, held_out: bool = False
    ) -> list[tuple[Prompt, NDArray[np.int64]]]:
        """Return the prompts of slots; many in one call cost little more than one.

        `held_out` prompts are for evaluation: the contract never gives them to a slot.
        """
        keys = [sampling.prompt_key(key) for key in slot_keys]
        if isinstance(self.contract, JailedContract):
            found = self.contract.sandbox.prompts(keys, held_out=held_out)
        else:
            found = [prompt_of(self.contract, key, held_out=held_out) for key in keys]
        return [(prompt, self.chat_prompts.ids(prompt)) for prompt in found]

    def ids_of(self, prompt: Prompt) -> NDArray[np.int64]:
        """Return the token ids of a prompt."""
        return self.chat_prompts.ids(prompt)

    @cached_property
    def chat_prompts(self) -> ChatPrompts:
        """Prompts as the model reads them, by its chat template where the run says so."""
        return ChatPrompts(self.tokenizer, self.manifest.template)

    def replies(self, episodes: Sequence[tuple[Prompt, Sequence[Turn]]]) -> list[Reply | Failed]:
        """Return the environment's answers; many in one call cost little more than one."""
        if isinstance(self.contract, JailedContract):
            return self.contract.sandbox.replies(episodes)
        return [reply_of(self.contract, prompt, turns) for prompt, turns in episodes]

    def turn_text(self, prompt: Prompt, ids: NDArray[np.int64]) -> str:
        """Return a turn's text for the environment, without end token or thought."""
        text = self.tokenizer.decode(ids, self.limits.end_tokens)
        if not self.manifest.template.thinking:
            return text
        return answer_of(text, opened=self.chat_prompts.opens_thought(prompt)) or ""

    def reply_ids(self, prompt: Prompt, text: str, *, ended: bool) -> NDArray[np.int64]:
        """Return the token ids of a reply; `ended`: its turn's end token was drawn."""
        return self.turn_template(prompt).ids(text, ended=ended)

    def turn_template(self, prompt: Prompt) -> TurnTemplate:
        """Return the ids around replies to this prompt."""
        return self._plain_turns if not self.chat_prompts.is_chat(prompt) else self._chat_turns(prompt)

    def _chat_turns(self, prompt: Prompt) -> TurnTemplate:
        turns, has_system = self.manifest.turns, bool(self.chat_prompts.system(prompt))
        if turns is None:
            raise DefectError("a reply in a run without an environment")
        known = self._turn_templates
        if has_system not in known:
            ends = self.manifest.model.end_tokens
            form = (self.manifest.template, turns.end, ends, turns.role)
            known[has_system] = chat_template(self.tokenizer, *form, system=has_system)
        return known[has_system]

    @cached_property
    def _turn_templates(self) -> dict[bool, TurnTemplate]:
        """Text around replies of a chat, without a system message and with one."""
        return {}

    @cached_property
    def _plain_turns(self) -> TurnTemplate:
        return plain_template(self.tokenizer, self.manifest.model.end_tokens)

    def renew(self) -> None:
        """Make later calls of the contract use jail processes that have seen no text."""
        if isinstance(self.contract, JailedContract):
            self.contract.sandbox.renew()

    def score(self, prompt: Prompt, ids: NDArray[np.int64]) -> Score:
        """Score a completion; a last end token is no part of the answer."""
        return self.scores(prompt, [ids])[0]

    def scores(self, prompt: Prompt, completions: Sequence[Scorable]) -> list[Score]:
        """Score completions of a prompt; one that crashes its scorer scores lowest.

        A completion is its ids, or with an environment its turns.
        """
        return [score_or_zero(each, self.contract.low) for each in self.results(prompt, completions)]

    def results(self, prompt: Prompt, completions: Sequence[Scorable]) -> list[Score | Failed]:
        """Score completions, with failures as such: they may be this machine's fault."""
        episodes = [each for each in completions if not isinstance(each, np.ndarray)]
        if self.manifest.turns is not None:
            if len(episodes) != len(completions):
                raise DefectError("a completion without its turns, in a run with an environment")
            return self._scored([(prompt, turns) for turns in episodes])
        texts = [
            self.tokenizer.decode(ids, self.limits.end_tokens)
            for ids in completions
            if isinstance(ids, np.ndarray)
        ]
        if not self.manifest.template.thinking:
            return self._scored([(prompt, text) for text in texts])
        opened = self.chat_prompts.opens_thought(prompt)
        answers = [answer_of(text, opened=opened) for text in texts]
        scored = iter(self._scored([(prompt, answer) for answer in answers if answer is not None]))
        truncated = Score(self.contract.low, "truncated: the thought has no end")
        return [truncated if answer is None else next(scored) for answer in answers]

    def _scored(self, texts: Sequence[tuple[Prompt, str | Sequence[Turn]]]) -> list[Score | Failed]:
        if isinstance(self.contract, JailedContract):
            return self.contract.sandbox.scores(texts)
        return [score_of(self.contract, prompt, text) for prompt, text in texts]

    def fresh_results(self, prompt: Prompt, completions: Sequence[Scorable]) -> list[Score | Failed]:
        """Score completions in a jail process that has seen no text before."""
        self.renew()
        return self.results(prompt, completions)

    def files(self) -> dict[bytes, InFile]:
        """Return the files to serve to newcomers by hash.

        They are the model's small files, the data set and the wheels.
        """
        found = {file.blob: InFile(self.folder / file.name, file.size) for file in self.manifest.model.files}
        if self.manifest.model.adapter is not None:
            found |= base_files(self.folder)
        if self.data:
            found |= {each.blob: InFile(self.data, each.size) for each in self.manifest.data}
        if self.wheels:
            wheels = self.manifest.contract.wheel or ()
            found |= {each.blob: InFile(self.wheels / file_of(each), each.size) for each in wheels}
        return found

    def for_evaluation(self) -> Run:
        """Return the run with prompts of its held-out rows; without a data set, itself."""
        if not any(each.held_out for each in self.manifest.data):
            return self
        jailed = isinstance(self.contract, JailedContract)
        return Run.open(
            self.sealed_manifest.sealed,
            self.folder,
            jailed=jailed,
            data=self.data,
            part="held-out",
            wheels=self.wheels,
        )

    def jail(self) -> list[Layer]:
        """Return the layers of the contract's jail; none if it is not jailed."""
        return self.contract.sandbox.layers() if isinstance(self.contract, JailedContract) else []

    def close(self) -> None:
        """End the contract's processes."""
        if isinstance(self.contract, JailedContract):
            self.contract.close()
        self.tokenizer.close()


def _data_file(message: Manifest, path: Path, part: Part) -> DataFile | None:
    """Return the file of a run's data set; refuse one of another hash."""
    if not message.data:
        return None
    wanted = message.data[0]
    if not path.is_file() or path.stat().st_size != wanted.size or blob_id(path.read_bytes()) != wanted.blob:
        raise ConfigError(
            f"{path} is not the data set that the manifest names",
            advice="join by the run's link, which fetches it, or give the run's own folder",
        )
    return DataFile(path, wanted.rows, wanted.held_out, part)


def _load_contract(
    message: Manifest, data: DataFile | None, wheels: Path | None, require: Sequence[str] | None
) -> Contract:
    """Load the contract in a jail with these layers.

    Its author loads it in this process.
    """
    named = message.contract
    if named.wheel is None and not is_built_in(named.name, named.version):
        entry_of(named.name, named.version)  # an error of its own where it is not installed
        raise ContractError(
            f"the run pins no package for {named.name} {named.version}, which is not built in here",
            advice="its author can make the run anew: echo-node run new",
        )
    if require is not None:
        code = open_code(named.wheel, wheels) if named.wheel and wheels else None
        pinned = {"require": require, "code": code, "data": data}
        return load_jailed(named.name, named.version, named.params, **pinned)
    if named.wheel is not None:
        check_installed(named)
    rows = read_rows(data.path, data.rows, data.held_out, data.part) if data else ()
    return load(named.name, named.version, named.params, rows)


def _tolerance(
    engine: str, *, d_mean: float, d_most: float, gap_most: float, z_mean: float, z_most: float
) -> EngineTolerance:
    return EngineTolerance(
        d_mean=d_mean,
        d_most=d_most,
        engine=engine,
        gap_most=gap_most,
        share=1.0,
        z_mean=z_mean,
        z_most=z_most,
    )


ENGINES: Final = (
    _tolerance("llama/f16", d_mean=3e-4, d_most=0.019, gap_most=0.25, z_mean=0.006, z_most=0.17),
    _tolerance("llama/f32", d_mean=1e-5, d_most=1e-3, gap_most=2e-3, z_mean=1e-4, z_most=1e-2),
    _tolerance("torch/f32", d_mean=1e-5, d_most=1e-3, gap_most=2e-3, z_mean=1e-4, z_most=1e-2),
)
"""Engine classes that may sample by default: too narrow to hide a cheat in.

The bound on a single token is beyond any of a million honest positions of the embedded model, at
versions up to 300, where the tail is longer than at the beginning. There the largest gap of 19,000
log-probabilities was 0.038 in `llama/f16` and 1.2e-5 in the float32 classes; on SmolLM2-135M 0.051
of 39,000 and 8.3e-5 of 10,000. Completions of 512 tokens of SmolLM2-135M decide the scaled bounds
of `llama/f16`: of 42,000 tokens one was at a scaled distance of 0.104, and a mean of 320 at 0.0021.
"""


PLAIN: Final = Template(chat=False, system="", thinking=False, variables={})
"""Prompts as the contract writes them, unless it asks for the chat template itself."""
NOBODY_CHECKS: Final = Verification(policy="self", quorum=1, share=0.0)
JOINS: Final = Joins(per_address=256, total=6_000)
"""Joins of new samplers in ten minutes by default: a cluster behind one address, and a crowd."""


def read_model(folder: Path) -> State:
    """Return the trained tensors of a Hugging Face folder, mapped.

    They are those of its adapter, or all weights.
    """
    return from_mapped(map_weights(folder))


def draft(
    *,
    name: str,
    folder: Path,
    contract: Contract,
    params: Mapping[str, Any],
    algorithm: Mapping[str, Any],
    sampling_: Sampling,
    stop: Sequence[str] = (),
    sync: Sync,
    author: Identity,
    trainers: Sequence[bytes],
    verifiers: Sequence[bytes] = (),
    engines: Sequence[EngineTolerance] = ENGINES,
    verification: Verification = NOBODY_CHECKS,
    electors: Sequence[bytes] = (),
    heartbeat_ms: int = 15_000,
    lease_ms: int = 60_000,
    joins: Joins = JOINS,
    seeds: Sequence[str] = (),
    nonce: bytes,
    data: DataSet | None = None,
    template: Template = PLAIN,
    progress: Progress = no_progress,
    pure: bool = False,
    wheels: Sequence[Wheel] = (),
    turns: Turns | None = None,
    adapter_norm: float | None = None,
) -> bytes:
    """Seal a manifest for a model's folder and a contract.

    Electors default to `usual_electors`. `pure` says that the contract passed the purity test, so
    that samplers claim rewards; `wheels` are the code of a contract that is not built in. With
    `adapter_norm` the folder is that of an adapter, and alone trained.
    """
    check_ranges(algorithm)
    manifest = Manifest(
        algorithm=Algorithm(name="grpo", params=dict(algorithm), version="1"),
        contract=ContractPin(
            name=contract.name,
            params=dict(params),
            pure=pure,
            vectors=contract_vectors(contract, [derive("vector", nonce, bytes([n])) for n in range(16)]),
            version=contract.version,
            wheel=tuple(wheels) or None,
        ),
        data=(data,) if data else (),
        engines=tuple(engines),
        joins=joins,
        model=describe_model(
            folder, progress, stop, describe_adapter(folder, adapter_norm) if adapter_norm else None
        ),
        name=name,
        nonce=nonce,
        sampling=sampling_,
        seeds=tuple(seeds),
        sync=sync,
        template=template,
        terms=Terms(
            tuple(sorted(set(electors) or usual_electors(trainers, verifiers))), heartbeat_ms, lease_ms
        ),
        trainers=tuple(trainers),
        turns=turns,
        verification=verification,
        verifiers=tuple(verifiers),
    )
    with boundary(ConfigError, "writing the manifest", advice="change what is named first in the run's file"):
        return seal(manifest, author, ZERO)


def usual_electors(trainers: Sequence[bytes], verifiers: Sequence[bytes]) -> set[bytes]:
    """Return all trainers and verifiers; two trainers alone take turns."""
    return {*trainers, *verifiers}
