"""Start-time fair queueing: order samplers' groups by weight.

Each group has a start tag, its sampler's finish tag so far; the finish tag is 1 / weight later.
Lowest start tags go first. Tags last from one batch to the next, so that a sampler with a small
weight is served in every so many batches. With equal weights, samplers take turns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence


class FairQueue:
    """Service so far by account; accounts that are not ahead are forgotten."""

    def __init__(self) -> None:
        self._served = 0.0
        """Start tag of the last group that was served."""
        self._finished: dict[bytes, float] = {}

    def start_tags(self, accounts: Sequence[bytes], weight: Callable[[bytes], float]) -> list[float]:
        """Return the start tag of each group, by account, in order of service."""
        weights: dict[bytes, float] = {}
        finished: dict[bytes, float] = {}
        tags = []
        for account in accounts:
            if account not in weights:
                weights[account] = weight(account)
                finished[account] = max(self._served, self._finished.get(account, 0.0))
            tags.append(finished[account])
            finished[account] += 1.0 / weights[account]
        return tags

    def served(self, groups: Iterable[tuple[bytes, float]], weight: Callable[[bytes], float]) -> None:
        """Record the accounts and start tags of the groups that were served."""
        for account, tag in groups:
            self._served = max(self._served, tag)
            after = tag + 1.0 / weight(account)
            self._finished[account] = max(self._finished.get(account, 0.0), after)
        self._finished = {key: tag for key, tag in self._finished.items() if tag > self._served}
