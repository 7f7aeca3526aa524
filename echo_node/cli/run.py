"""`echo-node run`: seal a run from a TOML file, show it, share it by a link."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from echo_node.cli import run_eval
from echo_node.cli.keys import State
from echo_node.cli.run_eval import Json, Named
from echo_node.runtime.console import path_for, say

if TYPE_CHECKING:
    from echo_node.runs.spec import NewRun
    from protocol import Identity, Manifest, Opened

app = typer.Typer(no_args_is_help=True, help="Runs: create, show, share, evaluate and export them.")

app.command("eval")(run_eval.evaluate)
app.command("evals")(run_eval.show_evaluations)
app.command("export")(run_eval.export)

MEANINGS: Final = {
    "run": "the hash of the manifest, by which everything else is checked",
    "author": "the key that sealed the manifest",
    "model": "what is trained; its first weights are named by their hash",
    "adapter": "LoRA: a small adapter is trained, and travels; the base is frozen and fetched once",
    "contract": "the plug-in that makes prompts and rewards; it runs in a jail",
    "code": "packages that travel with the run and make prompts and rewards; `join` asks before it runs them",
    "claims": "what samplers claim beside their tokens: rewards, where the contract passed the purity test",
    "mode": "async: samplers push without waiting. sequential: the trainer requests every group, of the newest version",
    "async_from": "before this version the run is sequential; none: always",
    "staleness": "most steps that the policy of a group may be old when it is trained on",
    "head_every": "steps per version",
    "in_flight": "whether new weights are loaded in the middle of completions",
    "group_size": "completions of one prompt, which are compared with each other",
    "max_prompt": "most tokens of a prompt",
    "max_tokens": "most tokens of a completion",
    "temperature": "sampling temperature of every completion",
    "algorithm": "training algorithm",
    "numbers": "settings of the algorithm that differ from its defaults",
    "engines": "classes of engines that may sample, each with its own tolerance",
    "tolerances": "bounds of honest sampling by which verifiers judge, beside the known ones of each class",
    "verification": "which verdicts a group needs before it is used: checks of a share by the trainer (self), of so many"
    " verifiers (quorum), or of a random part, with a bound on the rest (sampled)",
    "joins": "new samplers that the trainer takes in ten minutes: of one address, and of all",
    "terms": "interval of the leader's heartbeats, and silence after which another may lead",
    "electors": "keys that vote on the next leader, by majority; two trainers alone take turns",
    "failover": "how another trainer takes over from a silent leader, and which electors that needs alive",
    "trainers": "the first one leads, the others stand by",
    "verifiers": "keys whose verdicts count",
    "seeds": "addresses that newcomers join at",
}


@app.command()
def new(
    file: Annotated[
        Path,
        typer.Argument(
            parser=path_for("FILE"),
            help="The run as a TOML file: name, trainers, and what differs from the defaults.",
        ),
    ],
    *,
    out: Annotated[
        Path | None,
        typer.Option(parser=path_for("--out"), help="The run's folder; the file's name without .toml."),
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", help="One setting, such as sync.staleness=2. May be repeated."),
    ] = None,
    calibrate: Annotated[
        bool | None,
        typer.Option(
            "--calibrate/--no-calibrate",
            help="Measure honest sampling with this model for a minute, once, and take the engine tolerances from it;"
            " by default unless the model is large.",
        ),
    ] = None,
    state: State = None,
    as_json: Json = False,
) -> None:
    """Seal a run with this node's key into a manifest.

    Whoever has the manifest, and a seed, can take part. The shortest file is `name = "…"` and
    `trainers = ["12D3KooW…"]`, the peer ids that `echo-node keys show` prints: the embedded model
    then learns to reverse five digits.
    """
    from echo_node.cli.progress import model_bar
    from echo_node.config import state_home
    from echo_node.contract.adversarial_test import Subject, find_impurity
    from echo_node.errors import one_line
    from echo_node.runs.prompt_preparation import EMBEDDED, EMBEDDED_GUESS
    from echo_node.runs.spec import MANIFEST, MODEL, model_folder, new_run, read_run_file, write_run
    from echo_node.storage.state_dir import prepared
    from echo_node.trainer.dry_run import dry_run
    from protocol import open_manifest

    def note(text: str) -> None:
        say(f"note: {text}", err=True)

    spec = read_run_file(file, changes or ())
    name, _, version = spec.contract.partition("@")
    impurity = find_impurity(Subject(name, version, spec.params))
    place = prepared(state or state_home())
    folder = out or file.with_suffix("")
    shipped = {EMBEDDED, EMBEDDED_GUESS}
    with model_bar() as progress:
        made = new_run(
            spec, place.identity(), progress=progress, note=note, pure=impurity is None, out=folder
        )
        if spec.model not in shipped:  # which the tests of every release take through all of it
            manifest = open_manifest(made.sealed).message
            model = folder / MODEL if spec.lora else model_folder(spec.model, progress)
            for untried in dry_run(manifest, model, place.path, progress=progress):
                note(f"{untried} was not tried with this model: its packages are not installed here")
    if spec.model not in shipped and calibrate is not False:
        made = _calibrate(made, place.identity(), model, asked=bool(calibrate), note=note)
    write_run(folder, made)
    run = open_manifest(made.sealed).id.hex()
    if as_json:
        say(json.dumps({"run": run, "manifest": str(folder / MANIFEST)}))
        return
    say(f"run {run} is sealed in {folder / MANIFEST}")
    say(f"verification: {_verification(open_manifest(made.sealed).message)}")
    if len(spec.trainers) > 1:
        say(f"failover to another trainer: {_failover(open_manifest(made.sealed))}")
    if impurity is not None:
        say(f"samplers claim no rewards, since {spec.contract} failed the purity test: {one_line(impurity)}")
    say(f"next: echo-node join --role trainer {folder}")


def _calibrate(
    made: NewRun, author: Identity, folder: Path, *, asked: bool, note: Callable[[str], None]
) -> NewRun:
    """Calibrate the classes for which the run's file gives no tolerance.

    They are measured on the run's own model.
    """
    from echo_node.cli.progress import seconds_bar
    from echo_node.models.model_source import default_cache
    from echo_node.runs.spec import EngineTable
    from echo_node.runs.tolerance_report import describe_tolerances, far_wider
    from echo_node.verifier.run_calibration import calibrate_run
    from protocol import open_manifest

    manifest = open_manifest(made.sealed).message
    given = {each.engine for each in made.spec.engines if isinstance(each, EngineTable)}
    wanted = [each.engine for each in manifest.engines if each.engine not in given]
    if not wanted:
        return made
    with seconds_bar() as progress:
        found = calibrate_run(
            manifest, folder, default_cache(), wanted, made.prompts, asked=asked, progress=progress
        )
    for why in sorted({each.why_not for each in found.values() if each.why_not}):
        names = ", ".join(name for name, each in found.items() if each.why_not == why)
        note(f"the known tolerances of {names} stay: {why}")
    measured = {name: each.tolerance for name, each in found.items() if not each.why_not}
    if not measured:
        return made
    tokens = ", ".join(f"{each.tokens} tokens of {name}" for name, each in found.items() if each.tokens)
    note(f"tolerances from {tokens}: {describe_tolerances([*measured.values()])}")
    for name in far_wider([*measured.values()]):
        note(
            f"the tolerances of {name} are far wider with this model than known: a cheat may hide in them; leave the class"
            " out with engines = […] unless its samplers are needed"
        )
    return made.with_engines(measured, author)


@app.command()
def show(
    run: Named,
    *,
    explain: Annotated[bool, typer.Option(help="Explain each line.")] = True,
    state: State = None,
    as_json: Json = False,
) -> None:
    """Show a run's manifest: leader, task and settings, each with its meaning."""
    from echo_node.config import state_home
    from echo_node.errors import one_line
    from echo_node.runs.resolve import find_local_run
    from echo_node.runs.spec import read_manifest

    rows = described(read_manifest(find_local_run(run, state or state_home())))
    if as_json:
        say(json.dumps(rows))
        return
    for name, value in rows.items():
        say(f"{name + ':':<14} {one_line(_words(value))}")
        if explain and name in MEANINGS:
            say(f"{'':<14}   {MEANINGS[name]}")


