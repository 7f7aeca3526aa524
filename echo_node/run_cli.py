"""`echo-node run`: an operator's run from a short TOML file to a sealed manifest and a link to share.

Commands import their rooms when they run.
"""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from echo_node import eval_cli
from echo_node.eval_cli import Json, Named
from echo_node.given import path_for
from echo_node.keys_cli import State
from echo_node.saying import say

if TYPE_CHECKING:
    from protocol import Manifest, Opened

app = typer.Typer(no_args_is_help=True, help="Runs: make one, look at it, pass it on.")

app.command("eval")(eval_cli.evaluate)
app.command("export")(eval_cli.export)

MEANINGS: Final = {
    "run": "the hash of the manifest: whoever has it can check everything else",
    "author": "whose key has sealed the manifest",
    "model": "what is trained; its first weights are named by their hash",
    "contract": "the plug-in that makes prompts and rewards; it runs in a jail",
    "mode": "async: samplers push without waiting. sequential: the trainer asks, and every group is of the newest version",
    "async_from": "before this version the run is sequential; none: always",
    "staleness": "a group may be trained on if its policy is at most so many steps old",
    "head_every": "so many steps are one version",
    "in_flight": "whether new weights go into completions that run",
    "group_size": "completions of one prompt, which are compared with each other",
    "max_prompt": "tokens of a prompt, at most",
    "max_tokens": "tokens of a completion, at most",
    "temperature": "at which every completion is drawn",
    "algorithm": "how weights follow from rewards",
    "numbers": "those of the algorithm that differ from its defaults",
    "engines": "classes of engines that may sample, each with its own tolerance",
    "verification": "whose word counts before a group is used: the trainer's own looks at a share (self), so many"
    " verifiers (quorum), or a drawn part, with a bound on the rest (sampled)",
    "terms": "how often the leader says that it is there, and after how much silence another may lead",
    "electors": "who votes on the next leader, which takes more than half of them; two trainers alone take turns",
    "failover": "how another trainer comes to lead when the leader is silent, and who must be alive for it",
    "trainers": "the first one leads, the others stand by",
    "verifiers": "whose verdicts count",
    "seeds": "where newcomers knock",
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
    state: State = None,
    as_json: Json = False,
) -> None:
    """Seal a run with this node's key. Whoever has the manifest, and a seed to meet others at, can take part.

    The shortest file is `name = "…"` and `trainers = ["12D3KooW…"]`, the peer ids that `echo-node keys show` prints:
    the embedded model then learns to reverse five digits.
    """
    from echo_node.config import state_home
    from echo_node.runfile import MANIFEST, new_run, read_run_file, write_run
    from echo_node.state import prepared
    from protocol import open_manifest

    told = read_run_file(file, changes or ())
    sealed = new_run(told, prepared(state or state_home()).identity())
    folder = out or file.with_suffix("")
    write_run(folder, told, sealed)
    run = open_manifest(sealed).id.hex()
    if as_json:
        say(json.dumps({"run": run, "manifest": str(folder / MANIFEST)}))
        return
    say(f"run {run} is sealed in {folder / MANIFEST}")
    if len(told.trainers) > 1:
        say(f"when its leader is gone, another trainer leads: {_failover(open_manifest(sealed))}")
    say(f"next: echo-node join --role trainer {folder}")


@app.command()
def show(
    run: Named,
    *,
    explain: Annotated[bool, typer.Option(help="Say what each of it means.")] = True,
    state: State = None,
    as_json: Json = False,
) -> None:
    """What a run is: who leads it, what is learnt, and by which numbers, each with its meaning."""
    from echo_node.config import state_home
    from echo_node.errors import one_line
    from echo_node.runfile import read_manifest
    from echo_node.seeking import on_this_machine

    told = described(read_manifest(on_this_machine(run, state or state_home())))
    if as_json:
        say(json.dumps(told))
        return
    for name, value in told.items():
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
            "--seed", help="Where newcomers can knock, as a multiaddress with its peer id. May be repeated."
        ),
    ] = None,
    state: State = None,
) -> None:
    """A link to a run as it stands: its id, a recent head, and where to knock.

    The head is the newest whose weights can be had whole: a newcomer accepts nothing that is older.
    """
    from echo_node.config import state_home
    from echo_node.errors import ConfigError, boundary
    from echo_node.runfile import read_manifest
    from echo_node.seeking import on_this_machine
    from echo_node.state import prepared
    from echo_node.weights.journal import Journal
    from protocol import Link, Rules

    place = prepared(state or state_home())
    manifest = read_manifest(on_this_machine(run, place.path))
    heads = place.place_of(manifest.id) / "weights" / "heads"
    journal = Journal(heads, Rules.of(manifest), None, durable=False) if heads.is_dir() else None
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
            "a link says where to knock, and no address is known",
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
    """Let anybody find a run of which this node is a trainer: it joins the list that newcomers choose from.

    It takes effect within seconds, also while the trainer runs.
    """
    from echo_node.node import OPEN

    manifest, folder = _own(run, state)
    with _marking(folder / OPEN):
        (folder / OPEN).touch()
    say(f"{manifest.message.name} is open: while its trainer runs, anybody may find it")


