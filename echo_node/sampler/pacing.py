"""How fast a sampler goes: as fast as it can, until receipts ask for less. Knows groups by their ids only."""

from __future__ import annotations

import time
from collections import Counter

import trio

from protocol import Receipt


class Pacing:
    """Groups that were sent and are not yet answered, and the rate that the trainer wants."""

    def __init__(self, unanswered: int) -> None:
        self._most = unanswered
        self._waiting: dict[bytes, None] = {}
        self._rate: float | None = None
        self._free_at = 0.0
        self._answered = trio.Event()
        self.accepted = 0
        self.refused: Counter[str] = Counter()
        """How many groups were refused, by reason."""

    def sent(self, groups: list[bytes]) -> None:
        self._waiting.update(dict.fromkeys(groups))
        if self._rate:
            self._free_at = max(self._free_at, time.monotonic()) + len(groups) / self._rate

    def answered(self, receipt: Receipt) -> None:
        """Take note of a receipt. Most of it is about others' groups."""
        self._rate = receipt.rate or None
        for group in receipt.accepted_ids():
            self.accepted += self._settle(group)
        for group, reason in receipt.refused_ids():
            self.refused[reason] += self._settle(group)
        self._answered.set()
        self._answered = trio.Event()

    def moved_on(self) -> None:
        """A new head is there: what was drawn under older ones need not be waited for."""
        self._waiting.clear()
        self._answered.set()
        self._answered = trio.Event()

    async def wait(self) -> None:
        """Until more groups are wanted."""
        while len(self._waiting) >= self._most:
            await self._answered.wait()
        await trio.sleep(max(0.0, self._free_at - time.monotonic()))

    def _settle(self, group: bytes) -> bool:
        known = group in self._waiting
        self._waiting.pop(group, None)
        return known
