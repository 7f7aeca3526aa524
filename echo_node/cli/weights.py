"""`echo-node weights`: show, verify and export a node's weights.

The node may be stopped or running.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from echo_node.runtime.console import path_for, say

if TYPE_CHECKING:
    from echo_node.weights.chain_log import Head

app = typer.Typer(no_args_is_help=True, help="Weights of a node: list, verify and export versions.")

Folder = Annotated[
    Path,
    typer.Argument(
        parser=path_for("FOLDER"),
        help="The folder of the store: runs/ID/weights in a node's state.",
        show_default=False,
    ),
]
ManifestFile = Annotated[
    Path | None,
    typer.Option(
        "--manifest",
        parser=path_for("--manifest"),
        help="The sealed manifest of the run, if the store does not have it.",
    ),
]


@app.command("log")
def show_log(
    folder: Folder,
    *,
    manifest: ManifestFile = None,
    last: Annotated[int, typer.Option(min=0, help="Number of newest versions to show; 0 for all.")] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="One line of JSON for each version.")] = False,
) -> None:
    """Show the chain of versions, oldest first. A running node is not disturbed."""
    from echo_node.weights.chain_log import ChainLog
    from echo_node.weights.store_metadata import read_metadata

    _, rules, _ = read_metadata(folder, manifest)
    journal = ChainLog(folder / "heads", rules, None, durable=False)
    current = folder / "current"
    held = current.read_text().strip() if current.is_file() else ""
    heads = journal.follower.heads[-last:] if last else journal.follower.heads
    rows = [_row(head, folder / "blobs", held) for head in heads]
    if as_json:
        for row in rows:
            say(json.dumps(row))
        return
    _print_table(rows, holding=journal.follower.holding)


@app.command()
def verify(folder: Folder, *, manifest: ManifestFile = None) -> None:
    """Verify every signature, every hash and the current state.

    Exits with 1 if something is wrong.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from echo_node.weights.store import WeightsStore
    from echo_node.weights.store_metadata import read_metadata

    _, rules, layout = read_metadata(folder, manifest)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        bar.add_task("reading every blob, head and chunk", total=None)
        with WeightsStore.open(folder, rules, layout) as store:
            problems = store.verify()
            heads, tip = len(store.follower.heads), store.tip
    for problem in problems:
        say(problem)
    if problems:
        raise typer.Exit(1)
    holds = f"version {tip.message.version} is held whole" if tip else "no version is held yet"
    say(f"{heads} heads, every signature and hash is right; {holds}")


@app.command()
def export(
    folder: Folder,
    to: Annotated[
        Path,
        typer.Argument(
            parser=path_for("TO"), help="The folder to write; it must not exist.", show_default=False
        ),
    ],
    *,
    version: Annotated[
        int | None, typer.Option(help="Which version; the one that is held if left out.")
    ] = None,
    manifest: ManifestFile = None,
    model: Annotated[
        Path | None,
        typer.Option(
            parser=path_for("--model"),
            help="A folder with the model's small files, where the store has them not.",
        ),
    ] = None,
) -> None:
    """Write a version as a Hugging Face folder for `transformers`."""
    from echo_node.weights.export import export_version
    from echo_node.weights.store_metadata import read_metadata

    opened, rules, layout = read_metadata(folder, manifest)
    done = export_version(folder, to, opened.message, rules, layout, version=version, model=model)
    say(f"version {done.version} is in {to}: {done.size / 1e6:,.1f} MB of weights")
    for name in done.missing:
        say(f"missing: {name}, which the manifest names; give a folder that has it with --model")


