"""The weights chain: out of the trainer, over the network, into engines. Knows bytes, not models."""
