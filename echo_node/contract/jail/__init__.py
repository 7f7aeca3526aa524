"""The jail: an isolated process in which a contract runs, on Linux and macOS.

`enclosure` puts up the layers of isolation, `main` is the jailed program, `process` and `worker`
are the node's side of it. A completion is hostile text, and some scorers execute what they score.
The jail protects the node and the machine (files, network, other processes, memory, time). It does
not protect a contract from itself: a text that its scorer executes can give itself any score, and
can affect scores that the same process gives later.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Layer", "LayerError"]


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer of isolation: whether it was measured to hold and, if not, why."""

    name: str
    active: bool
    why_not: str = ""


class LayerError(Exception):
    """A jail layer that this system cannot provide.

    The jail runs without it and reports so.
    """
