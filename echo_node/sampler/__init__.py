"""Sampler role: from slots to sealed groups."""
