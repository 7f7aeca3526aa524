"""The command line: every way in for a person. Commands import their rooms when they run.

It turns an `EchoError` into one line and an exit code, and knows nothing of how the work is done.
"""

from __future__ import annotations

import inspect
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from echo_node import (
    __version__,
    contract_cli,
    doctor_cli,
    engines_cli,
    join_cli,
    keys_cli,
    program,
    run_cli,
    service_cli,
    status_cli,
    verifier_cli,
    weights_cli,
)
from echo_node.ctrl_c import INTERRUPTED, ctrl_c_ends_at_once
from echo_node.given import path_for
from echo_node.saying import say

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Peer-to-peer reinforcement learning of language models.",
)

app.add_typer(contract_cli.app, name="contract")
app.add_typer(weights_cli.app, name="weights")
app.add_typer(verifier_cli.app, name="verifier")
app.add_typer(run_cli.app, name="run")
app.add_typer(keys_cli.app, name="keys")
app.add_typer(service_cli.app, name="service")
app.command()(join_cli.join)
for _command in (status_cli.status, status_cli.watch, status_cli.pause, status_cli.resume, status_cli.leave):
    app.command()(_command)
app.command()(engines_cli.engines)
app.command()(doctor_cli.doctor)


def _print_version(asked: bool) -> None:
    if asked:
        say(f"echo-node {__version__}")
        raise typer.Exit


@app.callback()
def root(
    *,
    _version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """Peer-to-peer reinforcement learning of language models."""


@app.command()
def demo(
    *,
    mode: Annotated[
        str | None,
        typer.Option(
            help="async: samplers push, the trainer draws (the default). sequential: the trainer asks."
        ),
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Optimiser steps to take (220).")] = None,
    seed: Annotated[
        int | None, typer.Option(help="Of keys and luck; in memory, sequential runs repeat bit for bit (0).")
    ] = None,
    samplers: Annotated[int | None, typer.Option(help="How many samplers (2).")] = None,
    hostile: Annotated[
        bool,
        typer.Option("--hostile", help="Let two samplers more take part who cheat, and see them caught."),
    ] = False,
    in_memory: Annotated[
        bool,
        typer.Option(
            "--in-memory",
            help="One process without a network, a trainer and samplers alone: quick, and exact to repeat.",
        ),
    ] = False,
    config: Annotated[
        Path | None,
        typer.Option(parser=path_for("--config"), help="A TOML file with these and other settings."),
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", help="One setting, such as algorithm.learning_rate=1e-4. May be repeated."),
    ] = None,
    out: Annotated[
        Path, typer.Option(parser=path_for("--out"), help="Where the curves, the steps and the settings go.")
    ] = Path("runs/demo"),
    keep: Annotated[
        bool, typer.Option("--keep", help="Keep every node's folder afterwards, and say where.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="End with one line of JSON on standard output.")
    ] = False,
) -> None:
    """Watch a swarm learn on this machine: a seed, a trainer, a verifier and two samplers, each a process of its own, teach
    a small model to reverse digits.

    Nothing to configure, nothing leaves this machine. It takes two minutes or so on two cores, shows reward, versions,
    peers and verdicts as it goes, and ends with a summary and a picture of the curves. Ctrl-C ends it in order, a second
    one at once.
    """
    from echo_node.config import DemoConfig, load_config
    from echo_node.ranges import check_ranges

    given = load_config(
        DemoConfig,
        config,
        changes or (),
        mode=mode,
        steps=steps,
        seed=seed,
        samplers=samplers,
        hostile=hostile or None,
        in_memory=in_memory or None,
    )
    check_ranges(given.algorithm)
    with ctrl_c_ends_at_once():
        from echo_node.demo.command import run_demo  # takes a while, so only once the settings are right

        if given.in_memory:
            import echo_node.demo.swarm  # noqa: F401 - brings torch, whose import Ctrl-C must not break into

    code = run_demo(given, out, as_json=as_json, keep=keep)
    if code == INTERRUPTED:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # a model may still be being built in a thread: nobody waits for it
    raise typer.Exit(code)


def _let_help_flow(commands: typer.Typer) -> None:
    """Paragraphs of help as wide as the terminal is: the lines of the source are not those of a person's screen."""
    for each in commands.registered_commands:
        told = inspect.getdoc(each.callback) or ""
        each.help = "\n\n".join(" ".join(paragraph.split()) for paragraph in told.split("\n\n"))
    for group in commands.registered_groups:
        if group.typer_instance is not None:
            _let_help_flow(group.typer_instance)


_let_help_flow(app)


def main() -> None:
    """Run the command and end with one clear line where something failed."""
    program.main(app, "echo-node")


if __name__ == "__main__":
    main()
