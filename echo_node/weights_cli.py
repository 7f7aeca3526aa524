"""`echo-node weights`: the chain in a store as a table, a check of everything in it, and a version as a folder of files.

For people who want to see what a node holds without starting it. Commands import their rooms when they run.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from echo_node.weights.journal import Head

app = typer.Typer(
    no_args_is_help=True, help="Look at the weights that a node holds, check them, take them out."
)

Folder = Annotated[Path, typer.Argument(help="The folder of the store.", show_default=False)]
ManifestFile = Annotated[
    Path | None,
    typer.Option("--manifest", help="The sealed manifest of the run, if the store does not have it."),
]


@app.command("log")
def show_log(
    folder: Folder,
    *,
    manifest: ManifestFile = None,
    last: Annotated[int, typer.Option(help="Show so many of the newest versions; 0 for all.")] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="One line of JSON for each version.")] = False,
) -> None:
    """The chain as this node took it, oldest first. A running node is not disturbed."""
    from echo_node.weights.journal import Journal
    from echo_node.weights.papers import read_papers

    _, rules, _ = read_papers(folder, manifest)
    journal = Journal(folder / "heads", rules, None, durable=False)
    current = folder / "current"
    held = current.read_text().strip() if current.is_file() else ""
    heads = journal.follower.heads[-last:] if last else journal.follower.heads
    rows = [_row(head, folder / "blobs", held) for head in heads]
    if as_json:
        for row in rows:
            typer.echo(json.dumps(row))
        return
    _print_table(rows, holding=journal.follower.holding)


@app.command()
def verify(folder: Folder, *, manifest: ManifestFile = None) -> None:
    """Read everything again: every signature, every hash, the state and the way to it. Ends with 1 if something is wrong."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from echo_node.weights.papers import read_papers
    from echo_node.weights.store import WeightsStore

    _, rules, layout = read_papers(folder, manifest)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        bar.add_task("reading every blob, head and chunk", total=None)
        with WeightsStore.open(folder, rules, layout) as store:
            problems = store.verify()
            heads, tip = len(store.follower.heads), store.tip
    for problem in problems:
        typer.echo(problem)
    if problems:
        raise typer.Exit(1)
    holds = f"version {tip.message.version} is held whole" if tip else "no version is held yet"
    typer.echo(f"{heads} heads, every signature and hash is right; {holds}")


@app.command()
def export(
    folder: Folder,
    to: Annotated[Path, typer.Argument(help="The folder to write; it must not exist.", show_default=False)],
    *,
    version: Annotated[
        int | None, typer.Option(help="Which version; the one that is held if left out.")
    ] = None,
    manifest: ManifestFile = None,
    model: Annotated[
        Path | None, typer.Option(help="A folder with the model's small files, where the store has them not.")
    ] = None,
) -> None:
    """Write a version as a Hugging Face folder, which `transformers` opens."""
    from echo_node.weights.export import export_version
    from echo_node.weights.papers import read_papers

    opened, rules, layout = read_papers(folder, manifest)
    done = export_version(folder, to, opened.message, rules, layout, version=version, model=model)
    typer.echo(f"version {done.version} is in {to}: {done.size / 1e6:,.1f} MB of weights")
    for name in done.missing:
        typer.echo(f"missing: {name}, which the manifest names; give a folder that has it with --model")


def _row(head: Head, blobs: Path, held: str) -> dict[str, Any]:
    from protocol import peer_id

    told = head.message
    before = told.previous
    routes = {
        "anchor" if route.base is None else "delta" if route.base == before else "squash": route
        for route in told.routes
    }
    return {
        "version": told.version,
        "term": told.term,
        "step": told.step,
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
        console.print("The leader was caught in a lie: nothing follows before a new term.")


def _bytes(size: int | None) -> str:
    return "" if size is None else f"{size:,}"
