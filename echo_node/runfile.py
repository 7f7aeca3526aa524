"""A run as its operator writes it: a short TOML file in, a sealed manifest out. And the way back: from what a person names
(a manifest's file, or the folder of a run) to an open run.

    RUN/run.toml        the file as it was used, with every default written out
    RUN/manifest        what is sealed and shared; its hash is the run's id

The folder in which a node keeps what it holds of a run will do too: the manifest is among its weights there, and the model beside.

It dials nobody, and knows nothing of training.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from echo_node import embedded
from echo_node.arriving import has_arrived
from echo_node.config import load_config, write_resolved
from echo_node.contract import load
from echo_node.contract.registry import as_a_guest
from echo_node.errors import ConfigError, StoreError, boundary, looking_at
from echo_node.learnable import check_learnable
from echo_node.models.finding import find_model
from echo_node.net.meeting.seeds import parse_seeds
from echo_node.run import ENGINES, Run, draft
from protocol import (
    Identity,
    Manifest,
    Opened,
    ProtocolError,
    limits,
    open_manifest,
    public_key_of,
)
from protocol.manifest import EngineTolerance, Sampling, Sync, Verification

MANIFEST: Final = "manifest"
RUN_FILE: Final = "run.toml"
EMBEDDED: Final = "embedded"
_STRICT: Final = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, strict=True)
"""`true` is no number, and neither is a number in quotes: what is sealed is what was written."""


class SamplingTable(BaseModel):
    """What one slot is."""

    model_config = _STRICT

    group_size: int = Field(default=8, ge=2, le=limits.COMPLETIONS)
    max_prompt: int = Field(default=7, ge=1, le=limits.TOKENS)
    max_tokens: int = Field(default=6, ge=1, le=limits.TOKENS)
    temperature: float = Field(default=1.0, ge=0.01, le=100.0)


class SyncTable(BaseModel):
    """How samplers and trainer keep step."""

    model_config = _STRICT

    mode: Literal["async", "sequential"] = "async"
    async_from: int = Field(default=0, ge=0)
    """In asynchronous mode: before this version the run is sequential."""
    staleness: int = Field(default=4, ge=0, le=limits.STALENESS)
    head_every: int = Field(default=1, ge=1, le=1024)
    """Steps from one version to the next."""
    in_flight: bool = False


class VerificationTable(BaseModel):
    """Whose word counts before a group is used."""

    model_config = _STRICT

    policy: Literal["self", "quorum", "sampled"] = "self"
    """self: the trainer looks at a share itself. quorum: so many verifiers must find a group honest. sampled: verifiers look
    at some, and what nobody vouches for is at most a share of a batch."""
    quorum: int = Field(default=1, ge=1, le=limits.KEYS)
    share: float = Field(default=0.0, ge=0.0, le=1.0)


class TermsTable(BaseModel):
    """How soon a silent leader is replaced, and by whose votes. Three electors or more do that by themselves."""

    model_config = _STRICT

    heartbeat_ms: int = Field(default=15_000, ge=100)
    lease_ms: int = Field(default=60_000, ge=200)
    electors: list[str] = Field(default_factory=list, max_length=limits.KEYS)
    """Of the trainers and verifiers, those who vote on the next leader, which takes more than half of them. If none is named,
    all do. Two trainers that are the only electors take turns: whichever does not lead can be promoted by hand."""


class RunFile(BaseModel):
    """What an operator decides. Keys are peer ids, as `echo-node keys show` prints them."""

    model_config = _STRICT

    name: str = Field(pattern=r"\S", max_length=limits.NAME_BYTES)
    model: str = EMBEDDED
    """`embedded`, or what `echo-node engines --model` takes."""
    contract: str = "digits-reverse@1"
    trainers: list[str] = Field(min_length=1, max_length=limits.KEYS)
    """The first one leads."""
    verifiers: list[str] = Field(default_factory=list, max_length=limits.KEYS)
    seeds: list[str] = Field(default_factory=list, max_length=limits.ADDRESSES)
    engines: list[str] = Field(default_factory=list)
    """Classes of engines that may sample; all that a tolerance is known for, if none is named."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Of the contract."""
    sampling: SamplingTable = SamplingTable()
    sync: SyncTable = SyncTable()
    verification: VerificationTable = VerificationTable()
    terms: TermsTable = TermsTable()
    algorithm: dict[str, Any] = Field(default_factory=dict)


