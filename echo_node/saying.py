"""What a person reads on the terminal: lines of printable characters, whoever chose them. A path may hold what moves the cursor, or
makes another line of it. Tables and what is alive on the screen are rich's.
"""

from __future__ import annotations

import typer

_LAYOUT = "\n\t"


def say(text: object = "", *, err: bool = False, nl: bool = True) -> None:
    """Print a text, on standard error if it is about the work and not what was asked for."""
    typer.echo(printable(str(text)), err=err, nl=nl)


def printable(text: str) -> str:
    """The text with everything that a terminal would obey written out."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or char in _LAYOUT else ascii(char)[1:-1] for char in text)
