"""`echo-node status`, `watch`, `pause`, `resume`, `leave`: control a node."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from echo_node.cli.keys import State
from echo_node.runtime.console import say
from echo_node.runtime.signals import INTERRUPTED

if TYPE_CHECKING:
    from rich.console import RenderableType

    from echo_node.control.formatting import Row
    from echo_node.control.offline_report import Forgetting

Json = Annotated[bool, typer.Option("--json", help="JSON, one object a line.")]


def status(*, state: State = None, as_json: Json = False) -> None:
    """Show the running node: role, run, speed, groups and reachability.

    Groups are counted as accepted and refused, by reason.

    If no node runs, show what is in the state folder and exit with 1.
    """
    import time

    from echo_node.control import formatting, offline_report
    from echo_node.control.client import NobodyRunsError, ask

    folder = _folder(state)
    try:
        snapshot = ask(folder, "status")
    except NobodyRunsError as nobody:
        held = offline_report.look_into(folder)
        if as_json:
            say(json.dumps(held.as_json()))
        else:
            say(str(nobody))
            _show(formatting.held_rows(held, time.time()))
        raise typer.Exit(1) from None
    if as_json:
        say(json.dumps({"running": True, **snapshot}))
    else:
        _show(formatting.rows(snapshot))


def watch(*, state: State = None, as_json: Json = False) -> None:
    """Show the status and keep it up to date until Ctrl-C or until the node ends."""
    from rich.console import Console

    from echo_node.config import no_color
    from echo_node.control import formatting
    from echo_node.control.client import answers

    console = Console(no_color=no_color())
    try:
        with closing(answers(_folder(state), "watch", steps=60, lines=5)) as snapshots:
            if as_json:
                for snapshot in snapshots:
                    say(json.dumps(snapshot))
            elif console.is_terminal:
                _watch_live(console, snapshots)
            else:
                for text in _changes(formatting.line(snapshot) for snapshot in snapshots):
                    say(text)
    except KeyboardInterrupt:
        say("stopped watching: the node goes on", err=True)
        raise typer.Exit(INTERRUPTED) from None
    say("the node has ended", err=True)


def pause(*, state: State = None) -> None:
    """Pause the node until `resume`.

    A paused node stays in the swarm and finishes what it has begun.
    """
    from echo_node.control.client import ask

    ask(_folder(state), "pause")
    say("paused: echo-node resume goes on")


def resume(*, state: State = None) -> None:
    """Resume the node after `pause`.

    Other reasons to pause, such as the battery, stay.
    """
    from echo_node.control.client import ask

    folder = _folder(state)
    ask(folder, "resume")
    paused = ask(folder, "status", steps=0, lines=0).get("phase") == "paused"
    say("resumed by you, but still paused: echo-node status says why" if paused else "resumed")


def leave(
    *,
    state: State = None,
    forget_weights: Annotated[
        bool,
        typer.Option(
            "--forget-weights", help="Afterwards remove the run's weights; they can be fetched again."
        ),
    ] = False,
    forget_run: Annotated[
        bool,
        typer.Option("--forget-run", help="Afterwards remove all data of the run; the key stays."),
    ] = False,
    forget_everything: Annotated[
        bool,
        typer.Option(
            "--forget-everything", help="Afterwards remove the state, and with it the key. Needs --yes."
        ),
    ] = False,
    run: Annotated[
        str | None,
        typer.Option("--run", help="Which run to forget, by the beginning of its id, if no node runs."),
    ] = None,
    yes: Annotated[
        bool, typer.Option("--yes", help="Remove even the key, or records of what this node has signed.")
    ] = False,
) -> None:
    """Stop the node in order: deliver finished groups, say goodbye, end.

    Removes nothing unless asked to.
    """
    from echo_node.control.client import NobodyRunsError, ask, wait_until_ended
    from echo_node.control.formatting import size
    from echo_node.control.offline_report import check_forgetting, forget

    folder = _folder(state)
    what = _forgetting(weights=forget_weights, run=forget_run, everything=forget_everything, yes=yes)
    try:
        in_run = (ask(folder, "status", steps=0, lines=0).get("run") or {}).get("id")
        runs = True
    except NobodyRunsError:
        if what is None:
            raise
        in_run, runs = None, False
    wanted = check_forgetting(folder, what, run or in_run, sure=yes) if what is not None else None
    if runs:
        ask(folder, "leave")
        say("leaving: delivering finished groups", err=True)
        wait_until_ended(folder)
    say("the node has left" if runs else f"no node runs on {folder}")
    if what is not None:
        freed = forget(folder, what, wanted)
        say(f"{_REMOVED[what].format((wanted or '')[:12])}: {size(freed)} freed")


_REMOVED = {
    "weights": "the weights of run {} are removed",
    "run": "all data of run {} is removed",
    "everything": "the state and its key are removed",
}


def _forgetting(*, weights: bool, run: bool, everything: bool, yes: bool) -> Forgetting | None:
    from echo_node.errors import ConfigError

    if weights + run + everything > 1:
        raise ConfigError("--forget options exclude each other", advice="give one of them")
    if everything and not yes:
        raise ConfigError(
            "--forget-everything removes the key too, and with it this node's identity",
            advice="make a backup with echo-node keys backup, and then pass --yes as well",
        )
    return "everything" if everything else "run" if run else "weights" if weights else None


def _folder(state: Path | None) -> Path:
    from echo_node.config import state_home

    return (state or state_home()).absolute()


def _show(rows: list[Row]) -> None:
    width = max(len(name) for name, _ in rows)
    for name, text in rows:
        say(f"  {name:<{width}}  {text}")


def _changes(lines: Iterator[str]) -> Iterator[str]:
    """Yield the lines that differ from the one before in more than the time."""
    before = ""
    for text in lines:
        content = text.partition("  ")[2]
        if content != before:
            yield text
        before = content


def _watch_live(console: Any, snapshots: Iterator[dict[str, Any]]) -> None:
    from rich.live import Live

    with Live(console=console, auto_refresh=False) as live:
        for snapshot in snapshots:
            live.update(_panel(snapshot), refresh=True)


def _panel(snapshot: dict[str, Any]) -> RenderableType:
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    from echo_node.control import formatting
    from echo_node.errors import one_line

    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold")
    grid.add_column(overflow="fold")
    for name, text in formatting.rows(snapshot):
        grid.add_row(name, Text(text))
    for each in snapshot.get("log", [])[-5:]:
        grid.add_row("", Text(one_line(str(each.get("words", ""))), style="dim"))
    return Panel(grid, title="echo-node", subtitle="Ctrl-C stops watching, not the node")
