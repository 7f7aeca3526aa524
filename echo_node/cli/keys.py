"""`echo-node keys`: show, back up and restore this node's key.

Private keys are never shown, and passphrases are never arguments of a command.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated

import typer

from echo_node.errors import ConfigError
from echo_node.runtime.console import path_for, say

if TYPE_CHECKING:
    from echo_node.storage.state_dir import StateDir

app = typer.Typer(no_args_is_help=True, help="This node's identity: show it, back it up, restore it.")

State = Annotated[
    Path | None,
    typer.Option(
        "--state",
        parser=path_for("--state"),
        help="The state folder, with the node's key and data; in the XDG state folder if left out.",
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
    """Print this node's peer id, by which runs name trainers and verifiers.

    Creates a key if there is none.
    """
    from echo_node.config import state_home
    from echo_node.storage.state_dir import prepared

    folder = state or state_home()
    identity = prepared(folder).identity()
    if as_json:
        say(json.dumps({"peer_id": identity.peer_id, "file": str(folder / "key")}))
        return
    say(identity.peer_id)
    say(
        f"the key is in {folder / 'key'}: it is this node's identity, so keep a copy (echo-node keys backup)",
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
    """Write an encrypted backup of the key: nine short lines to print and keep.

    It is encrypted by a passphrase. With it and the passphrase `echo-node keys restore` restores
    this node's identity, and the credit that verifiers attest to it, on any machine. Without the
    passphrase it is worthless.
    """
    from echo_node.config import state_home
    from echo_node.storage.state_dir import prepared

    write_key_backup(prepared(state or state_home()), out, passphrase_file)


def write_key_backup(place: StateDir, out: Path | None, passphrase_file: Path | None = None) -> None:
    """Write a key backup to a new file or standard output, and record that it exists."""
    from echo_node.errors import StoreError, boundary, looking_at
    from echo_node.identity.key_backup import check_passphrase, write_backup

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
        say(f"the backup is written, but could not be recorded: {error.what}", err=True)


@app.command()
def restore(
    source: Annotated[
        str, typer.Argument(help="The backup's file, or - for standard input.", metavar="FILE|-")
    ],
    *,
    state: State = None,
    replace: Annotated[
        bool, typer.Option(help="Replace another key, which is kept under another name.")
    ] = False,
    passphrase_file: PassphraseFile = None,
) -> None:
    """Restore the key of a backup. Spaces, letter case and line breaks do not matter."""
    from echo_node.config import state_home
    from echo_node.identity.key_backup import peer_of, read_backup
    from echo_node.identity.keyfile import restore as put_back
    from echo_node.storage.state_dir import opened

    text = _backup_text(source)
    peer_of(text)  # refuses a faulty text before the passphrase is asked for
    identity = read_backup(text, _passphrase(passphrase_file, twice=False))
    with opened(state or state_home()) as place:
        old = put_back(place.key, identity, replace=replace)
        place.note_backup(identity.peer_id)
    if old is not None:
        say(f"the key that was there is now {old}", err=True)
    say(f"this node is {identity.peer_id}")


class NoPassphraseError(ConfigError):
    """No passphrase was entered."""


def _backup_text(source: str) -> str:
    import sys

    from echo_node.errors import boundary
    from echo_node.identity.key_backup import MOST_CHARACTERS
    from echo_node.storage.files import read_given

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
    """Read the passphrase from the file or the terminal.

    The terminal is read also where standard input is redirected.
    """
    import getpass

    from echo_node.errors import boundary
    from echo_node.identity.key_backup import LONGEST_PASSPHRASE
    from echo_node.storage.files import read_given

    if file is not None:
        with boundary(ConfigError, f"reading {file}", advice=_FIRST_LINE):
            return (
                read_given(file, 16 * LONGEST_PASSPHRASE, line=True).partition(b"\n")[0].decode().rstrip("\r")
            )
    try:
        Path("/dev/tty").open("rb").close()
    except OSError:
        raise ConfigError(
            "there is no terminal to ask for the passphrase on", advice="give --passphrase-file"
        ) from None
    try:
        typed = getpass.getpass("passphrase of the backup: ")
        again = getpass.getpass("the same again: ") if twice else typed
    except KeyboardInterrupt:
        say(err=True)  # the line with the question ends here
        raise
    except EOFError:  # Ctrl-D
        say(err=True)
        raise NoPassphraseError("no passphrase was given", advice="start again") from None
    if again != typed:
        raise ConfigError("the two passphrases differ", advice="start again")
    return typed
