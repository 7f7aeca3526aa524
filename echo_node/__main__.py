"""Entry point of `echo-node`.

Imports little, so that an early Ctrl-C prints one line and no traceback.
"""

from __future__ import annotations

from echo_node.runtime.signals import ctrl_c_ends_at_once


def main() -> None:
    """Load the commands and run the one on the command line."""
    with ctrl_c_ends_at_once():
        from echo_node.cli import main as cli  # noqa: PLC0415 - loading it is what takes the time

    cli.main()


if __name__ == "__main__":
    main()