@app.command()
def close(run: Named, *, state: State = None) -> None:
    """Take a run off the list that newcomers choose from. Who has joined stays, and its links and its id still work."""
    from echo_node.node import OPEN

    manifest, folder = _own(run, state)
    with _marking(folder / OPEN):
        (folder / OPEN).unlink(missing_ok=True)
    say(f"{manifest.message.name} is closed: only who has its link or its id finds it")


def _marking(mark: Path) -> AbstractContextManager[None]:
    from echo_node.errors import StoreError, boundary

    return boundary(StoreError, f"marking the run in {mark}", advice="may you write there?")


def _own_addresses(state: Path) -> tuple[str, ...]:
    """Where the node that runs on this state can be reached, as it says itself."""
    from echo_node.control.asking import ask
    from echo_node.errors import EchoError
    from protocol import limits

    try:
        told = ask(state, "status", steps=0, lines=0)
    except EchoError:
        return ()
    return tuple(told["addresses"][: limits.ADDRESSES])


def _own(run: str, state: Path | None) -> tuple[Opened[Manifest], Path]:
    """A run that this node leads, and the folder of what it holds of it."""
    from echo_node.config import state_home
    from echo_node.errors import ConfigError
    from echo_node.runfile import read_manifest
    from echo_node.seeking import on_this_machine
    from echo_node.state import prepared

    place = prepared(state or state_home())
    manifest = read_manifest(on_this_machine(run, place.path))
    if place.identity().public not in manifest.message.trainers:
        raise ConfigError(
            f"this node is no trainer of {manifest.message.name}",
            advice="only a trainer can open or close a run: give the trainer's --state",
        )
    return manifest, place.run(manifest.id)


def described(manifest: Opened[Manifest]) -> dict[str, Any]:
    """The manifest in names and numbers that people know."""
    from protocol import peer_id

    told = manifest.message
    sync = told.sync
    return {
        "run": manifest.id.hex(),
        "name": told.name,
        "author": peer_id(manifest.signer),
        "model": f"{told.model.architecture}, {told.model.vocab_size} tokens, context {told.model.context}",
        "contract": f"{told.contract.name} {told.contract.version}",
        "params": dict(told.contract.params),
        "mode": "sequential" if sync.async_from is None else "async",
        "async_from": sync.async_from,
        "staleness": sync.staleness,
        "head_every": sync.head_every,
        "in_flight": sync.in_flight,
        "group_size": told.sampling.group_size,
        "max_prompt": told.sampling.max_prompt,
        "max_tokens": told.sampling.max_tokens,
        "temperature": told.sampling.temperature,
        "algorithm": f"{told.algorithm.name} {told.algorithm.version}",
        "numbers": dict(told.algorithm.params),
        "engines": [tolerance.engine for tolerance in told.engines],
        "verification": {
            "policy": told.verification.policy,
            "quorum": told.verification.quorum,
            "share": told.verification.share,
        },
        "terms": {"heartbeat_ms": told.terms.heartbeat_ms, "lease_ms": told.terms.lease_ms},
        "electors": [peer_id(each) for each in told.terms.electors],
        "failover": _failover(manifest),
        "trainers": [peer_id(each) for each in told.trainers],
        "verifiers": [peer_id(each) for each in told.verifiers],
        "seeds": list(told.seeds),
    }


def _failover(manifest: Opened[Manifest]) -> str:
    from echo_node.terms.electing import LEAST_ELECTORS
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
