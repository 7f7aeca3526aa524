"""Entry point of a demo process: an `echo-node` command or a cheating sampler.

The process ends when the demo's process does, however that ends.
"""

from __future__ import annotations

import sys

from echo_node.demo import CHEAT
from echo_node.engine.worker.watchdog import die_with


def main() -> None:
    """Run the command after the demo's process id."""
    parent, *words = sys.argv[1:]
    die_with(int(parent))
    sys.argv = ["echo-node", *words]
    if words[0] == CHEAT:
        from echo_node.demo import cheat

        cheat.main(words[1:])
    else:
        from echo_node.cli import main as cli

        cli.main()


if __name__ == "__main__":
    main()
