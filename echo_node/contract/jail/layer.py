"""What a layer of the jail is to those who ask which ones hold. It knows nothing of systems."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer by its name, whether it was measured to hold, and if it does not, why."""

    name: str
    active: bool
    why_not: str = ""


class LayerError(Exception):
    """This layer cannot be had here; the text says why. The jail goes on without it, and says so."""
