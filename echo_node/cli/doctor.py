"""`echo-node doctor`: check this machine and say how to fix what is missing.

The checks change nothing.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from echo_node.cli.keys import State
from echo_node.runtime.console import say

if TYPE_CHECKING:
    from echo_node.doctor import Finding


def doctor(
    *,
    seeds: Annotated[
        list[str] | None,
        typer.Option(
            "--seed",
            help="A node to test the network with, as a multiaddress with its peer id; the seeds of the runs in the"
            " state, or else the public ones, if left out. May be repeated.",
        ),
    ] = None,
    state: State = None,
    as_json: Annotated[bool, typer.Option("--json", help="One line of JSON for each point.")] = False,
) -> None:
    """Check this machine: Python, memory, clock, compiler, libraries, ports and disk.

    Also the key, engines, contracts and their sandbox, and the connection to the swarm. Every
    problem comes with its fix. Exits with 1 if something is wrong that a node cannot do without.
    """
    from echo_node.config import state_home
    from echo_node.doctor import abilities, clock, connectivity, libraries, machine, ports, toolchain
    from echo_node.doctor import state as state_check
    from echo_node.net.discovery.seeds import parse_seeds

    folder = (state or state_home()).absolute()
    parse_seeds(seeds or ())
    points = [
        *machine.look(),
        *clock.look(folder),
        *toolchain.look(),
        *libraries.look(),
        *ports.look(),
        *state_check.look(folder),
        *abilities.look(),
        *connectivity.look(seeds or _known_seeds(folder)),
    ]
    if as_json:
        for point in points:
            say(json.dumps(asdict(point)))
    else:
        _print(points)
    if any(point.fine is False for point in points):
        raise typer.Exit(1)


def _known_seeds(folder: Path) -> list[str]:
    """Return the seeds of the runs in the state folder, or else the public seeds.

    Unreadable manifests are skipped.
    """
    from contextlib import suppress

    from bootstrap import public_seeds
    from echo_node.errors import ConfigError
    from echo_node.net.discovery.seeds import parse_valid_seeds
    from echo_node.runs.spec import read_manifest

    found: list[str] = []
    with suppress(OSError):  # the points about the state say why
        for file in sorted(folder.glob("runs/*/weights/manifest")):
            with suppress(ConfigError):
                found += read_manifest(file).message.seeds
    return [seed.text for seed in parse_valid_seeds(found or public_seeds())]


def _print(points: list[Finding]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from echo_node.config import no_color
    from echo_node.errors import one_line

    console = Console(no_color=no_color(), highlight=False)
    signs = dict(zip((True, None, False), "+-x" if console.options.ascii_only else "✓–✗", strict=True))
    table = Table("", "", "what", "", show_header=False)
    for point in points:
        table.add_row(signs[point.fine], point.room, Text(one_line(point.what)), Text(one_line(point.says)))
    console.print(table)
    for point in points:
        if point.fix:
            console.print(
                f"{signs[point.fine]} {point.room}, {one_line(point.what)}: {one_line(point.fix)}",
                markup=False,
                soft_wrap=True,
            )
    wrong = sum(point.fine is False for point in points)
    count = "1 thing is wrong" if wrong == 1 else f"{wrong} things are wrong"
    console.print(f"{count}." if wrong else f"Nothing is wrong. {signs[None]} marks what this machine lacks.")
