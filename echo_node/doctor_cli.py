"""`echo-node doctor`: what this machine has for a node, what is missing, and what to do about it.

It looks and changes nothing. The command imports its rooms when it runs.
"""

from __future__ import annotations

import json
import platform
import sys
from dataclasses import asdict, dataclass
from typing import Annotated

import typer


@dataclass(frozen=True, slots=True)
class Point:
    """One thing that was looked at. `fine` is None where it may well be missing."""

    room: str
    what: str
    fine: bool | None
    says: str


def doctor(
    *, as_json: Annotated[bool, typer.Option("--json", help="One line of JSON for each point.")] = False
) -> None:
    """Look at this machine: Python, cores and memory, engines, contracts, and how tightly contracts are jailed.

    Ends with 1 if something is wrong that a node cannot do without.
    """
    points = [*_machine(), *_engines(), *_contracts(), *_jail()]
    if as_json:
        for point in points:
            typer.echo(json.dumps(asdict(point)))
    else:
        _print(points)
    if any(point.fine is False for point in points):
        raise typer.Exit(1)


def _machine() -> list[Point]:
    from echo_node.engine.machine import available_memory, cores, free_cores

    memory = available_memory()
    return [
        Point("machine", "Python", (3, 11) <= sys.version_info[:2] <= (3, 13), platform.python_version()),
        Point("machine", "cores", True, f"{len(cores())}, of which {free_cores()} are free now"),
        Point(
            "machine",
            "memory",
            None if memory is None else memory > 2**30,
            "this system does not tell" if memory is None else f"{memory / 1e9:.1f} GB free",
        ),
    ]


def _engines() -> list[Point]:
    from echo_node.engine.kinds import kinds

    found = kinds()
    points = [
        Point(
            "engines",
            kind.engine_class,
            True if kind.installed else None,
            f"on {kind.device}" if kind.installed else f"{kind.why_not}: {kind.install}",
        )
        for kind in found
    ]
    if not any(kind.installed for kind in found):
        points.append(Point("engines", "any", False, f"a sampler needs one: {found[0].install}"))
    return points


def _contracts() -> list[Point]:
    from echo_node.contract import available

    return [
        Point("contracts", f"{each.name} {each.version}".strip(), True, each.package or "built in")
        for each in available()
    ]


def _jail() -> list[Point]:
    from echo_node.contract.sandbox import layers
    from echo_node.errors import EchoError

    try:
        found = layers()
    except EchoError as error:
        return [Point("jail", "contracts", False, str(error))]
    return [
        Point("jail", layer.name, True if layer.active else None, "active" if layer.active else layer.why_not)
        for layer in found
    ]


def _print(points: list[Point]) -> None:
    from rich.console import Console
    from rich.table import Table

    from echo_node.config import no_color

    console = Console(no_color=no_color(), highlight=False)
    signs = {True: "✓", None: "–", False: "✗"}
    table = Table("", "", "what", "", show_header=False)
    for point in points:
        table.add_row(signs[point.fine], point.room, point.what, point.says)
    console.print(table)
    wrong = [point for point in points if point.fine is False]
    console.print(
        f"{len(wrong)} things are wrong." if wrong else "Nothing is wrong. – marks what this machine has not."
    )
