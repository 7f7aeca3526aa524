"""Progress of a pull, for people, and totals of pulls, for metrics."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class PullProgress:
    """One moment of a pull: activity, version, bytes done and bytes in total."""

    what: str
    version: int
    done: int
    total: int
    sources: int

    def __str__(self) -> str:
        if not self.total:
            return f"version {self.version}: {self.what}"
        share = 100 * self.done / self.total
        return (
            f"version {self.version}: {self.what} {self.done / 1e6:.1f} of {self.total / 1e6:.1f} MB "
            f"({share:.0f} %) from {self.sources}"
        )


@dataclass(slots=True)
class PullTotals:
    """Totals of one node's pulls."""

    versions: int = 0
    bytes: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    """Routes that did not match their heads, by reason."""
