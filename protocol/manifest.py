"""Manifest of a run: model, task, algorithm, rules and keys.

A manifest is sealed by its author under the run of 32 zero bytes; the id of that sealed message is
the `run_id`. It says what is trained, on what, by which rules and by whose keys, so that a
volunteer needs nothing but the id.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from protocol import limits
from protocol.digest import ZERO
from protocol.envelope import Opened, open_sealed
from protocol.errors import InconsistentError, WrongRunError
from protocol.fields import (
    Digest,
    EngineClass,
    Ext,
    Name,
    Slug,
    address,
    array,
    check_ascending,
    choice,
    digest,
    flag,
    free_map,
    key,
    number,
    optional,
    pattern,
    text,
    uint,
)
from protocol.wire import of, record

Version = Annotated[str, pattern(r"[0-9A-Za-z.+-]+", 32, "a version")]
Params = Annotated[Mapping[str, Any], free_map(limits.PARAMS_BYTES)]


@record
class ModelFile:
    """A small file of the model's folder, such as tokenizer.json, fetched as a blob."""

    blob: Digest
    name: Annotated[str, pattern(r"[A-Za-z0-9_-][A-Za-z0-9._-]*", limits.NAME_BYTES, "a file name")]
    size: Annotated[int, uint(64 * 1024 * 1024)]


@record
class Adapter:
    """LoRA adapter on a frozen base.

    The weights chain is that of the adapter's tensors. `layout` and `root` are the base's, `table`
    names the frames of its safetensors file, and `norm` bounds the Frobenius norm of each of the
    adapter's tensors.
    """

    alpha: Annotated[float, number(1e-3, 1e6)]
    layout: Digest
    norm: Annotated[float, number(1e-3, 1e6)]
    rank: Annotated[int, uint(limits.ADAPTER_RANK, 1)]
    root: Digest
    table: Digest
    targets: Annotated[
        tuple[str, ...],
        array(pattern(r"[A-Za-z0-9_]+", limits.NAME_BYTES, "a module's name"), limits.ADAPTER_TARGETS, 1),
    ]

    def check(self) -> None:
        check_ascending(self.targets, "targets")


@record
class Model:
    """The trained model.

    Version 0 of its weights is proven by `root`; no hub is needed. With an `adapter`, `layout` and
    `root` are the adapter's.
    """

    adapter: Annotated[Adapter | None, optional(of(Adapter))]
    architecture: Annotated[str, pattern(r"[A-Za-z0-9_]+", limits.NAME_BYTES, "an architecture")]
    context: Annotated[int, uint(2**24, 1)]
    end_tokens: Annotated[tuple[int, ...], array(uint(2**24 - 1), limits.END_TOKENS, 1, ascending=True)]
    files: Annotated[tuple[ModelFile, ...], array(of(ModelFile), limits.MODEL_FILES, 1)]
    layout: Digest
    root: Digest
    vocab_size: Annotated[int, uint(1 << limits.VOCABULARY_BITS, 1)]

    def check(self) -> None:
        check_ascending((file.name for file in self.files), "files")
        if self.end_tokens[-1] >= self.vocab_size:
            raise InconsistentError("an end token outside the vocabulary", "end_tokens")


@record
class ContractVector:
    """Test vector that identifies the contract.

    With an environment `text` is a JSON array of the model's turns, and `replies` the blob id of
    what it answers to them.
    """

    key: Digest
    prompt: Digest
    replies: Annotated[bytes | None, optional(digest)]
    score: Annotated[float, number(-limits.REWARD, limits.REWARD)]
    text: Annotated[str, text(limits.TEXT_BYTES)]


@record
class Wheel:
    """A package of the contract's code: a pure-Python wheel, fetched as a blob."""

    blob: Digest
    name: Annotated[str, pattern(r"[a-z0-9]+(-[a-z0-9]+)*", limits.NAME_BYTES, "a distribution's name")]
    size: Annotated[int, uint(limits.CODE_BYTES, 1)]
    version: Version


@record
class ContractPin:
    """The task: plugin name and version, wheels, parameters, vectors.

    Built-in plugins have no wheels. `pure` says that the purity test passed: only then samplers
    claim rewards.
    """

    name: Slug
    params: Params
    pure: Annotated[bool, flag]
    vectors: Annotated[tuple[ContractVector, ...], array(of(ContractVector), limits.CONTRACT_VECTORS, 1)]
    version: Version
    wheel: Annotated[tuple[Wheel, ...] | None, optional(array(of(Wheel), limits.WHEELS, 1))]

    def check(self) -> None:
        wheels = self.wheel or ()
        check_ascending((each.name for each in wheels), "wheel")
        if sum(each.size for each in wheels) > limits.CODE_BYTES:
            raise InconsistentError("wheels of more bytes than a run's code may have", "wheel")


@record
class DataSet:
    """Rows that prompts are made of: a blob of JSON lines, held-out rows last."""

    blob: Digest
    held_out: Annotated[int, uint(limits.DATA_BYTES)]
    rows: Annotated[int, uint(limits.DATA_BYTES, 1)]
    size: Annotated[int, uint(limits.DATA_BYTES, 1)]

    def check(self) -> None:
        if self.held_out >= self.rows:
            raise InconsistentError("a data set of which nothing is left to train on", "held_out")


@record
class Template:
    """Chat template settings: whether prompts go through it, and with which values."""

    chat: Annotated[bool, flag]
    system: Annotated[str, text(limits.TEXT_BYTES)]
    thinking: Annotated[bool, flag]
    variables: Params


@record
class Algorithm:
    """Training algorithm: a name and version that fix the meaning of each parameter."""

    name: Slug
    params: Params
    version: Version


