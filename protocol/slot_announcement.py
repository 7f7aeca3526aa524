"""Announcement of a sampler: the slots that it is about to draw under a head.

It travels in batches among groups, ahead of them, and is answered by receipts as they are.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, ClassVar

from protocol import limits
from protocol.fields import Counter, Digest, Ext, uint
from protocol.wire import record


@record
class SlotAnnouncement:
    """Slots `first` up to `first + count` under the head.

    It commits its sampler to every slot of the head below that end.
    """

    KIND: ClassVar[str] = "slot-announcement"
    LIMIT: ClassVar[int] = limits.SMALL_BYTES

    count: Annotated[int, uint(limits.ANNOUNCED, 1)]
    first: Counter
    head: Digest
    ext: Ext = dataclasses.field(default_factory=dict)
