"""`echo-node run`: an operator's run from a short TOML file to a sealed manifest and a link to share.

Commands import their rooms when they run.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from echo_node.keys_cli import State

if TYPE_CHECKING:
    from protocol import Manifest, Opened

app = typer.Typer(no_args_is_help=True, help="Runs: make one, look at it, pass it on.")

Named = Annotated[
    Path,
    typer.Argument(help="A run's folder, or its manifest's file.", metavar="RUN", show_default=False),
]
Json = Annotated[bool, typer.Option("--json", help="One line of JSON.")]


@app.command()
def new(
    file: Annotated[
        Path,
        typer.Argument(help="The run as a TOML file: name, trainers, and what differs from the defaults."),
    ],
    *,
    out: Annotated[Path | None, typer.Option(help="The run's folder; the file's name without .toml.")] = None,
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
        typer.echo(json.dumps({"run": run, "manifest": str(folder / MANIFEST)}))
        return
    typer.echo(f"run {run} is sealed in {folder / MANIFEST}")
    typer.echo(f"next: echo-node join --role trainer {folder}")


@app.command()
def show(run: Named, *, as_json: Json = False) -> None:
    """What a run is: who leads it, what is learnt, and by which numbers."""
    from echo_node.errors import one_line
    from echo_node.runfile import read_manifest

    told = described(read_manifest(run))
    if as_json:
        typer.echo(json.dumps(told))
        return
    for name, value in told.items():
        typer.echo(f"{name + ':':<14} {one_line(_words(value))}")


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
    """A link to a run as it stands: its id, the newest head that this node knows, and where to knock."""
    from echo_node.config import state_home
    from echo_node.errors import ConfigError, boundary
    from echo_node.runfile import read_manifest
    from echo_node.state import prepared
    from echo_node.weights.journal import Journal
    from protocol import Link, Rules

    manifest = read_manifest(run)
    heads = prepared(state or state_home()).run(manifest.id) / "weights" / "heads"
    journal = Journal(heads, Rules.of(manifest), None, durable=False) if heads.is_dir() else None
    tip = journal.follower.tip if journal else None
    if tip is None:
        raise ConfigError(
            "a link names a head of the run, and this node knows none",
            advice="start the run's trainer, or join the run, and make the link then",
        )
    with boundary(ConfigError, "making a link"):
        made = Link(
            addresses=tuple(addresses or manifest.message.seeds),
            head=tip.id,
            run=manifest.id,
            term=tip.message.term,
            version=tip.message.version,
        )
        typer.echo(str(made))


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
        "in_flight": sync.in_flight,
        "group_size": told.sampling.group_size,
        "max_prompt": told.sampling.max_prompt,
        "max_tokens": told.sampling.max_tokens,
        "temperature": told.sampling.temperature,
        "algorithm": f"{told.algorithm.name} {told.algorithm.version}",
        "numbers": dict(told.algorithm.params),
        "engines": [tolerance.engine for tolerance in told.engines],
        "trainers": [peer_id(each) for each in told.trainers],
        "verifiers": [peer_id(each) for each in told.verifiers],
        "seeds": list(told.seeds),
    }


def _words(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    if isinstance(value, dict):
        return ", ".join(f"{name} {inner}" for name, inner in value.items()) or "as by default"
    return "none" if value is None else str(value)
