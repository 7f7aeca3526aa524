"""The command line: every command of `echo-node`.

Commands import their modules when they run, so that `--help` stays fast. `exit_codes.main` turns
an `EchoError` into one line and an exit code.
"""

from __future__ import annotations

import inspect
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from echo_node import __version__
from echo_node.cli import contract, doctor, engines, join, keys, run, service, status, verifier, weights
from echo_node.runtime import exit_codes
from echo_node.runtime.console import path_for, say
from echo_node.runtime.signals import INTERRUPTED, ctrl_c_ends_at_once

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Peer-to-peer reinforcement learning of language models.",
)

app.add_typer(contract.app, name="contract")
app.add_typer(weights.app, name="weights")
app.add_typer(verifier.app, name="verifier")
app.add_typer(run.app, name="run")
app.add_typer(keys.app, name="keys")
app.add_typer(service.app, name="service")
app.command()(join.join)
for _command in (status.status, status.watch, status.pause, status.resume, status.leave):
    app.command()(_command)
app.command()(engines.engines)
app.command()(doctor.doctor)


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
    model: Annotated[
        str | None,
        typer.Option(
            help="embedded: a tiny model reverses digits (the default). smollm2: SmolLM2-135M, a pretrained"
            " language model, learns to name the larger of two numbers, in about ten minutes."
        ),
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(
            help="guess-number: a tiny model learns to find a number in four guesses, told higher or lower"
            " after each: an environment of several turns."
        ),
    ] = None,
    mode: Annotated[
        str | None,
        typer.Option(
            help="async: samplers push, the trainer draws (the default). sequential: the trainer requests."
        ),
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Optimiser steps to take (220; 60 with smollm2).")] = None,
    seed: Annotated[
        int | None,
        typer.Option(help="Seed of keys and sampling; in memory, sequential runs repeat bit for bit (0)."),
    ] = None,
    samplers: Annotated[int | None, typer.Option(help="Number of samplers (2).")] = None,
    hostile: Annotated[
        bool,
        typer.Option("--hostile", help="Add two samplers that cheat, and see them caught."),
    ] = False,
    in_memory: Annotated[
        bool,
        typer.Option(
            "--in-memory",
            help="One process without a network, only a trainer and samplers: quick and reproducible.",
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
        Path, typer.Option(parser=path_for("--out"), help="Folder for the plot, the steps and the settings.")
    ] = Path("runs/demo"),
    keep: Annotated[
        bool, typer.Option("--keep", help="Keep every node's folder afterwards and print where it is.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="End with one line of JSON on standard output.")
    ] = False,
) -> None:
    """Run a swarm on this machine that teaches a small model to reverse digits.

    A seed, a trainer, a verifier and two samplers, each a process of its own. Nothing to
    configure, nothing leaves this machine. It takes about two minutes on two cores, shows reward,
    versions, peers and verdicts, and ends with a summary and a plot. Ctrl-C stops it in order, a
    second one at once.
    """
    from echo_node.config import DemoConfig, load_config
    from echo_node.runs.algorithm import check_ranges

    settings = load_config(
        DemoConfig,
        config,
        changes or (),
        model=model,
        task=task,
        mode=mode,
        steps=steps,
        seed=seed,
        samplers=samplers,
        hostile=hostile or None,
        in_memory=in_memory or None,
    )
    check_ranges(settings.algorithm)
    with ctrl_c_ends_at_once():
        from echo_node.cli.demo import run_demo  # takes a while, so only once the settings are right

        if settings.in_memory:
            import echo_node.demo.swarm  # noqa: F401 - brings torch, whose import Ctrl-C must not break into

    code = run_demo(settings, out, as_json=as_json, keep=keep)
    if code == INTERRUPTED:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # do not wait for a thread that may still build a model
    raise typer.Exit(code)


def _let_help_flow(commands: typer.Typer) -> None:
    """Join the lines of each paragraph of help, so that the terminal wraps them."""
    for each in commands.registered_commands:
        text = inspect.getdoc(each.callback) or ""
        each.help = "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n"))
    for group in commands.registered_groups:
        if group.typer_instance is not None:
            _let_help_flow(group.typer_instance)


_let_help_flow(app)


def main() -> None:
    """Run the command; end with one line and an exit code where something failed."""
    exit_codes.main(app, "echo-node")


if __name__ == "__main__":
    main()
