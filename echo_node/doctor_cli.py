"""`echo-node doctor`: what this machine has for a node, what is missing, and what to do about it.

It looks and changes nothing. The command imports its rooms when it runs.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from echo_node.keys_cli import State
from echo_node.saying import say

if TYPE_CHECKING:
    from echo_node.doctor import Point


def doctor(
    *,
    seeds: Annotated[
        list[str] | None,
        typer.Option(
            "--seed",
            help="A node to try the network with, as a multiaddress with its peer id; those of the runs in the state,"
            " or else the public ones, if left out. May be repeated.",
        ),
    ] = None,
    state: State = None,
    as_json: Annotated[bool, typer.Option("--json", help="One line of JSON for each point.")] = False,
) -> None:
    """Look at this machine: Python, memory, clock, compiler, libraries, ports, disk, key, engines, contracts and their jail,
    and the way into the swarm.

    Every finding that is not fine says how to mend it. Ends with 1 if something is wrong that a node cannot do without.
    """
    from echo_node.config import state_home
    from echo_node.doctor import abilities, building, clock, libraries, machine, ports, reaching, storing
    from echo_node.net.meeting.seeds import parse_seeds

    folder = (state or state_home()).absolute()
    parse_seeds(seeds or ())
    points = [
        *machine.look(),
        *clock.look(folder),
        *building.look(),
        *libraries.look(),
        *ports.look(),
        *storing.look(folder),
        *abilities.look(),
        *reaching.look(seeds or _known_seeds(folder)),
    ]
    if as_json:
        for point in points:
            say(json.dumps(asdict(point)))
    else:
        _print(points)
    if any(point.fine is False for point in points):
        raise typer.Exit(1)


def _known_seeds(folder: Path) -> list[str]:
    """Those of the runs that this node holds something of; else the public ones. What cannot be read is left out."""
    from contextlib import suppress

    from bootstrap import public_seeds
    from echo_node.errors import ConfigError
    from echo_node.net.meeting.seeds import skim_seeds
    from echo_node.runfile import read_manifest

    found: list[str] = []
    with suppress(OSError):  # the points about the state say why
        for file in sorted(folder.glob("runs/*/weights/manifest")):
            with suppress(ConfigError):
                found += read_manifest(file).message.seeds
    return [seed.text for seed in skim_seeds(found or public_seeds())]


def _print(points: list[Point]) -> None:
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
    told = "1 thing is wrong" if wrong == 1 else f"{wrong} things are wrong"
    console.print(
        f"{told}." if wrong else f"Nothing is wrong. {signs[None]} marks what this machine has not."
    )
