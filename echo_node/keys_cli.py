"""`echo-node keys`: who this node is, and how to stay it. Private keys are never shown, and passphrases never stand in a command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated

import typer

from echo_node.errors import ConfigError
from echo_node.given import path_for
from echo_node.saying import say

if TYPE_CHECKING:
    from echo_node.state import StateFolder

app = typer.Typer(no_args_is_help=True, help="This node's identity: show it, back it up, restore it.")

State = Annotated[
    Path | None,
    typer.Option(
        "--state",
        parser=path_for("--state"),
        help="Where the node keeps its key and its work; the XDG state folder if left out.",
    ),
]
PassphraseFile = Annotated[
    Path | None,
    typer.Option(
        "--passphrase-file",
        parser=path_for("--passphrase-file"),
        help="A file whose first line is the passphrase; asked for if left out.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="One line of JSON.")]
_FIRST_LINE = "give --passphrase-file a file whose first line is the passphrase"


@app.command()
def show(*, state: State = None, as_json: Json = False) -> None:
    """The peer id of this node, by which runs name trainers and verifiers. A key is made if there is none."""
    from echo_node.config import state_home
    from echo_node.state import prepared

    folder = state or state_home()
    identity = prepared(folder).identity()
    if as_json:
        say(json.dumps({"peer_id": identity.peer_id, "file": str(folder / "key")}))
        return
    say(identity.peer_id)
    say(
        f"the key is in {folder / 'key'}: whoever has it is this node, so keep a copy (echo-node keys backup)",
        err=True,
    )


@app.command()
def backup(
    *,
    state: State = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", parser=path_for("--out"), help="A new file for it; standard output if left out."
        ),
    ] = None,
    passphrase_file: PassphraseFile = None,
) -> None:
    """A backup of the key, encrypted by a passphrase: nine short lines, to be printed and kept.

    With it and the passphrase `echo-node keys restore` brings this node's identity, and with it what verifiers attest that it
    has earned, back onto any machine. Without the passphrase it is worthless, to others and to you.
    """
    from echo_node.config import state_home
    from echo_node.state import prepared

    keep_backup(prepared(state or state_home()), out, passphrase_file)


def keep_backup(place: StateFolder, out: Path | None, passphrase_file: Path | None = None) -> None:
    """Write a backup into a new file, or to standard output, and note that there is one."""
    from echo_node.backup import check_passphrase, write_backup
    from echo_node.errors import StoreError, boundary, looking_at

    identity = place.identity()
    if out is not None:
        with looking_at(out, advice="give --out a new name, in a folder of yours"):
            is_there = out.exists()
        if is_there:
            raise ConfigError(
                f"{out} is there already", advice="give --out a new name: backups are not overwritten"
            )
    passphrase = _passphrase(passphrase_file, twice=True)
    check_passphrase(passphrase)
    text = write_backup(identity, passphrase)
    if out is None:
        say(text, nl=False)
    else:
        with (
            boundary(StoreError, f"writing {out}", advice="give --out a new name, in a folder of yours"),
            _new_file(out) as file,
        ):
            file.write(text)
        say(f"the backup of {identity.peer_id} is in {out}: print it, or keep it on another machine")
    try:
        place.note_backup(identity.peer_id)
    except StoreError as error:  # the backup is as good without it
        say(f"the backup is made, and you will be reminded of it all the same: {error.what}", err=True)


@app.command()
def restore(
    source: Annotated[
        str, typer.Argument(help="The backup's file, or - for standard input.", metavar="FILE|-")
    ],
    *,
    state: State = None,
    replace: Annotated[
        bool, typer.Option(help="Take the place of another key, which is kept under another name.")
    ] = False,
    passphrase_file: PassphraseFile = None,
) -> None:
    """Be again who a backup says: its key becomes this node's. Spaces, small letters and line breaks do not matter."""
    from echo_node.backup import read_backup, whose
    from echo_node.config import state_home
    from echo_node.keyfile import restore as put_back
    from echo_node.state import opened

    text = _backup_text(source)
    whose(text)
    identity = read_backup(text, _passphrase(passphrase_file, twice=False))
    with opened(state or state_home()) as place:
        old = put_back(place.key, identity, replace=replace)
        place.note_backup(identity.peer_id)
    if old is not None:
        say(f"the key that was there is now {old}", err=True)
    say(f"this node is {identity.peer_id}")


class NoPassphraseError(ConfigError):
    """The person gives none."""


def _backup_text(source: str) -> str:
    import sys

    from echo_node.backup import MOST_CHARACTERS
    from echo_node.errors import boundary
    from echo_node.plain import read_given

    with boundary(ConfigError, f"reading {source}", advice="give the backup's file, or - for standard input"):
        if source == "-":
            data = sys.stdin.buffer.read(4 * MOST_CHARACTERS + 1)
        else:
            data = read_given(Path(source), 4 * MOST_CHARACTERS + 1)
    return data.decode("utf-8", "replace")


def _new_file(path: Path) -> IO[str]:
    import os

    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8")


def _passphrase(file: Path | None, *, twice: bool) -> str:
    """From the file, or from the person at the terminal, even where standard input is something else."""
    import getpass

    from echo_node.backup import LONGEST_PASSPHRASE
    from echo_node.errors import boundary
    from echo_node.plain import read_given

    if file is not None:
        with boundary(ConfigError, f"reading {file}", advice=_FIRST_LINE):
            return (
                read_given(file, 16 * LONGEST_PASSPHRASE, line=True).partition(b"\n")[0].decode().rstrip("\r")
            )
    try:
        Path("/dev/tty").open("rb").close()
    except OSError:
        raise ConfigError(
            "there is no terminal to ask for the passphrase at", advice="give --passphrase-file"
        ) from None
    try:
        told = getpass.getpass("passphrase of the backup: ")
        again = getpass.getpass("the same again: ") if twice else told
    except KeyboardInterrupt:
        say(err=True)  # the line with the question ends here
        raise
    except EOFError:  # Ctrl-D
        say(err=True)
        raise NoPassphraseError("no passphrase was given", advice="begin again") from None
    if again != told:
        raise ConfigError("these are two different passphrases", advice="begin again")
    return told
