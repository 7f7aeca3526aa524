"""Where `echo-node` starts. It loads little, so that even the first Ctrl-C gets its one line."""

from __future__ import annotations

from echo_node.ctrl_c import ctrl_c_ends_at_once


def main() -> None:
    """Load the commands and run the one that was asked for."""
    with ctrl_c_ends_at_once():
        from echo_node import cli  # noqa: PLC0415 - loading it is what takes the time

    cli.main()


if __name__ == "__main__":
    main()
