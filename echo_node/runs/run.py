"""A run that is open: the manifest with its contract, tokenizer and limits.

An operator drafts a manifest from a model's folder and a contract; everyone else opens one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from echo_node.contract import (
    Contract,
    Prompt,
    Score,
    check_vectors,
    contract_vectors,
    load,
    prompt_of,
    score_of,
)
from echo_node.contract.data_rows import Part, read_rows
from echo_node.contract.jail import Layer
from echo_node.contract.jail.required import REQUIRED
from echo_node.contract.jail.worker import DataFile, Failed
from echo_node.contract.package_digest import check_package, package_digest
from echo_node.contract.registry import entry_of, is_built_in
from echo_node.contract.sandbox import JailedContract, load_jailed, score_or_zero
from echo_node.engine.base import SamplingLimits
from echo_node.errors import ConfigError, ContractError, boundary
from echo_node.models.folder import map_folder
from echo_node.models.progress import Progress, no_progress
from echo_node.net.blobs.blob_registry import InFile
from echo_node.runs.algorithm import check_ranges
from echo_node.runs.dataset import FILE as DATA_FILE
from echo_node.runs.model_description import describe_model
from echo_node.runs.thought_split import answer_of, opens_thought
from echo_node.runs.tokenizer import Tokenizer
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
    Verification,
)


@dataclasses.dataclass(frozen=True)
class Run:
    """A manifest with everything that it names opened."""

    sealed_manifest: Opened[Manifest]
    folder: Path
    contract: Contract
    tokenizer: Tokenizer
    data: Path | None = None
    """File of the data set, if the run has one."""

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
    ) -> Run:
        """Open a manifest, and check the model's small files in a folder against it.

        The contract runs in a sandbox, since completions are untrusted text; `jailed=False` is
        for its author. `require` names the layers of the jail without which it does not run.
        `data` is the file of the run's data set, by default beside the folder; `part` is what
        prompts are drawn from, held-out rows for evaluation alone.
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
        data_file = _data_file(message, data or folder.parent / DATA_FILE, part)
        contract = _load_contract(message, data_file, require if jailed else None)
        if part == "train":
            check_vectors(contract, message.contract.vectors)
        place = data_file.path if data_file else None
        return cls(manifest, folder, contract, Tokenizer.from_folder(folder), place)

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
        texts = render_prompts(self.tokenizer, self.manifest.template, found)
        return [(prompt, self.tokenizer.encode(text)) for prompt, text in zip(found, texts, strict=True)]

    def ids_of(self, prompt: Prompt) -> NDArray[np.int64]:
        """Return the token ids of a prompt."""
        return self.tokenizer.encode(self.rendered(prompt))

    def rendered(self, prompt: Prompt) -> str:
        """Return the text that the model reads, by its chat template where the run says so."""
        return render_prompts(self.tokenizer, self.manifest.template, [prompt])[0]

    def score(self, prompt: Prompt, ids: NDArray[np.int64]) -> Score:
        """Score a completion; the run's end token, if it is the last, is no part of the answer."""
        return self.scores(prompt, [ids])[0]

    def scores(self, prompt: Prompt, completions: Sequence[NDArray[np.int64]]) -> list[Score]:
        """Score completions of a prompt; one that crashes its scorer gets the lowest score."""
        return [score_or_zero(each, self.contract.low) for each in self.results(prompt, completions)]

    def results(self, prompt: Prompt, completions: Sequence[NDArray[np.int64]]) -> list[Score | Failed]:
        """Score completions, with failures as such: they may be this machine's fault."""
        texts = [self.tokenizer.decode(ids, self.limits.end_tokens) for ids in completions]
        if not self.manifest.template.thinking:
            return self._scored([(prompt, text) for text in texts])
        opened = opens_thought(self.rendered(prompt))
        answers = [answer_of(text, opened=opened) for text in texts]
        scored = iter(self._scored([(prompt, answer) for answer in answers if answer is not None]))
        truncated = Score(self.contract.low, "truncated: the thought has no end")
        return [truncated if answer is None else next(scored) for answer in answers]

    def _scored(self, texts: list[tuple[Prompt, str]]) -> list[Score | Failed]:
        if isinstance(self.contract, JailedContract):
            return self.contract.sandbox.scores(texts)
        return [score_of(self.contract, prompt, text) for prompt, text in texts]

    def fresh_results(self, prompt: Prompt, completions: Sequence[NDArray[np.int64]]) -> list[Score | Failed]:
        """Score completions in a jail process that has seen no text before."""
        if isinstance(self.contract, JailedContract):
            self.contract.sandbox.renew()
        return self.results(prompt, completions)

    def files(self) -> dict[bytes, InFile]:
        """Return the model's small files and the data set by hash, to serve to newcomers."""
        found = {file.blob: InFile(self.folder / file.name, file.size) for file in self.manifest.model.files}
        if self.data:
            found |= {each.blob: InFile(self.data, each.size) for each in self.manifest.data}
        return found

    def for_evaluation(self) -> Run:
        """Return the run with prompts of its held-out rows; without a data set, itself."""
        if not any(each.held_out for each in self.manifest.data):
            return self
        jailed = isinstance(self.contract, JailedContract)
        return Run.open(
            self.sealed_manifest.sealed, self.folder, jailed=jailed, data=self.data, part="held-out"
        )

    def jail(self) -> list[Layer]:
        """Return the layers of the contract's jail; none if it is not jailed."""
        return self.contract.sandbox.layers() if isinstance(self.contract, JailedContract) else []

    def close(self) -> None:
        """End the contract's processes."""
        if isinstance(self.contract, JailedContract):
            self.contract.close()
        self.tokenizer.close()


