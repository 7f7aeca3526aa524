"""One finding: what was looked at, what it is like, and how to mend it. It knows nothing of what is looked at."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Point:
    """One thing that was looked at. `fine` is None where a node does without; what is not fine has a `fix`."""

    room: str
    what: str
    fine: bool | None
    says: str
    fix: str = ""


def point(room: str, what: str, *, fine: bool | None, says: str, fix: str) -> Point:
    """The same, with a fix for the case that there is something to mend."""
    return Point(room, what, fine, says, "" if fine else fix)


def well(room: str, what: str, says: str) -> Point:
    return Point(room, what, fine=True, says=says)


def lacking(room: str, what: str, says: str, fix: str) -> Point:
    """A node does without it."""
    return Point(room, what, fine=None, says=says, fix=fix)


def wrong(room: str, what: str, says: str, fix: str) -> Point:
    """A node cannot do without it."""
    return Point(room, what, fine=False, says=says, fix=fix)
