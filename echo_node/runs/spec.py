"""Run spec: from a TOML file to a sealed manifest, from a name to an open run.

    RUN/run.toml        the file as it was used, with every default written out
    RUN/manifest        the sealed manifest; its hash is the run's id

The run's folder in a node's state will do too: it has the manifest in weights/ and the model
beside.
"""

from __future__ import annotations

import logging
import secrets
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, model_validator

from echo_node.config import load_config, write_resolved
from echo_node.contract.code_folder import WHEELS, describe_code
from echo_node.contract.jail.required import REQUIRED
from echo_node.contract.registry import as_a_guest, is_built_in
from echo_node.contract.requirements import contract_wheels
from echo_node.contract.wheel_reader import file_of
from echo_node.engine.engine_classes import CLASSES
from echo_node.errors import ConfigError, StoreError, boundary, looking_at
from echo_node.models import embedded
from echo_node.models.model_source import open_model
from echo_node.models.progress import Progress, no_progress
from echo_node.net.discovery.seeds import parse_seeds
from echo_node.runs.algorithm import layout_for
from echo_node.runs.dataset import FILE as DATA_FILE
from echo_node.runs.dataset import DataTable
from echo_node.runs.evaluation_settings import EvaluationTable, evaluation_params
from echo_node.runs.lora_table import LoraTable
from echo_node.runs.model_download import is_downloaded
from echo_node.runs.model_support import check_model, fitting_engines
from echo_node.runs.prompt_preparation import EMBEDDED, EMBEDDED_GUESS, prepare_prompts, template_of
from echo_node.runs.run import ENGINES, JOINS, Run, draft
from echo_node.runs.turn_settings import TurnsTable
from echo_node.runs.validation import check_learnable
from protocol import (
    ZERO,
    Identity,
    Manifest,
    Opened,
    ProtocolError,
    limits,
    open_manifest,
    peer_id,
    public_key_of,
    seal,
)
from protocol.manifest import EngineTolerance, Joins, Sampling, Sync, Turns, Verification

log = logging.getLogger(__name__)

MANIFEST: Final = "manifest"
RUN_FILE: Final = "run.toml"
MODEL: Final = "model"
"""Folder of a run's own model: downloaded, or the base and adapter of a LoRA run."""
OWN_SHARE: Final = 0.1
"""Least part of the groups of proven samplers that a trainer checks itself, by default."""
_PROMPTS: Final = 32
"""Prompts of a new run that engines are calibrated with."""
_STRICT: Final = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, strict=True)
"""Strict types: `true` is no number, nor is a number in quotes."""


class SamplingTable(BaseModel):
    """Size of a slot: completions, tokens, temperature."""

    model_config = _STRICT

    group_size: int = Field(default=8, ge=2, le=limits.COMPLETIONS)
    max_prompt: int | None = Field(default=None, ge=1, le=limits.TOKENS)
    """Most tokens of a prompt; measured from the data or the contract if left out."""
    max_tokens: int | None = Field(default=None, ge=1, le=limits.TOKENS)
    """Most tokens of a completion; by the answers of the data if left out."""
    temperature: float = Field(default=1.0, ge=0.01, le=100.0)
    stop: list[str] = Field(default_factory=list, max_length=limits.END_TOKENS)
    """Texts that end a completion as the end token does; each is one token of the model."""


class TemplateTable(BaseModel):
    """Values for the model's chat template."""

    model_config = _STRICT

    system: str = ""
    """System message; the contract's own if empty."""
    thinking: bool = False
    """Score only what follows `</think>`; a thought without end scores as truncated."""
    variables: dict[str, Any] = Field(default_factory=dict)
    """Variables of the template, such as `enable_thinking = false`."""
    tools: list[dict[str, Any]] = Field(default_factory=list)
    """Tools that the template describes to the model, as JSON schemas."""


class SyncTable(BaseModel):
    """Synchronisation of samplers and trainer."""

    model_config = _STRICT

    mode: Literal["async", "sequential"] = "async"
    async_from: int = Field(default=0, ge=0)
    """First asynchronous version; before it the run is sequential."""
    staleness: int = Field(default=4, ge=0, le=limits.STALENESS)
    head_every: int = Field(default=1, ge=1, le=1024)
    """Steps per version."""
    in_flight: bool = False


class VerificationTable(BaseModel):
    """Verdicts that a group needs before it is used."""

    model_config = _STRICT

    policy: Literal["self", "quorum", "sampled"] = "self"
    """self: the trainer checks a share itself. quorum: so many verifiers must find a group
    honest.

    sampled: verifiers check some, and unchecked groups are at most a share of a batch.
    """
    quorum: int = Field(default=1, ge=1, le=limits.KEYS)
    share: float = Field(default=0.0, ge=0.0, le=1.0)
    """self: least part of the groups that the trainer checks, a tenth by default; none with 0.

    sampled: the part of a batch that may be unchecked, none by default.
    """

    @model_validator(mode="before")
    @classmethod
    def _check_by_default(cls, table: Any) -> Any:
        """Let the trainer check a share, unless the file says otherwise."""
        if isinstance(table, dict) and table.get("policy", "self") == "self":
            return {"share": OWN_SHARE, **table}
        return table


