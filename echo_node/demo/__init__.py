"""The demo: a swarm on one machine that learns while it is shown."""

from typing import Final

CHEAT: Final = "cheat"
"""The first argument of a demo process that runs a cheating sampler instead of `join`."""
