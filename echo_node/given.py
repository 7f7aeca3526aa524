"""A path as a person gives it to a command. The empty one is refused: to Python it is the folder that the person is in, and it
mostly comes from a variable of the shell that is not set.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from echo_node.errors import ConfigError


def path_for(what: str) -> Callable[[str | Path], Path]:
    """What reads the path that stands for `what`."""

    def path(text: str | Path) -> Path:  # its name stands in the help
        if text == "":
            raise ConfigError(
                f"the path for {what} is empty",
                advice="is a variable of your shell not set? a dot is the folder that you are in",
            )
        return Path(text)

    return path
