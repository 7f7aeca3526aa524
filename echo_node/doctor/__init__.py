"""Checks of `echo-node doctor`, one per module.

A check changes nothing and names the fix.
"""

from __future__ import annotations

from echo_node.doctor.finding import Finding

__all__ = ["Finding"]