@app.command()
def link(
    run: Named,
    *,
    addresses: Annotated[
        list[str] | None,
        typer.Option(
            "--seed", help="An address to join at, as a multiaddress with its peer id. May be repeated."
        ),
    ] = None,
    state: State = None,
) -> None:
    """Print a link to a run: its id, a recent head, and addresses to join at.

    The head is the newest whose weights are available in full: a newcomer accepts nothing older.
    """
    from echo_node.config import state_home
    from echo_node.errors import ConfigError, boundary
    from echo_node.runs.resolve import find_local_run
    from echo_node.runs.spec import read_manifest
    from echo_node.storage.state_dir import prepared
    from echo_node.weights.chain_log import ChainLog
    from protocol import Link, Rules

    place = prepared(state or state_home())
    manifest = read_manifest(find_local_run(run, place.path))
    heads = place.place_of(manifest.id) / "weights" / "heads"
    journal = ChainLog(heads, Rules.of(manifest), None, durable=False) if heads.is_dir() else None
    known = journal.follower.heads if journal else ()
    whole = [head for head in known if head.message.anchor is not None]
    tip = next(reversed(whole or known), None)
    if tip is None:
        raise ConfigError(
            "a link names a head of the run, and this node knows none",
            advice="start the run's trainer, or join the run, and make the link then",
        )
    known_addresses = tuple(addresses or manifest.message.seeds) or _own_addresses(place.path)
    if not known_addresses:
        raise ConfigError(
            "a link names addresses to join at, and none is known",
            advice="give a seed's, or this node's own, with --seed; or make the link while the node runs",
        )
    with boundary(ConfigError, "making a link", advice="give other addresses with --seed"):
        made = Link(
            addresses=known_addresses,
            head=tip.id,
            run=manifest.id,
            term=tip.message.term,
            version=tip.message.version,
        )
        say(str(made))


