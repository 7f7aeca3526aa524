"""Rests of samplers that fail in sequential mode.

They get longer with each failure, and are slowly forgiven. A failed request costs every other
sampler of the step its deadline. So one answer does not clear the record: a sampler that answers
now and then would make each such step wait for it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

LONGEST_REST: Final = 64
"""Most steps for which a sampler that failed is not asked."""
FORGIVEN_AFTER: Final = 16
"""Steps in a row that a sampler must answer before one of its failures is forgiven."""
SAMPLERS: Final = 8_192
"""Most samplers remembered; those whose record changed longest ago are forgotten first."""


@dataclass(slots=True)
class _Record:
    failures: int = 0
    answers: int = 0
    """Steps answered in a row since the last failure or forgiveness."""
    rest: int = 0
    """Steps until the sampler is asked again: one means in the next step."""


class RestSchedule:
    """Failures of samplers, and the steps for which each is left alone."""

    def __init__(self) -> None:
        self._records: OrderedDict[bytes, _Record] = OrderedDict()

    def begin_step(self) -> None:
        """Count down the rests by one step."""
        for record in self._records.values():
            record.rest = max(0, record.rest - 1)

    def is_resting(self, sampler: bytes) -> bool:
        record = self._records.get(sampler)
        return record is not None and record.rest > 0

    def end_step(self, answered: Iterable[bytes], failed: Iterable[bytes]) -> None:
        """Record who answered all its requests of a step, and who did not."""
        for sampler in answered:
            if (record := self._records.get(sampler)) is not None:
                self._answered(sampler, record)
        for sampler in failed:
            record = self._records.setdefault(sampler, _Record())
            self._records.move_to_end(sampler)
            record.failures, record.answers = record.failures + 1, 0
            record.rest = min(2 ** min(record.failures - 1, LONGEST_REST), LONGEST_REST)
        while len(self._records) > SAMPLERS:
            self._records.popitem(last=False)

    def _answered(self, sampler: bytes, record: _Record) -> None:
        record.answers += 1
        if record.answers >= FORGIVEN_AFTER:
            record.failures, record.answers = record.failures - 1, 0
        if record.failures <= 0:
            del self._records[sampler]
