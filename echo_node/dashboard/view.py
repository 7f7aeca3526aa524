"""What the page is told: everything once, and then what is new, never more often than a person can see.

A reader has a place in the news (`Place`) and no queue: who reads slowly gets fewer and larger pieces, and holds nobody up.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from echo_node.board import Board
from echo_node.dashboard.company import company
from echo_node.dashboard.plain import plain
from echo_node.dashboard.totals import Moment, Totals, newer

GAP_SECONDS: Final = 0.5
"""Between two pieces of news to one reader."""


@dataclass(frozen=True, slots=True)
class Place:
    """How far a reader has come."""

    sequence: int
    step: Mapping[str, Any] | None
    line: Mapping[str, Any] | None
    moment: Moment | None


class View:
    """The board and the sums, as JSON. `may_control` says whether a token would be of use."""

    def __init__(self, board: Board, totals: Totals, *, may_control: bool) -> None:
        self.board = board
        self._totals = totals
        self._may_control = may_control

    def snapshot(self) -> dict[str, Any]:
        """Everything."""
        return self.since(None)[0]

    def since(self, place: Place | None) -> tuple[dict[str, Any], Place]:
        """What is new after this place, or everything; and the place that the reader has then."""
        told = self.board.snapshot()
        self._totals.look()
        moments = list(self._totals.moments)
        now = Place(
            told["sequence"],
            told["steps"][-1] if told["steps"] else None,
            told["log"][-1] if told["log"] else None,
            moments[-1] if moments else None,
        )
        if place is not None:
            told["steps"] = newer(told["steps"], place.step)
            told["log"] = newer(told["log"], place.line)
            if place.moment is not None:
                moments = [moment for moment in moments if moment.at > place.moment.at]
        told |= {
            "whole": place is None,
            "peers": company(told),
            "totals": self._totals.told(),
            "moments": moments,
            "may_control": self._may_control,
        }
        return plain(told), now


def as_json(told: Mapping[str, Any]) -> bytes:
    """One line of JSON, safe inside a stream of events: it has no line break of its own."""
    return json.dumps(told, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode(
        "utf-8", "replace"
    )
