"""Metrics of each step, their database and exporters, events and snapshots."""
