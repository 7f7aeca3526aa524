"""The report of a checker: violations, and counts of what is allowed and worth knowing."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

Counts = Counter[str]


@dataclass(frozen=True)
class Finding:
    """A violation: which invariant, at which node if it is one node's, and what exactly."""

    invariant: str
    node: str | None
    text: str

    def __str__(self) -> str:
        return f"{self.invariant}: {self.node or 'the swarm'}: {self.text}"


@dataclass(frozen=True)
class Report:
    findings: list[Finding] = field(default_factory=list)
    counts: dict[str, int | float] = field(default_factory=dict)


def short(id_: bytes) -> str:
    """An id as far as people compare them."""
    return id_.hex()[:12]
