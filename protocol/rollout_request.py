"""Rollout request of a trainer to a sampler in sequential mode, answered in parts.

A part is an array of sealed groups, or references to groups, as in a batch that may be longer than
a gossip message. The leader asks again with what arrived, until it has all slots.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, ClassVar

from protocol import canonical, limits
from protocol.batch import read_batch
from protocol.envelope import Envelope
from protocol.errors import InconsistentError
from protocol.fields import Counter, Digest, Ext, array, uint
from protocol.wire import record

_NOTHING = canonical.pack([])


@record
class RolloutRequest:
    """Slots `first` up to `first + count` under the head, without those that arrived.

    `taken` are the numbers of those, counted from `first`. Sealed by the leader, so that strangers
    cannot ask for work.
    """

    KIND: ClassVar[str] = "rollout-request"
    LIMIT: ClassVar[int] = limits.SMALL_BYTES

    count: Annotated[int, uint(limits.BATCH, 1)]
    first: Counter
    head: Digest
    taken: Annotated[tuple[int, ...], array(uint(limits.BATCH - 1), limits.BATCH - 1, ascending=True)] = ()
    ext: Ext = dataclasses.field(default_factory=dict)

    def check(self) -> None:
        if self.taken and (self.taken[-1] >= self.count or len(self.taken) == self.count):
            raise InconsistentError(f"not a part of {self.count} slots", "taken")

    @property
    def slots(self) -> tuple[int, ...]:
        """Return the slots that are still wanted, ascending."""
        return tuple(self.first + each for each in range(self.count) if each not in self.taken)


def read_part(data: bytes) -> tuple[Envelope, ...]:
    """Parse one part of an answer; an empty one means that no group ended yet."""
    return () if data == _NOTHING else read_batch(data, most=limits.ANSWER_BYTES)