def render_prompts(tokenizer: Tokenizer, template: Template, prompts: Sequence[Prompt]) -> list[str]:
    """Return the texts of prompts as the model reads them."""
    chats = [_messages(template, each) for each in prompts if template.chat or each.chat]
    own = {"self", "conversations", "messages", "add_generation_prompt"}
    variables = {name: value for name, value in template.variables.items() if name not in own}
    texts = iter(tokenizer.render_all(chats, **variables))
    return [next(texts) if template.chat or each.chat else each.text for each in prompts]


def _messages(template: Template, prompt: Prompt) -> list[dict[str, str]]:
    if not template.system:
        return prompt.messages
    return [{"role": "system", "content": template.system}, *prompt.messages[1 if prompt.system else 0 :]]


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


def _load_contract(message: Manifest, data: DataFile | None, require: Sequence[str] | None) -> Contract:
    """Load the contract, in a jail with these layers or, for its author, in this process."""
    named = message.contract
    if named.wheel is None and not is_built_in(named.name, named.version):
        entry_of(named.name, named.version)  # an error of its own where it is not installed
        raise ContractError(
            f"the run pins no package for {named.name} {named.version}, which is not built in here",
            advice="its author can make the run anew: echo-node run new",
        )
    if require is not None:
        pinned = {"require": require, "wheel": named.wheel, "data": data}
        return load_jailed(named.name, named.version, named.params, **pinned)
    if named.wheel is not None:
        check_package(named.name, named.version, named.wheel)
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
    """Return the weights of a Hugging Face folder, mapped: one safetensors file, or shards."""
    return from_mapped(map_folder(folder))


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
) -> bytes:
    """Seal a manifest for a model's folder and a contract; electors default to `usual_electors`.

    `pure` says that the contract passed the purity test, so that samplers claim rewards.
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
            wheel=package_digest(contract.name, contract.version),
        ),
        data=(data,) if data else (),
        engines=tuple(engines),
        joins=joins,
        model=describe_model(folder, progress, stop),
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
        verification=verification,
        verifiers=tuple(verifiers),
    )
    with boundary(ConfigError, "writing the manifest", advice="change what is named first in the run's file"):
        return seal(manifest, author, ZERO)


def usual_electors(trainers: Sequence[bytes], verifiers: Sequence[bytes]) -> set[bytes]:
    """Return all trainers and verifiers; two trainers alone take turns."""
    return {*trainers, *verifiers}
