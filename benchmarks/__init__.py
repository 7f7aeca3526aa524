"""Benchmarks of hot paths against a peer or a physical limit, in the same run."""
