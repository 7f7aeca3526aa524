"""Terminal prompts: consent to a run, choice of a run, key backup."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import typer

from echo_node.runtime.console import say

if TYPE_CHECKING:
    from echo_node.storage.state_dir import StateDir
    from protocol import Manifest, Opened

_TRIES: Final = 3
"""Attempts at a passphrase or a number before giving up."""


def agree(manifest: Opened[Manifest]) -> bool:
    """Show a run's author and contract, and ask whether to work for it."""
    from echo_node.errors import ConfigError, one_line
    from protocol import peer_id

    run = manifest.message
    say(f"run {manifest.id.hex()}: {one_line(run.name)}", err=True)
    say(f"  author: {peer_id(manifest.signer)}", err=True)
    whence = "part of echo-node" if run.contract.wheel is None else "code that travels with the run"
    say(
        f"  contract: {one_line(run.contract.name)} {one_line(run.contract.version)}, {whence};"
        " it makes prompts and rewards, in a sandbox",
        err=True,
    )
    if not sys.stdin.isatty():
        raise ConfigError(
            "joining this run needs consent, and standard input is not a terminal", advice="pass --yes"
        )
    return confirm("Work for it?")


def choose(runs: Sequence[Opened[Manifest]]) -> Opened[Manifest]:
    """Ask which of the open runs to join; a single one needs no question."""
    from echo_node.errors import ConfigError, one_line

    if len(runs) == 1:
        return runs[0]
    for number, run in enumerate(runs, 1):
        say(f"{number:>3}  {one_line(run.message.name)}  {run.id.hex()}", err=True)
    if not sys.stdin.isatty():
        raise ConfigError(
            "several runs are open, and standard input is not a terminal", advice="pass the id of one of them"
        )
    unchanged = "nothing was fetched and nothing was run"
    for _ in range(_TRIES):
        try:
            answer: str = typer.prompt("Which one?", type=str, default="1", err=True)
        except typer.Abort as end:
            say(err=True)
            if isinstance(end.__context__, KeyboardInterrupt):
                raise KeyboardInterrupt from None
            raise ConfigError("no run was chosen", advice=unchanged) from None  # Ctrl-D
        if answer.isdecimal() and 1 <= int(answer[:9]) <= len(runs):
            return runs[int(answer[:9]) - 1]
        say(f"that is no number from 1 to {len(runs)}", err=True)
    raise ConfigError("no run was chosen", advice=unchanged)


def offer_backup(place: StateDir) -> None:
    """Offer an encrypted backup of a new key; ask only at a terminal."""
    from echo_node.cli.keys import NoPassphraseError, write_key_backup
    from echo_node.errors import ConfigError

    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return
    say(f"The key in {place.key} is new. It is this node's identity.", err=True)
    if not confirm("Make a backup of it now, encrypted by a passphrase?"):
        return
    for _ in range(_TRIES):
        try:
            write_key_backup(place, place.path / f"backup-{place.identity().peer_id[-8:]}.txt")
        except NoPassphraseError as error:
            say(f"no backup: {error.what}", err=True)
            return
        except ConfigError as error:
            say(f"no backup: {error}", err=True)
        else:
            return


def confirm(question: str, *, default: bool = True) -> bool:
    """Ask a question at the terminal; Ctrl-D is a no."""
    try:
        return typer.confirm(question, default=default, err=True)
    except typer.Abort as end:
        say(err=True)
        if isinstance(end.__context__, KeyboardInterrupt):
            raise KeyboardInterrupt from None  # Ctrl-C is no answer: it ends the command
        return False  # Ctrl-D
