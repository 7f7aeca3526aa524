"""How fast a sampler goes: as fast as it can, until receipts ask for less. Knows groups by their ids only."""

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
"""How many times as many groups that nobody waits for are remembered as may be unanswered."""
_NEARLY_NOTHING: Final = 1e-9
QUIET_SECONDS: Final = 60.0
"""After the first group that is refused because its sampler is muted; each further time twice as long."""
LONGEST_QUIET: Final = 3_600.0


class Pacing:
    """Groups that were sent and are not yet answered, and the rate that the trainer wants. With `luck` its beat is uneven,
    though no slower, so that many samplers that begin together do not go on in step.
    """

    def __init__(self, unanswered: int, luck: random.Random | None = None) -> None:
        self._most = unanswered
        self._luck = luck
        self._waiting: dict[bytes, None] = {}
        self._older: dict[bytes, None] = {}
        self._rate: float | None = None
        self._ahead = 0.0
        """How many groups more were sent than the rate would have had since `_at`; below 0, how many fewer."""
        self._at = 0.0
        self._newest = (0, 0)
        """Term and version of the receipt that said so."""
        self._news = trio.Event()
        self._quiet_until = 0.0
        self._mutings = 0
        self.accepted = 0
        self.refused: Counter[str] = Counter()
        """How many groups were refused, by reason."""

    def sent(self, groups: list[bytes]) -> None:
        self._waiting.update(dict.fromkeys(groups))
        self._catch_up()
        if self._rate is not None:
            self._ahead += len(groups) * (self._luck.uniform(0.75, 1.25) if self._luck else 1.0)

    def gave(self, groups: list[bytes]) -> None:
        """These were asked for: what becomes of them is counted, but they are no part of the pace."""
        self._remember(groups)

    def answered(self, receipt: Receipt) -> None:
        """Take note of a receipt. Most of it is about others' groups."""
        self._catch_up()
        if (receipt.term, receipt.version) >= self._newest:  # an old one may be sent again by anybody
            self._newest = (receipt.term, receipt.version)
            self._rate = receipt.rate
        for group in receipt.accepted_ids():
            self.accepted += self._settle(group)
        for group, reason in receipt.refused_ids():
            ours = self._settle(group)
            self.refused[reason] += ours
            if ours and reason == "muted":
                self._be_quiet()
        self._tell()

    @property
    def is_quiet(self) -> bool:
        """Whether nothing is sent for a while, since nobody would take it."""
        return trio.current_time() < self._quiet_until

    def _be_quiet(self) -> None:
        if not self.is_quiet:
            wait = min(LONGEST_QUIET, QUIET_SECONDS * 2.0 ** min(self._mutings, 30))
            self._mutings += 1
            self._quiet_until = trio.current_time() + wait
            log.warning(
                "this sampler is muted for what verifiers found in its groups; it is quiet for %.0f s", wait
            )

    def moved_on(self) -> None:
        """A new head is there: what was drawn under older ones need not be waited for, and more is wanted."""
        self._remember(self._waiting)
        self._waiting.clear()
        self._rate = self._rate or None
        self._tell()

    async def wait(self) -> None:
        """Until more groups are wanted. The time from here until they are sent is part of the rate."""
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
        """Nobody waits for an answer to these, though one may come."""
        self._older.update(dict.fromkeys(groups))
        while len(self._older) > max(_OLDER * self._most, limits.BATCH):  # one question may ask for so many
            del self._older[next(iter(self._older))]

    def _catch_up(self) -> None:
        """Let the time that has passed count."""
        now = trio.current_time()
        self._ahead = 0.0 if self._rate is None else self._ahead - (now - self._at) * self._rate
        self._at = now

    def _tell(self) -> None:
        self._news.set()
        self._news = trio.Event()

    def _settle(self, group: bytes) -> bool:
        """Whether the group was ours and unanswered."""
        known = group in self._waiting or group in self._older
        self._waiting.pop(group, None)
        self._older.pop(group, None)
        return known