def read_run_file(file: Path, changes: Sequence[str] = ()) -> RunFile:
    return load_config(RunFile, file, changes)


def new_run(told: RunFile, author: Identity, *, nonce: bytes | None = None) -> bytes:
    """The sealed manifest of a run."""
    name, _, version = told.contract.partition("@")
    if not name or not version:
        raise ConfigError(
            f"contract: {told.contract!r} is no name with a version",
            advice="write both, such as digits-reverse@1: echo-node contract list",
        )
    contract = load(name, version, told.params)
    sync = Sync(
        async_from=told.sync.async_from if told.sync.mode == "async" else None,
        head_every=told.sync.head_every,
        in_flight=told.sync.in_flight,
        staleness=told.sync.staleness if told.sync.mode == "async" else 0,
    )
    folder = model_folder(told.model)
    with as_a_guest(name):
        sealed = draft(
            name=told.name,
            folder=folder,
            contract=contract,
            params=told.params,
            algorithm=told.algorithm,
            sampling_=Sampling(**told.sampling.model_dump()),
            sync=sync,
            author=author,
            trainers=[_key(each, "trainers") for each in told.trainers],
            verifiers=[_key(each, "verifiers") for each in told.verifiers],
            engines=_engines(told.engines),
            verification=Verification(**told.verification.model_dump()),
            electors=[_key(each, "terms.electors") for each in told.terms.electors],
            heartbeat_ms=told.terms.heartbeat_ms,
            lease_ms=told.terms.lease_ms,
            seeds=[seed.text for seed in parse_seeds(told.seeds)],
            nonce=nonce or secrets.token_bytes(32),
        )
        check_learnable(Run.open(sealed, folder, jailed=False))
    return sealed


def write_run(folder: Path, told: RunFile, sealed: bytes) -> None:
    """The folder of a run. What is there already is not overwritten."""
    with boundary(ConfigError, f"writing {folder}", advice="--out takes a folder that can be written to"):
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / MANIFEST).exists():
            raise ConfigError(f"{folder} holds a run already", advice="give another folder with --out")
    with boundary(
        StoreError, f"writing {folder}", advice="make room on that disk, or give another folder with --out"
    ):
        model = Path(told.model).expanduser()
        absolute = str(model.resolve()) if model.exists() else told.model
        write_resolved(told.model_copy(update={"model": absolute}), folder / RUN_FILE)
        drawn = folder / f"{MANIFEST}.new"
        try:
            drawn.write_bytes(sealed)
            drawn.replace(folder / MANIFEST)  # the last: a folder that has it has all of it
        finally:
            drawn.unlink(missing_ok=True)


def read_manifest(named: Path) -> Opened[Manifest]:
    """The manifest of a run's folder, or in a file."""
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


def open_run(named: Path, model: str | None = None) -> Run:
    """The run that a person names. Its model is the one given, the one of the run's file, the one that has arrived, or the
    embedded one.
    """
    manifest = read_manifest(named)
    if model is None and (named / RUN_FILE).is_file():
        model = read_run_file(named / RUN_FILE).model
    elif model is None and has_arrived(named / "model", manifest.message):
        return Run.open(manifest.sealed, named / "model")
    return Run.open(manifest.sealed, model_folder(model or EMBEDDED))


def model_folder(model: str) -> Path:
    return embedded.folder() if model == EMBEDDED else find_model(model)


def _engines(wanted: Sequence[str]) -> tuple[EngineTolerance, ...]:
    known = {each.engine: each for each in ENGINES}
    for each in wanted:
        if each not in known:
            raise ConfigError(
                f"no tolerance is known for engines of the class {each}",
                advice=f"take some of {', '.join(known)}",
            )
    return tuple(known[each] for each in sorted(set(wanted) or known))


def _key(text: str, where: str) -> bytes:
    try:
        return public_key_of(text)
    except ProtocolError as error:
        raise ConfigError(
            f"{where}: {text!r}: {error}", advice="echo-node keys show prints a node's own"
        ) from error
