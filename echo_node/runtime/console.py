"""Terminal output with control characters escaped, and path options.

Paths and peers choose text that could move the cursor or forge a line.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import IO

import typer

from echo_node.errors import ConfigError

_LAYOUT = "\n\t"


def say(text: object = "", *, err: bool = False, nl: bool = True, file: IO[str] | None = None) -> None:
    """Print a text to standard output, to standard error if `err`, or to a file."""
    typer.echo(printable(str(text)), file=file, err=err, nl=nl)


def printable(text: str) -> str:
    """Escape every character that a terminal would interpret, except newline and tab."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or char in _LAYOUT else ascii(char)[1:-1] for char in text)


def path_for(what: str) -> Callable[[str | Path], Path]:
    """Return a parser for the path of an option or argument; it refuses an empty one."""

    def path(text: str | Path) -> Path:  # the help shows this function's name
        if text == "":
            raise ConfigError(
                f"the path for {what} is empty",
                advice="is a shell variable not set? write a dot for the current folder",
            )
        return Path(text)

    return path
