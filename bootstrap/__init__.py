"""A seed of the network: DHT server, relay and peer exchange in a process that needs no model.

It may import `protocol` and `echo_node`'s edges and its `net`; of `echo_node` only `cli` imports it, when asked to.
It knows nothing of runs, engines or rewards.
"""

from __future__ import annotations

import tomllib
from importlib.resources import files


def public_seeds() -> tuple[str, ...]:
    """Where a node knocks first when its run names no seeds: the list in `seeds.toml`."""
    told = tomllib.loads(files(__package__).joinpath("seeds.toml").read_text("utf-8"))
    return tuple(told["seeds"])
