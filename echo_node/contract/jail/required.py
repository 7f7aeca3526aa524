"""Layers of the jail without which the contract of a run is not executed."""

from __future__ import annotations

import sys
from typing import Final

REQUIRED: Final[tuple[str, ...]] = (
    ("sandbox", "limits")
    if sys.platform == "darwin"
    else ("no-new-privileges", "seccomp", "landlock|namespaces", "limits")
)
"""Each must hold; of names joined by `|` one must."""

ADVICE_NO_LAYER: Final = (
    "use a kernel with Landlock (5.13 or newer) or a container that may make user namespaces;"
    " echo-node doctor shows each layer, and --unsafe-no-jail runs the contract without them"
)
