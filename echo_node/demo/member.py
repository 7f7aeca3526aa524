"""The program of one process of the demo: `echo-node` with these words, or a sampler that cheats.

It ends when the demo does, however that ends. It knows nothing of what the demo does with it.
"""

from __future__ import annotations

import sys
from typing import Final

from echo_node.engine.pulse import die_with

CHEAT: Final = "cheat"
"""The first word for a sampler that cheats, in place of `join`."""


def main() -> None:
    """Be the node that the words say: the demo's process id, and then a command."""
    parent, *words = sys.argv[1:]
    die_with(int(parent))
    sys.argv = ["echo-node", *words]
    if words[0] == CHEAT:
        from echo_node.demo import cheat  # noqa: PLC0415 - an honest node needs none of it

        cheat.main(words[1:])
    else:
        from echo_node import cli  # noqa: PLC0415 - after the demo is known to live

        cli.main()


if __name__ == "__main__":
    main()
