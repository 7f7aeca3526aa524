"""Options of `echo-node join`, and the checks that need no network."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, TypeAlias

from echo_node.contract.jail.required import REQUIRED
from echo_node.engine.engine_classes import AUTO, best_class, check_device, device_of
from echo_node.errors import ConfigError
from echo_node.runtime.resource_limits import EVERYTHING, ResourceLimits
from echo_node.storage.state_dir import StateDir
from echo_node.telemetry.exporters import check_exporter
from protocol import Identity, Manifest, Opened

Role: TypeAlias = Literal["sampler", "trainer", "verifier", "bootstrap"]
ROLES: Final[tuple[Role, ...]] = ("sampler", "trainer", "verifier", "bootstrap")
DEVICES: Final = ("auto", "cpu", "cuda", "mps")


def accept(_manifest: Opened[Manifest]) -> bool:
    """Agree to any run."""
    return True


def _first(runs: Sequence[Opened[Manifest]]) -> Opened[Manifest]:
    return runs[0]


def no_backup(_place: StateDir) -> None:
    """Offer no backup; a line at the start reminds of it."""


@dataclass(frozen=True, slots=True)
class JoinOptions:
    """Options of `join`, parsed and checked.

    run           any form that `echo_node.runs.resolve` reads; a bootstrap needs none
    page          port of the page, 0 for any free one, None for no page
    log           names of `echo_node.telemetry.exporters` that a trainer writes its steps to
    unsafe        run the contract although a required layer of its jail does not hold
    battery       pause while the machine runs on battery
    allow_code    hashes of code that travels with a run, to which the person consents
    agree         asked whether to work for a run that was found on the network
    choose        asked which of several open runs to join
    offer_backup  called once after a new key was created
    """

    role: Role
    state: Path
    run: str | None = None
    model: str | None = None
    seeds: tuple[str, ...] = ()
    listen: tuple[str, ...] = ("/ip4/0.0.0.0/tcp/0",)
    announce: tuple[str, ...] = ()
    lan: bool = False
    bulk_port: int = 0
    engine: str | None = None
    threads: int | None = None
    slots: int | None = None
    steps: int | None = None
    first_samplers: int = 1
    promote: bool = False
    log: tuple[str, ...] = ()
    allowance: ResourceLimits = EVERYTHING
    unsafe: bool = False
    battery: bool = True
    page: int | None = None
    page_token: bool = False
    allow_code: tuple[str, ...] = ()
    agree: Callable[[Opened[Manifest]], bool] = accept
    choose: Callable[[Sequence[Opened[Manifest]]], Opened[Manifest]] = _first
    offer_backup: Callable[[StateDir], None] = no_backup

    @property
    def require(self) -> tuple[str, ...]:
        """Layers of the jail without which the run's contract is not executed."""
        return () if self.unsafe else REQUIRED


def check_flags(
    *, role: str, nproc: int, device: str, page: int | None, no_page: bool, log: Sequence[str] | None
) -> Role:
    """Refuse flags that contradict each other or name unknown things; return the role."""
    chosen = next((each for each in ROLES if each == role), None)
    if chosen is None:
        raise ConfigError(f"there is no role {role!r}", advice=f"take one of {', '.join(ROLES)}")
    if nproc > 1 and chosen != "trainer":
        raise ConfigError(f"a {chosen} computes in one process", advice="--nproc is for trainers")
    if log and chosen != "trainer":
        raise ConfigError(f"a {chosen} takes no training steps to log", advice="--log is for trainers")
    if device not in DEVICES:
        raise ConfigError(f"there is no device {device!r}", advice=f"take one of {', '.join(DEVICES)}")
    if nproc > 1 and device == "mps":
        raise ConfigError(
            "mps computes in one process", advice="--nproc is for the CPU, or for several GPUs of cuda"
        )
    if no_page and page is not None:
        raise ConfigError("--page and --no-page contradict each other", advice="leave one of them out")
    for name in log or ():
        check_exporter(name)
    return chosen


def check_manifest(options: JoinOptions, identity: Identity, manifest: Manifest) -> None:
    """Refuse a run that this node's key, engine class or device does not fit."""
    role, engine, device = options.role, options.engine, options.allowance.device
    named = {"trainer": manifest.trainers, "verifier": manifest.verifiers}.get(role)
    if named is not None and identity.public not in named:
        others = f", or --state must be the folder of one of the {len(named)} that are" if named else ""
        raise ConfigError(
            f"the key {identity.peer_id} is none of the run's {role}s",
            advice=f"its author must name it{others}",
        )
    allowed = [tolerance.engine for tolerance in manifest.engines]
    if engine is not None and engine not in allowed:
        raise ConfigError(
            f"this run does not take groups of the engine class {engine}",
            advice=f"take one of {', '.join(allowed)}",
        )
    check_device(device, torch_only=role != "sampler")
    if role == "sampler" and device not in {AUTO, "cpu"}:
        chosen = engine or best_class(allowed, device)
        if device_of(chosen, device) != device:
            raise ConfigError(
                f"engines of the class {chosen} compute on the CPU, not on {device}",
                advice="leave out --device, or take an --engine of torch if the run allows one",
            )
