"""What this machine has for a node, room by room: each file looks at one thing, changes nothing, and says how to mend it.

It knows nothing of how findings are shown.
"""

from __future__ import annotations

from echo_node.doctor.point import Point

__all__ = ["Point"]
