"""Weights chain: from the trainer over the network into engines, as bytes."""
