"""Send rate of a sampler: unlimited until receipts ask for a lower rate."""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Collection
from typing import Final

import trio

from protocol import Receipt, limits

log = logging.getLogger(__name__)
_OLDER: Final = 16
"""Remembered groups without a wait, as a multiple of those that may be unanswered."""
_NEARLY_NOTHING: Final = 1e-9
"""Groups ahead of the rate that count as none, against rounding."""
QUIET_SECONDS: Final = 60.0
"""Pause, in seconds, after the first refusal as muted; each further time twice as long."""
LONGEST_QUIET: Final = 3_600.0
"""Longest such pause, in seconds."""


class SendRate:
    """Unanswered groups of one sampler, and the rate that the trainer asks for.

    With `luck` the intervals are jittered, though no slower on average, so that samplers that begin
    together do not stay in step.
    """

    def __init__(self, unanswered: int, luck: random.Random | None = None) -> None:
        self._most = unanswered
        self._luck = luck
        self._waiting: dict[bytes, None] = {}
        self._older: dict[bytes, None] = {}
        self._rate: float | None = None
        self._ahead = 0.0
        """Groups sent beyond the rate since `_at`; negative if fewer were sent."""
        self._at = 0.0
        self._newest = (0, 0)
        """Term and version of the receipt that set the rate."""
        self._news = trio.Event()
        self._quiet_until = 0.0
        self._mutings = 0
        self.accepted = 0
        self.refused: Counter[str] = Counter()
        """Number of refused groups by reason."""

    def sent(self, groups: list[bytes]) -> None:
        """Record groups that were pushed and now wait for a receipt."""
        self._waiting.update(dict.fromkeys(groups))
        self._catch_up()
        if self._rate is not None:
            self._ahead += len(groups) * (self._luck.uniform(0.75, 1.25) if self._luck else 1.0)

    def requested(self, groups: list[bytes]) -> None:
        """Record requested groups: answers are counted, the rate is unaffected."""
        self._remember(groups)

    def receipt(self, receipt: Receipt) -> None:
        """Apply a receipt: the wanted rate, and the answers to own groups."""
        self._catch_up()
        if (receipt.term, receipt.version) >= self._newest:  # anybody may replay an old one
            self._newest = (receipt.term, receipt.version)
            self._rate = receipt.rate
        for group in receipt.accepted_ids():
            self.accepted += self._settle(group)
        for group, reason in receipt.refused_ids():
            ours = self._settle(group)
            self.refused[reason] += ours
            if ours and reason == "muted":
                self._pause_muted()
        self._notify()

    @property
    def is_quiet(self) -> bool:
        """Return whether sending is paused because this sampler is muted."""
        return trio.current_time() < self._quiet_until

    def _pause_muted(self) -> None:
        if not self.is_quiet:
            wait = min(LONGEST_QUIET, QUIET_SECONDS * 2.0 ** min(self._mutings, 30))
            self._mutings += 1
            self._quiet_until = trio.current_time() + wait
            log.warning(
                "this sampler is muted because of verdicts on its groups; no groups are sent for %.0f s", wait
            )

    def new_head(self) -> None:
        """Stop waiting for answers to groups of older heads, and lift a rate of zero."""
        self._remember(self._waiting)
        self._waiting.clear()
        self._rate = self._rate or None
        self._notify()

    @property
    def is_open(self) -> bool:
        """Return whether more groups are wanted now."""
        self._catch_up()
        is_ahead = self._rate is not None and self._ahead > _NEARLY_NOTHING
        return not (self.is_quiet or len(self._waiting) >= self._most or self._rate == 0 or is_ahead)

    async def wait(self) -> None:
        """Wait until more groups are wanted; generation time counts towards the rate."""
        await trio.lowlevel.checkpoint()
        while True:
            self._catch_up()
            if self.is_quiet:
                with trio.move_on_at(self._quiet_until):
                    await self._news.wait()
            elif len(self._waiting) >= self._most or self._rate == 0:
                await self._news.wait()
            elif self._rate is not None and self._ahead > _NEARLY_NOTHING:
                with trio.move_on_after(self._ahead / self._rate):  # or until another rate is wanted
                    await self._news.wait()
            else:
                self._ahead = 0.0
                return

    def _remember(self, groups: Collection[bytes]) -> None:
        """Remember groups whose answer is counted if it comes, but not waited for."""
        self._older.update(dict.fromkeys(groups))
        while len(self._older) > max(_OLDER * self._most, limits.BATCH):  # one request may name BATCH
            del self._older[next(iter(self._older))]

    def _catch_up(self) -> None:
        """Account for the time since the last call."""
        now = trio.current_time()
        self._ahead = 0.0 if self._rate is None else self._ahead - (now - self._at) * self._rate
        self._at = now

    def _notify(self) -> None:
        self._news.set()
        self._news = trio.Event()

    def _settle(self, group: bytes) -> bool:
        """Forget a group; return whether it was ours and unanswered."""
        known = group in self._waiting or group in self._older
        self._waiting.pop(group, None)
        self._older.pop(group, None)
        return known
