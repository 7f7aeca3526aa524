"""How far a pull is, for people, and what pulls have come to, for metrics. Counts; decides nothing."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Pulling:
    """One moment of a pull: what is being done for which version, and how many bytes of how many are here."""

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
class Pulls:
    """What one node has pulled so far."""

    versions: int = 0
    bytes: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    """Routes that were not what their heads say, by reason."""
