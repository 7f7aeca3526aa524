"""Finding of a check: what was checked, its result, and how to fix it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check; `fine` is None for what a node can do without."""

    room: str
    what: str
    fine: bool | None
    says: str
    fix: str = ""


def point(room: str, what: str, *, fine: bool | None, says: str, fix: str) -> Finding:
    """Make a finding, which keeps the fix only if it is not fine."""
    return Finding(room, what, fine, says, "" if fine else fix)


def well(room: str, what: str, says: str) -> Finding:
    """Make a finding that is fine."""
    return Finding(room, what, fine=True, says=says)


def lacking(room: str, what: str, says: str, fix: str) -> Finding:
    """Make a finding on something missing that a node can do without."""
    return Finding(room, what, fine=None, says=says, fix=fix)


def wrong(room: str, what: str, says: str, fix: str) -> Finding:
    """Make a finding on something that keeps a node from working."""
    return Finding(room, what, fine=False, says=says, fix=fix)
