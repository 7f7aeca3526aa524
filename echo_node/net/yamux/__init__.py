"""Yamux: many streams over one connection."""
