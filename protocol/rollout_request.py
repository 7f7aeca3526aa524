"""Rollout request of a trainer to a sampler in sequential mode.

The answer is an array of sealed groups, as in a batch, that may be longer than a gossip message.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, ClassVar

from protocol import limits
from protocol.fields import Counter, Digest, Ext, uint
from protocol.wire import record


@record
class RolloutRequest:
    """Slots `first` up to `first + count` under the head.

    Sealed by the leader, so that strangers cannot ask for work.
    """

    KIND: ClassVar[str] = "rollout-request"
    LIMIT: ClassVar[int] = limits.SMALL_BYTES

    count: Annotated[int, uint(limits.BATCH, 1)]
    first: Counter
    head: Digest
    ext: Ext = dataclasses.field(default_factory=dict)