class JoinsTable(BaseModel):
    """Budgets for new samplers, in joins in ten minutes."""

    model_config = _STRICT

    per_address: int = Field(default=JOINS.per_address, ge=1, le=1_000_000)
    """From one IPv4 address or IPv6 /64."""
    total: int = Field(default=JOINS.total, ge=1, le=1_000_000)
    """From all together."""


class TermsTable(BaseModel):
    """Replacement of a silent leader; automatic with three or more electors."""

    model_config = _STRICT

    heartbeat_ms: int = Field(default=15_000, ge=100)
    lease_ms: int = Field(default=60_000, ge=200)
    electors: list[str] = Field(default_factory=list, max_length=limits.KEYS)
    """Peer ids that vote on the next leader, by majority; all trainers and verifiers if empty.

    Two trainers that are the only electors take turns: the one that does not lead can be promoted
    by hand.
    """


class EngineTable(BaseModel):
    """An engine class with its tolerance, as `echo-node verifier calibrate` prints it."""

    model_config = _STRICT

    engine: str
    d_mean: float = Field(ge=0.0, le=1.0)
    d_most: float = Field(ge=0.0, le=1.0)
    gap_most: float = Field(ge=0.0)
    z_mean: float = Field(ge=0.0, le=1e6)
    z_most: float = Field(ge=0.0, le=1e6)
    share: float = Field(default=1.0, ge=0.0, le=1.0)


class RunSpec(BaseModel):
    """The operator's settings of a run.

    Keys are peer ids, as `echo-node keys show` prints them.
    """

    model_config = _STRICT

    name: str = Field(pattern=r"\S", max_length=limits.NAME_BYTES)
    model: str = EMBEDDED
    """`embedded`, `embedded-guess`, or what `echo-node engines --model` takes."""
    contract: str = "digits-reverse@1"
    trainers: list[str] = Field(min_length=1, max_length=limits.KEYS)
    """The first one leads."""
    verifiers: list[str] = Field(default_factory=list, max_length=limits.KEYS)
    seeds: list[str] = Field(default_factory=list, max_length=limits.ADDRESSES)
    engines: list[str | EngineTable] = Field(default_factory=list, max_length=limits.CLASSES)
    """Engine classes that may sample; all with a known tolerance if empty."""
    chat: bool = False
    """Whether prompts go through the model's chat template."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Parameters of the contract."""
    lora: LoraTable | None = None
    """Train an adapter; the whole model if left out."""
    data: DataTable | None = None
    """Data set of the run; contracts such as math draw its rows."""
    template: TemplateTable = TemplateTable()
    turns: TurnsTable | None = None
    """Limits of turns, for contracts that answer the model; measured if left out."""
    sampling: SamplingTable = SamplingTable()
    sync: SyncTable = SyncTable()
    verification: VerificationTable = VerificationTable()
    terms: TermsTable = TermsTable()
    joins: JoinsTable = JoinsTable()
    algorithm: dict[str, Any] = Field(default_factory=dict)
    evaluation: EvaluationTable | None = None
    """Evaluation on held-out prompts during the run; none if left out."""


def read_run_file(file: Path, changes: Sequence[str] = ()) -> RunSpec:
    return load_config(RunSpec, file, changes)


@dataclass(frozen=True, slots=True)
class NewRun:
    """A sealed run: manifest, data set, and the spec with every limit filled in."""

    sealed: bytes
    data: bytes | None
    spec: RunSpec
    wheels: Mapping[str, bytes]
    """Wheels of the contract's code by their file names; empty for a built-in contract."""
    prompts: tuple[NDArray[np.int64], ...]
    """Token ids of some of its prompts, to calibrate engines with."""

    def with_engines(self, engines: Mapping[str, EngineTolerance], author: Identity) -> NewRun:
        """Seal the run again with other tolerances of some of its engine classes."""
        before = open_manifest(self.sealed).message
        classes = tuple(engines.get(each.engine, each) for each in before.engines)
        tables: list[str | EngineTable] = [EngineTable(**asdict(each)) for each in classes]
        return replace(
            self,
            sealed=seal(replace(before, engines=classes), author, ZERO),
            spec=self.spec.model_copy(update={"engines": tables}),
        )


