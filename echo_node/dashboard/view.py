"""Updates for the page: the whole snapshot once, then what changed since a cursor.

A reader has a cursor and no queue: a slow one gets fewer and larger updates, and delays nobody.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from echo_node.dashboard.aggregates import Aggregates, Moment, newer
from echo_node.dashboard.sanitize import plain
from echo_node.telemetry.snapshot import Snapshot

GAP_SECONDS: Final = 0.5
"""Seconds between two updates to one reader."""


@dataclass(frozen=True, slots=True)
class Cursor:
    """Position of a reader: the last update that it received."""

    sequence: int
    step: Mapping[str, Any] | None
    line: Mapping[str, Any] | None
    moment: Moment | None


class View:
    """Snapshot and totals as JSON.

    `may_control` tells whether a token enables the buttons.
    """

    def __init__(self, board: Snapshot, totals: Aggregates, *, may_control: bool) -> None:
        self.board = board
        self._totals = totals
        self._may_control = may_control

    def snapshot(self) -> dict[str, Any]:
        """Return everything."""
        return self.since(None)[0]

    def since(self, cursor: Cursor | None) -> tuple[dict[str, Any], Cursor]:
        """Return what is new after a cursor, or everything; and the reader's next cursor."""
        update = self.board.snapshot()
        self._totals.look()
        moments = list(self._totals.moments)
        now = Cursor(
            update["sequence"],
            update["steps"][-1] if update["steps"] else None,
            update["log"][-1] if update["log"] else None,
            moments[-1] if moments else None,
        )
        if cursor is not None:
            update["steps"] = newer(update["steps"], cursor.step)
            update["log"] = newer(update["log"], cursor.line)
            if cursor.moment is not None:
                moments = [moment for moment in moments if moment.at > cursor.moment.at]
        update |= {
            "whole": cursor is None,
            "peers": complete_peers(update),
            "totals": self._totals.to_json(),
            "moments": moments,
            "may_control": self._may_control,
        }
        return plain(update), now


def as_json(update: Mapping[str, Any]) -> bytes:
    """Return one line of JSON, which an event stream can carry."""
    return json.dumps(update, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode(
        "utf-8", "replace"
    )


def complete_peers(snapshot: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the snapshot's peers with this node's role and a leader's mutes."""
    node, muted = snapshot["node"], snapshot["progress"].get("muted")
    reasons = dict(muted) if isinstance(muted, Mapping) else {}
    found = []
    for peer in snapshot["peers"]:
        mine = peer.get("me") and peer.get("role", "peer") == "peer"
        role = node.get("role", "peer") if mine else peer.get("role", "peer")
        known = reasons.pop(peer.get("peer_id"), None)
        found.append({**peer, "role": role, "muted": peer.get("muted") or known})
    gone = {"role": "sampler", "me": False, "connected": False}
    return found + [{"peer_id": name, **gone, "muted": why} for name, why in reasons.items()]
