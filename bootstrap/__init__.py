"""A bootstrap node: DHT server, relay and peer exchange, without a model.

It may import `protocol`, and of `echo_node` the base modules and `net`; of `echo_node` only `cli`
imports it, on demand.
"""

from __future__ import annotations

import tomllib
from importlib.resources import files


def public_seeds() -> tuple[str, ...]:
    """Return the seeds of `seeds.toml`, dialled when a run names none."""
    document = tomllib.loads(files(__package__).joinpath("seeds.toml").read_text("utf-8"))
    return tuple(document["seeds"])