@app.command("open")
def open_(run: Named, *, state: State = None) -> None:
    """List a run among the open ones, so that anybody can find it.

    Only a trainer of the run can open it. Takes effect within seconds, also while the trainer runs.
    """
    from echo_node.runs.role_presence import OPEN

    manifest, folder = _own(run, state)
    with _marking(folder / OPEN):
        (folder / OPEN).touch()
    say(f"{manifest.message.name} is open: while its trainer runs, anybody may find it")


@app.command()
def close(run: Named, *, state: State = None) -> None:
    """Remove a run from the open ones. Members stay; its links and its id still work."""
    from echo_node.runs.role_presence import OPEN

    manifest, folder = _own(run, state)
    with _marking(folder / OPEN):
        (folder / OPEN).unlink(missing_ok=True)
    say(f"{manifest.message.name} is closed: only who has its link or its id finds it")


def _marking(mark: Path) -> AbstractContextManager[None]:
    from echo_node.errors import StoreError, boundary

    return boundary(StoreError, f"marking the run in {mark}", advice="may you write there?")


def _own_addresses(state: Path) -> tuple[str, ...]:
    """Return the addresses of the node that runs on this state, if one does."""
    from echo_node.control.client import ask
    from echo_node.errors import EchoError
    from protocol import limits

    try:
        status = ask(state, "status", steps=0, lines=0)
    except EchoError:
        return ()
    return tuple(status["addresses"][: limits.ADDRESSES])


def _own(run: str, state: Path | None) -> tuple[Opened[Manifest], Path]:
    """Return a run that this node trains, and its folder in the state."""
    from echo_node.config import state_home
    from echo_node.errors import ConfigError
    from echo_node.runs.resolve import find_local_run
    from echo_node.runs.spec import read_manifest
    from echo_node.storage.state_dir import prepared

    place = prepared(state or state_home())
    manifest = read_manifest(find_local_run(run, place.path))
    if place.identity().public not in manifest.message.trainers:
        raise ConfigError(
            f"this node is no trainer of {manifest.message.name}",
            advice="only a trainer can open or close a run: give the trainer's --state",
        )
    return manifest, place.run(manifest.id)