@record
class Sync:
    """Synchronisation of the two swarms.

    Before version `async_from` a run pulls sequentially, from there on it is asynchronous; 0 means
    from the start, none means never.
    """

    async_from: Annotated[int | None, optional(uint())]
    head_every: Annotated[int, uint(1024, 1)]
    in_flight: Annotated[bool, flag]
    staleness: Annotated[int, uint(limits.STALENESS)]


@record
class Sampling:
    """Sampling of one slot: completions, temperature and token limits."""

    group_size: Annotated[int, uint(limits.COMPLETIONS, 1)]
    max_prompt: Annotated[int, uint(limits.TOKENS, 1)]
    max_tokens: Annotated[int, uint(limits.TOKENS, 1)]
    temperature: Annotated[float, number(0.01, 100.0)]


@record
class Turns:
    """Environment of a run: end-of-turn token, and limits beside `Sampling`'s.

    `samplers` are the only keys that may sample, where replies cannot be recomputed; empty means
    that anybody may.
    """

    end: Annotated[int, uint(2**24 - 1)]
    environment: Annotated[int, uint(limits.TOKENS, 1)]
    most: Annotated[int, uint(limits.TURNS, 1)]
    role: Annotated[str, choice("user", "tool")]
    samplers: Annotated[tuple[bytes, ...], array(key, limits.KEYS, ascending=True)]
    tokens: Annotated[int, uint(limits.TOKENS, 1)]


@record
class EngineTolerance:
    """An engine class that may sample, and the tolerance of its honest draws."""

    d_mean: Annotated[float, number(0.0, 1.0)]
    d_most: Annotated[float, number(0.0, 1.0)]
    engine: EngineClass
    gap_most: Annotated[float, number(0.0, 1e3)]
    share: Annotated[float, number(0.0, 1.0)]
    z_mean: Annotated[float, number(0.0, 1e6)]
    z_most: Annotated[float, number(0.0, 1e6)]


@record
class Verification:
    """Verdicts needed before use: trainer's, k verifiers', or a drawn share."""

    policy: Annotated[str, choice("self", "quorum", "sampled")]
    quorum: Annotated[int, uint(limits.KEYS, 1)]
    share: Annotated[float, number(0.0, 1.0)]


@record
class Terms:
    """Electors and leases. Fewer than three electors means promotion by hand."""

    electors: Annotated[tuple[bytes, ...], array(key, limits.KEYS, 1, ascending=True)]
    heartbeat_ms: Annotated[int, uint(3_600_000, 100)]
    lease_ms: Annotated[int, uint(86_400_000, 100)]

    def check(self) -> None:
        if self.lease_ms < 2 * self.heartbeat_ms:
            raise InconsistentError("a lease shorter than two heartbeats", "lease_ms")


@record
class Joins:
    """Budgets for new samplers: joins in ten minutes from one address, and from all."""

    per_address: Annotated[int, uint(1_000_000, 1)]
    total: Annotated[int, uint(1_000_000, 1)]


@record
class Manifest:
    """Settings that all nodes of a run must agree on. `trainers[0]` leads term 1."""

    KIND: ClassVar[str] = "manifest"
    LIMIT: ClassVar[int] = limits.MANIFEST_BYTES

    algorithm: Algorithm
    contract: ContractPin
    data: Annotated[tuple[DataSet, ...], array(of(DataSet), 1)]
    engines: Annotated[tuple[EngineTolerance, ...], array(of(EngineTolerance), limits.CLASSES, 1)]
    joins: Joins
    model: Model
    name: Name
    nonce: Digest
    sampling: Sampling
    seeds: Annotated[tuple[str, ...], array(address, limits.ADDRESSES)]
    sync: Sync
    template: Template
    terms: Terms
    trainers: Annotated[tuple[bytes, ...], array(key, limits.KEYS, 1)]
    turns: Annotated[Turns | None, optional(of(Turns))]
    verification: Verification
    verifiers: Annotated[tuple[bytes, ...], array(key, limits.KEYS)]
    ext: Ext = dataclasses.field(default_factory=dict)

    def check(self) -> None:
        check_ascending((tolerance.engine for tolerance in self.engines), "engines")
        for name, keys in (("trainers", self.trainers), ("verifiers", self.verifiers)):
            if len(set(keys)) != len(keys):
                raise InconsistentError("one key twice", name)
        if not set(self.terms.electors) <= {*self.trainers, *self.verifiers}:
            raise InconsistentError("an elector that is neither trainer nor verifier", "terms.electors")
        if self.verification.policy == "quorum" and self.verification.quorum > len(self.verifiers):
            raise InconsistentError("a quorum of more verifiers than there are", "verification.quorum")
        if self.sampling.max_prompt + self.sampling.max_tokens > self.model.context:
            raise InconsistentError("prompt and completion together exceed the model's context", "sampling")
        if self.turns is not None:
            self._check_turns(self.turns)

    def _check_turns(self, turns: Turns) -> None:
        if turns.end not in self.model.end_tokens:
            raise InconsistentError("an end-of-turn token that is no end token", "turns.end")
        if max(turns.tokens, turns.environment) > self.sampling.max_tokens:
            raise InconsistentError("more tokens of a turn or the environment than in all", "turns")
        if not self.contract.pure and not turns.samplers:
            raise InconsistentError(
                "replies that cannot be recomputed, and no samplers named", "turns.samplers"
            )


def open_manifest(sealed: bytes, run: bytes | None = None) -> Opened[Manifest]:
    """Open a manifest; `opened.id` is the run's id.

    It must be `run` where that is given.
    """
    opened = open_sealed(sealed, Manifest, ZERO)
    if run is not None and opened.id != run:
        raise WrongRunError(
            f"the manifest of run {opened.id.hex()[:16]}…, expected {run.hex()[:16]}…", "manifest"
        )
    return opened
