"""The command line: every way in for a person. Commands import their rooms when they run.

It turns an `EchoError` into one line and an exit code, and knows nothing of how the work is done.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from echo_node import __version__
from echo_node.errors import ConfigError, EchoError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Peer-to-peer reinforcement learning of language models.",
)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"echo-node {__version__}")
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
def demo() -> None:
    """Train a small policy with a whole swarm on this machine."""
    raise ConfigError("the demo is not part of this version", advice="`make test` shows what works")


def main() -> None:
    """Run the command and end with one clear line where something failed."""
    try:
        app()
    except EchoError as error:
        typer.echo(f"echo-node: {error}", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
