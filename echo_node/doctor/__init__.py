"""Checks of `echo-node doctor`: each module checks one thing, changes nothing, names the fix."""

from __future__ import annotations

from echo_node.doctor.finding import Finding

__all__ = ["Finding"]