def new_run(
    spec: RunSpec,
    author: Identity,
    *,
    nonce: bytes | None = None,
    progress: Progress = no_progress,
    note: Callable[[str], None] = log.info,
    pure: bool = False,
    out: Path | None = None,
) -> NewRun:
    """Seal the manifest of a run, after checking that it can learn.

    `out` is the run's folder, into which a run with an adapter writes its model.
    `progress` is told how far reading the model is; `note` gets lines for the operator;
    `pure` says that the contract passed `contract.adversarial_test.find_impurity`.
    """
    name, _, version = spec.contract.partition("@")
    if not name or not version:
        raise ConfigError(
            f"contract: {spec.contract!r} is no name with a version",
            advice="write both, such as digits-reverse@1: echo-node contract list",
        )
    nonce = nonce or secrets.token_bytes(32)
    folder = model_folder(spec.model, progress, note)
    if spec.lora is not None:
        if out is None or (out / MANIFEST).exists():
            raise ConfigError(f"{out} holds a run already", advice="give another folder with --out")
        folder = spec.lora.make_folder(folder, out / MODEL, nonce, progress)
    made = [] if is_built_in(name, version) else contract_wheels(name, version)
    wheels = {file_of(wheel): data for wheel, data in made}
    with as_a_guest(name):
        found = prepare_prompts(spec, name, version, folder, nonce, progress, note)
        sampling = spec.sampling.model_copy(
            update={"max_prompt": found.max_prompt, "max_tokens": found.max_tokens}
        )
        spec = spec.model_copy(update={"sampling": sampling, "turns": _table(found.turns)})
        if found.turns and not pure and not found.turns.samplers:
            raise ConfigError(
                f"{spec.contract} failed the purity test, and everybody must be able to recompute its replies",
                advice="see echo-node contract test, or name the peer ids that may sample in turns.samplers",
            )
        longest = found.max_prompt + found.max_tokens
        check_model(folder, longest)
        drawn = Sampling(**sampling.model_dump(exclude={"stop"}))
        sealed = draft(
            name=spec.name,
            folder=folder,
            contract=found.contract,
            params=spec.params,
            algorithm={
                **layout_for(_parameters(folder)),
                **spec.algorithm,
                **evaluation_params(spec.evaluation, drawn),
            },
            sampling_=drawn,
            stop=sampling.stop,
            sync=_sync(spec.sync),
            author=author,
            trainers=[_key(each, "trainers") for each in spec.trainers],
            verifiers=[_key(each, "verifiers") for each in spec.verifiers],
            engines=fitting_engines(
                _engines(spec.engines), folder, longest, named=bool(spec.engines), note=note
            ),
            verification=Verification(**spec.verification.model_dump()),
            electors=[_key(each, "terms.electors") for each in spec.terms.electors],
            heartbeat_ms=spec.terms.heartbeat_ms,
            lease_ms=spec.terms.lease_ms,
            joins=Joins(**spec.joins.model_dump()),
            seeds=[seed.text for seed in parse_seeds(spec.seeds)],
            nonce=nonce,
            data=found.described,
            template=template_of(spec),
            progress=progress,
            pure=pure,
            wheels=[wheel for wheel, _ in made],
            adapter_norm=spec.lora.longest if spec.lora else None,
            turns=found.turns,
        )
        with tempfile.TemporaryDirectory(prefix="echo-run-") as place:
            file = Path(place, DATA_FILE)
            file.write_bytes(found.data or b"")
            opened = Run.open(sealed, folder, jailed=False, data=file)
            check_learnable(opened)
            prompts = _some_prompts(opened) if spec.model != EMBEDDED else ()
            if wheels:  # as everyone who joins opens it: from its wheels alone
                _write_wheels(Path(place, WHEELS), wheels)
                Run.open(sealed, folder, data=file, wheels=Path(place, WHEELS), require=()).close()
    if made:
        note(f"the contract's code travels with the run: {describe_code([wheel for wheel, _ in made])}")
    return NewRun(sealed, found.data, spec, wheels, prompts)


def _some_prompts(run: Run) -> tuple[NDArray[np.int64], ...]:
    keys = [run.slot_key(bytes(32), bytes(32), slot) for slot in range(_PROMPTS)]
    return tuple(ids for _, ids in run.prompts(keys))


