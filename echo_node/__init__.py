"""echo-node: one peer of a swarm that trains language models with RL."""

__version__ = "0.1.0.dev0"