@app.command()
def provenance(
    version: Annotated[int, typer.Argument(help="Which version.", show_default=False)],
    *,
    folder: Annotated[
        Path | None,
        typer.Option(
            parser=path_for("--folder"),
            help="The folder of the trainer's run; if left out, the only one in this node's state.",
        ),
    ] = None,
    manifest: ManifestFile = None,
    as_json: Annotated[bool, typer.Option("--json", help="One line of JSON for each group.")] = False,
) -> None:
    """List the groups that a version was trained on.

    Each is shown with its sampler, slot and policy step. They are compared with what the version's
    head commits to. Exits with 1 if they differ.
    """
    from echo_node.errors import StoreError
    from echo_node.weights.chain_log import ChainLog
    from echo_node.weights.store_metadata import read_metadata
    from protocol import merkle_root, peer_id

    folder = folder or _only_run()
    _, rules, _ = read_metadata(folder / "weights", manifest)
    heads = ChainLog(folder / "weights" / "heads", rules, None, durable=False).follower.heads
    head = next((each for each in heads if each.message.version == version), None)
    if head is None:
        newest = heads[-1].message.version if heads else None
        raise StoreError(
            f"there is no version {version} here; the newest is {newest}",
            advice=f"echo-node weights log {folder / 'weights'} lists them",
        )
    rows = [
        {
            "group": each.id.hex(),
            "sampler": peer_id(each.sampler),
            "slot": each.slot,
            "step": each.step,
            "head": each.head.hex(),
        }
        for each in _trained_on(folder, version)
    ]
    if as_json:
        for row in rows:
            say(json.dumps(row))
    else:
        _print_groups(rows, f"Version {version}, step {head.message.step}")
    if merkle_root(sorted(bytes.fromhex(str(row["group"])) for row in rows)) != head.message.groups:
        say(f"these are not the groups that the head of version {version} commits to", err=True)
        raise typer.Exit(1)
    if not as_json:
        say(f"{len(rows)} groups: what the head of version {version} commits to")


def _only_run() -> Path:
    from echo_node.config import state_home
    from echo_node.errors import ConfigError

    found = sorted(path.parent for path in (state_home() / "runs").glob("*/journal.sqlite"))
    if len(found) != 1:
        names = ", ".join(str(path) for path in found) or "none"
        raise ConfigError(f"runs that were trained here: {names}", advice="say which with --folder")
    return found[0]


def _trained_on(folder: Path, version: int) -> list[Any]:
    """Read a version's groups from the journal or the step records.

    The records serve while a running trainer locks the journal.
    """
    from echo_node.errors import StoreError
    from echo_node.telemetry.step_db import read_records
    from echo_node.trainer.journal import read_trained

    try:
        return list(read_trained(folder / "journal.sqlite", version))
    except StoreError:
        records = read_records(folder / "records.sqlite")
        if not records:
            raise
        return [group for record in records if record.version == version for group in record.groups]


def _print_groups(rows: list[dict[str, Any]], title: str) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title)
    for name in ("group", "sampler", "slot", "step", "under head"):
        table.add_column(name, justify="right" if name in {"slot", "step"} else "left")
    for row in rows:
        table.add_row(
            row["group"][:16], row["sampler"][-8:], str(row["slot"]), str(row["step"]), row["head"][:12]
        )
    Console().print(table)


def _row(head: Head, blobs: Path, held: str) -> dict[str, Any]:
    from protocol import peer_id

    message = head.message
    before = message.previous
    routes = {
        "anchor" if route.base is None else "delta" if route.base == before else "squash": route
        for route in message.routes
    }
    return {
        "version": message.version,
        "term": message.term,
        "step": message.step,
        "head": head.id.hex(),
        "signer": peer_id(head.signer),
        "held": head.id.hex() == held,
        **{f"{kind}_bytes": route.size for kind, route in routes.items()},
        "here": sorted(kind for kind, route in routes.items() if (blobs / route.table.hex()).is_file()),
    }


def _print_table(rows: list[dict[str, Any]], *, holding: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    anchors = [row["anchor_bytes"] for row in rows if "anchor_bytes" in row]
    table = Table(title="The chain")
    for name in (
        "version",
        "term",
        "step",
        "delta",
        "of the model",
        "squash",
        "anchor",
        "here",
        "signer",
        "head",
    ):
        table.add_column(name, justify="left" if name in {"here", "signer", "head"} else "right")
    for row in rows:
        share = f"{row['delta_bytes'] / anchors[-1]:.2%}" if anchors and "delta_bytes" in row else ""
        table.add_row(
            f"{row['version']}{' ◀' if row['held'] else ''}",
            str(row["term"]),
            str(row["step"]),
            *(
                _bytes(row.get("delta_bytes")),
                share,
                _bytes(row.get("squash_bytes")),
                _bytes(row.get("anchor_bytes")),
            ),
            ", ".join(row["here"]),
            row["signer"][-8:],
            row["head"][:12],
        )
    console = Console()
    console.print(table)
    if holding:
        console.print("The leader equivocated: the chain is halted until the next term.")


def _bytes(size: int | None) -> str:
    return "" if size is None else f"{size:,}"
