"""`echo-node keys`: who this node is. Private keys are never shown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, help="This node's identity.")

State = Annotated[
    Path | None,
    typer.Option(
        "--state", help="Where the node keeps its key and its work; the XDG state folder if left out."
    ),
]


@app.command()
def show(
    *,
    state: State = None,
    as_json: Annotated[bool, typer.Option("--json", help="One line of JSON.")] = False,
) -> None:
    """The peer id of this node, by which runs name trainers and verifiers. A key is made if there is none."""
    from echo_node.config import state_home
    from echo_node.state import prepared

    folder = state or state_home()
    identity = prepared(folder).identity()
    if as_json:
        typer.echo(json.dumps({"peer_id": identity.peer_id, "file": str(folder / "key")}))
        return
    typer.echo(identity.peer_id)
    typer.echo(f"the key is in {folder / 'key'}: whoever has it is this node, so keep a copy", err=True)