def described(manifest: Opened[Manifest]) -> dict[str, Any]:
    """Describe a manifest by names and values for people."""
    from echo_node.contract.code_folder import describe_code
    from echo_node.runs.tolerance_report import describe_tolerances
    from protocol import peer_id

    message = manifest.message
    sync = message.sync
    return {
        "run": manifest.id.hex(),
        "name": message.name,
        "author": peer_id(manifest.signer),
        "model": f"{message.model.architecture}, {message.model.vocab_size} tokens, context {message.model.context}",
        "adapter": _adapter(message),
        "contract": f"{message.contract.name} {message.contract.version}",
        "code": describe_code(message.contract.wheel) if message.contract.wheel else "part of echo-node",
        "params": dict(message.contract.params),
        "claims": "rewards" if message.contract.pure else "none",
        "mode": "sequential" if sync.async_from is None else "async",
        "async_from": sync.async_from,
        "staleness": sync.staleness,
        "head_every": sync.head_every,
        "in_flight": sync.in_flight,
        "group_size": message.sampling.group_size,
        "max_prompt": message.sampling.max_prompt,
        "max_tokens": message.sampling.max_tokens,
        "temperature": message.sampling.temperature,
        "algorithm": f"{message.algorithm.name} {message.algorithm.version}",
        "numbers": dict(message.algorithm.params),
        "engines": [tolerance.engine for tolerance in message.engines],
        "tolerances": describe_tolerances(message.engines),
        "verification": {
            "policy": message.verification.policy,
            "quorum": message.verification.quorum,
            "share": message.verification.share,
        },
        "joins": {"per_address": message.joins.per_address, "total": message.joins.total},
        "terms": {"heartbeat_ms": message.terms.heartbeat_ms, "lease_ms": message.terms.lease_ms},
        "electors": [peer_id(each) for each in message.terms.electors],
        "failover": _failover(manifest),
        "trainers": [peer_id(each) for each in message.trainers],
        "verifiers": [peer_id(each) for each in message.verifiers],
        "seeds": list(message.seeds),
    }


def _adapter(message: Manifest) -> str:
    found = message.model.adapter
    if found is None:
        return "none: the whole model is trained"
    return f"LoRA, rank {found.rank}, alpha {found.alpha:g}, norm at most {found.norm:.3g}, on {', '.join(found.targets)}"


def _verification(message: Manifest) -> str:
    """Describe who verifies groups before they are trained on, and its cost."""
    from echo_node.runtime.reputation import NEWCOMER

    rule, verifiers = message.verification, len(message.verifiers)
    if rule.policy == "quorum":
        return f"{rule.quorum} of {verifiers} verifiers must find a group honest before it is learnt from"
    if rule.policy == "sampled":
        return (
            f"{verifiers} verifiers look at all groups of a new sampler and at some of the others'; unverified groups of new"
            f" samplers fill at most {rule.share:.0%} of a batch"
        )
    if rule.share <= 0:
        return (
            "none: nobody looks at groups, and whoever joins can make this run learn anything; for a run of strangers leave"
            " verification.share as it is by default, or name verifiers"
        )
    return (
        f"the trainer itself looks at the first {NEWCOMER} groups of each sampler and at {rule.share:.0%} or more of the rest"
        " before it learns from them, with a second copy of the model; verifiers, if you name some, take that work over"
    )


def _failover(manifest: Opened[Manifest]) -> str:
    from echo_node.election.candidate import LEAST_ELECTORS
    from protocol import Rules

    rules = Rules.of(manifest)
    electors = {*rules.electors}
    by_hand = "by hand, with join --role trainer --promote"
    if len(rules.trainers) == 1:
        return "none: there is no second trainer"
    if rules.takes_turns:
        return f"{by_hand}, of whichever of the two does not lead; with a third elector, such as a verifier, by itself"
    needed = rules.majority_of(2)
    how = "by itself" if len(electors) >= LEAST_ELECTORS else by_hand
    alive = "the elector is" if len(electors) == 1 else f"{needed} of the {len(electors)} electors are"
    places = [
        str(place) for place, trainer in enumerate(rules.trainers, 1) if len(electors - {trainer}) < needed
    ]
    lost = f"; nobody can follow trainer {' or '.join(places)}: name another elector, such as a verifier"
    return f"{how}, while {alive} alive{lost if places else ''}"


def _words(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    if isinstance(value, dict):
        return ", ".join(f"{name} {inner}" for name, inner in value.items()) or "as by default"
    return "none" if value is None else str(value)