def _parameters(folder: Path) -> int:
    """Return about how many parameters a folder's bf16 files hold."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors")) // 2


def _table(turns: Turns | None) -> TurnsTable | None:
    if turns is None:
        return None
    return TurnsTable(
        most=turns.most,
        tokens=turns.tokens,
        environment=turns.environment,
        samplers=[peer_id(each) for each in turns.samplers],
    )


def _write_wheels(folder: Path, wheels: Mapping[str, bytes]) -> None:
    folder.mkdir(exist_ok=True)
    for name, data in wheels.items():
        (folder / name).write_bytes(data)


def write_run(folder: Path, made: NewRun) -> None:
    """Write the folder of a run; an existing one is not overwritten."""
    with boundary(ConfigError, f"writing {folder}", advice="--out takes a folder that can be written to"):
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / MANIFEST).exists():
            raise ConfigError(f"{folder} holds a run already", advice="give another folder with --out")
    with boundary(
        StoreError, f"writing {folder}", advice="make room on that disk, or give another folder with --out"
    ):
        spec = made.spec.model_copy(update={"model": _absolute(made.spec.model)})
        if spec.data:
            source = spec.data.model_copy(update={"source": _absolute(spec.data.source)})
            spec = spec.model_copy(update={"data": source})
        write_resolved(spec, folder / RUN_FILE)
        if made.data is not None:
            (folder / DATA_FILE).write_bytes(made.data)
        if made.wheels:
            _write_wheels(folder / WHEELS, made.wheels)
        new_file = folder / f"{MANIFEST}.new"
        try:
            new_file.write_bytes(made.sealed)
            new_file.replace(folder / MANIFEST)  # last: a folder with a manifest is complete
        finally:
            new_file.unlink(missing_ok=True)


def _absolute(named: str) -> str:
    path = Path(named).expanduser()
    return str(path.resolve()) if path.exists() else named


def _sync(table: SyncTable) -> Sync:
    return Sync(
        async_from=table.async_from if table.mode == "async" else None,
        head_every=table.head_every,
        in_flight=table.in_flight,
        staleness=table.staleness if table.mode == "async" else 0,
    )


def read_manifest(named: Path) -> Opened[Manifest]:
    """Read the manifest of a run's folder, or from a file."""
    advice = "give a run's folder or its manifest's file"
    with looking_at(named, advice=advice):
        places = (named / MANIFEST, named / "weights" / MANIFEST) if named.is_dir() else (named,)
        file = next((each for each in places if each.is_file()), None)
    if file is None:
        raise ConfigError(f"there is no run in {named}", advice=advice)
    with boundary(ConfigError, f"reading {file}"):
        if file.stat().st_size > limits.MANIFEST_BYTES + limits.ENVELOPE_BYTES:
            raise ConfigError(f"{file} is too large for a manifest", advice="it is made by echo-node run new")
        data = file.read_bytes()
    try:
        return open_manifest(data)
    except ProtocolError as error:
        raise ConfigError(
            f"{file} is no manifest: {error}", advice="it is made by echo-node run new"
        ) from error


def open_run(named: Path, model: str | None = None, *, require: Sequence[str] = REQUIRED) -> Run:
    """Open a run by its folder or manifest file.

    The model is the one given, that of the run's file, the downloaded one, or the embedded one.
    `require` names the layers without which its contract does not run.
    """
    manifest = read_manifest(named)
    place = named if named.is_dir() else named.parent
    data, wheels = place / DATA_FILE, place / WHEELS
    lora = manifest.message.model.adapter is not None
    if model is None and not lora and (named / RUN_FILE).is_file():
        model = read_run_file(named / RUN_FILE).model
    elif model is None and (lora or is_downloaded(named / MODEL, manifest.message)):
        return Run.open(manifest.sealed, named / MODEL, require=require, data=data, wheels=wheels)
    folder = model_folder(model or EMBEDDED)
    return Run.open(manifest.sealed, folder, require=require, data=data, wheels=wheels)


def model_folder(
    model: str, progress: Progress = no_progress, note: Callable[[str], None] = log.info
) -> Path:
    if model == EMBEDDED_GUESS:
        return embedded.guess_folder()
    return embedded.folder() if model == EMBEDDED else open_model(model, progress=progress, note=note)


def _engines(wanted: Sequence[str | EngineTable]) -> tuple[EngineTolerance, ...]:
    """Return the tolerances of the classes: those given as tables, or the known ones."""
    known = {each.engine: each for each in ENGINES}
    found: dict[str, EngineTolerance] = {}
    for each in wanted:
        name = each if isinstance(each, str) else each.engine
        if name not in (known if isinstance(each, str) else CLASSES):
            raise ConfigError(
                f"no tolerance is known for engines of the class {name}",
                advice=f"take some of {', '.join(known)}, or paste what echo-node verifier calibrate prints",
            )
        if name in found:
            raise ConfigError(f"engines: {name} stands there twice", advice="leave one of the two out")
        with boundary(
            ConfigError, f"engines: {name}", advice="paste what echo-node verifier calibrate prints"
        ):
            found[name] = known[name] if isinstance(each, str) else EngineTolerance(**each.model_dump())
    return tuple(each for _, each in sorted((found or known).items()))


def _key(text: str, where: str) -> bytes:
    try:
        return public_key_of(text)
    except ProtocolError as error:
        raise ConfigError(
            f"{where}: {text!r}: {error}", advice="echo-node keys show prints a node's own"
        ) from error
