"""Whom a node knows, completed from what it says elsewhere of itself and of them: its own role, and who is muted by whom it leads.

It reads a snapshot's parts, whichever of them a role has.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def company(told: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The peers of a snapshot, this node among them."""
    node, muted = told["node"], told["progress"].get("muted")
    reasons = dict(muted) if isinstance(muted, Mapping) else {}
    found = []
    for peer in told["peers"]:
        mine = peer.get("me") and peer.get("role", "peer") == "peer"
        role = node.get("role", "peer") if mine else peer.get("role", "peer")
        known = reasons.pop(peer.get("peer_id"), None)
        found.append({**peer, "role": role, "muted": peer.get("muted") or known})
    gone = {"role": "sampler", "me": False, "connected": False}
    return found + [{"peer_id": name, **gone, "muted": why} for name, why in reasons.items()]
