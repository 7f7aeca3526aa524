"""`echo-node contract`: list, show, test and scaffold reward contracts.

Contract code runs in separate processes. Modules are imported inside the commands, so that
`--help` stays fast.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from echo_node.runtime.console import path_for, printable, say

if TYPE_CHECKING:
    from echo_node.contract.adversarial_test import Finding, Subject

app = typer.Typer(no_args_is_help=True, help="Reward contracts: list, show, test and write them.")

Name = Annotated[
    str, typer.Argument(help="The contract, as NAME or NAME@VERSION.", metavar="NAME", show_default=False)
]
Parameters = Annotated[
    list[str] | None,
    typer.Option("--param", help="A parameter, such as digits=7. May be repeated."),
]
Json = Annotated[bool, typer.Option("--json", help="One line of JSON for each row.")]


@app.command("list")
def list_contracts(*, as_json: Json = False) -> None:
    """List the installed contracts, without loading their code."""
    from echo_node.contract.registry import available

    rows = [
        {"name": listing.name, "version": listing.version, "package": listing.package}
        for listing in available()
    ]
    if as_json:
        for row in rows:
            say(json.dumps(row))
        return
    _print_table(
        "Contracts",
        ("name", "version", "from"),
        [(row["name"], row["version"] or "?", row["package"] or "built in") for row in rows],
    )


@app.command("test")
def run_tests(
    name: Name,
    *,
    params: Parameters = None,
    seconds: Annotated[
        float, typer.Option(min=1.0, help="Time limit of each of its processes, in seconds.")
    ] = 30.0,
    as_json: Json = False,
) -> None:
    """Test a contract as an adversary would; one verdict per point.

    Exits with 1 unless all pass.
    """
    from echo_node.contract.adversarial_test import PASSED, try_contract

    findings = try_contract(_subject(name, params), seconds=seconds)
    if as_json:
        for finding in findings:
            row = {"point": finding.point, "verdict": finding.verdict, "found": finding.found}
            say(json.dumps(row))
    else:
        _print_findings(name, findings)
    if any(finding.verdict != PASSED for finding in findings):
        raise typer.Exit(1)


@app.command()
def show(
    name: Name,
    *,
    params: Parameters = None,
    samples: Annotated[int, typer.Option(min=1, max=100, help="Number of prompts.")] = 3,
    as_json: Json = False,
) -> None:
    """Show some prompts with right and wrong answers and their scores.

    The right answer is the contract's own.
    """
    from echo_node.contract.adversarial_test import show_contract
    from echo_node.errors import one_line

    shown = show_contract(_subject(name, params), samples=samples)
    about, rows = shown.about, shown.steps["show"]["samples"]
    if as_json:
        for row in rows:
            say(json.dumps(row))
        return
    say(f"{about['name']} {about['version']}, scores from {about['low']:g} to {about['high']:g}")
    for line in about["about"].splitlines():
        say(one_line(line.strip()))
    for row in rows:
        say("")
        for line in [
            *(f"[system] {line}" for line in row["system"].splitlines()),
            *row["prompt"].splitlines(),
        ]:
            say(f"  │ {one_line(line)}")
        _print_answer("its own answer", row["answer"], row["answer_score"])
        _print_answer("a wrong answer", row["wrong"], row["wrong_score"])


@app.command()
def new(
    name: Annotated[
        str, typer.Argument(help="The name of the contract, such as word-count.", show_default=False)
    ],
    *,
    folder: Annotated[
        Path | None,
        typer.Option(
            parser=path_for("--folder"), help="Where the package goes; echo-contract-NAME here if left out."
        ),
    ] = None,
) -> None:
    """Write a new contract as an installable package with a test."""
    from echo_node.contract.scaffold import write_contract

    where = folder if folder is not None else Path(f"echo-contract-{name}")
    for file in write_contract(name, where):
        say(f"wrote {file}")
    say(f"next: pip install --editable {where}, then echo-node contract test {name}")
    say(f'then: contract = "{name}@1" in a run file, and echo-node run new: the code travels with the run')


def _subject(name: str, params: list[str] | None) -> Subject:
    from echo_node.contract.adversarial_test import Subject

    known, _, version = name.partition("@")
    return Subject(known, version, dict(_param(word) for word in params or ()))


def _param(word: str) -> tuple[str, Any]:
    """Parse `name=value`; the value is TOML, or a string where it is not valid TOML."""
    from echo_node.errors import ConfigError

    name, equals, text = word.partition("=")
    if not equals or not name:
        raise ConfigError(f"--param takes name=value, not {word!r}", advice="such as digits=7")
    try:
        return name, tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return name, text


def _print_answer(what: str, text: str, score: dict[str, Any]) -> None:
    from echo_node.errors import one_line

    worth = f"{score['value']:g}" if "value" in score else "an error"
    say(f"  {what}: {one_line(text)}")
    say(f"    scores {worth}: {score.get('reason', score.get('error'))}")


def _print_findings(name: str, findings: list[Finding]) -> None:
    rows = [(finding.point, finding.verdict, finding.found) for finding in findings]
    _print_table(f"Test of {name}", ("point", "verdict", "found"), rows)


def _print_table(title: str, columns: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(printable(title)))
    for column in columns:
        table.add_column(column, overflow="fold")
    colours = {"passed": "green", "failed": "bold red", "not tried": "yellow"}
    for row in rows:
        table.add_row(*(Text(printable(cell), style=colours.get(cell, "")) for cell in row))
    Console().print(table)
