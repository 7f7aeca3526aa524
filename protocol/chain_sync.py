"""Chain sync: ask a peer for the heads after those that are held.

A question names a few held heads, newest first, so that two nodes whose chains parted still find
where. The records are not sealed, since each head is. The receiver applies the rules of
`protocol.chain`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar

from protocol import limits
from protocol.digest import DIGEST_BYTES
from protocol.fields import array, blob
from protocol.wire import record


@record
class HeadsQuestion:
    """Question for the heads after the first of these ids that the peer holds.

    Ids are newest first; with none, from the beginning.
    """

    LIMIT: ClassVar[int] = limits.SMALL_BYTES

    held: Annotated[tuple[bytes, ...], array(blob(DIGEST_BYTES, DIGEST_BYTES), limits.HELD_HEADS)]

    @classmethod
    def of(cls, heads: Sequence[bytes]) -> HeadsQuestion:
        """Make the question from a chain of ids, oldest first.

        It names the newest ones, then ever wider apart, the oldest last.
        """
        places: list[int] = []
        step = 1
        at = len(heads) - 1
        while at > 0 and len(places) < limits.HELD_HEADS - 1:
            places.append(at)
            step = step if len(places) < limits.HELD_HEADS // 4 else step * 2
            at -= step
        return cls(tuple(heads[place] for place in ([*places, 0] if heads else [])))


@record
class HeadsAnswer:
    """Sealed heads, each the predecessor of the next; empty if up to date."""

    LIMIT: ClassVar[int] = limits.HEADS_BYTES

    heads: Annotated[
        tuple[bytes, ...], array(blob(limits.HEAD_BYTES + limits.ENVELOPE_BYTES, 1), limits.CHAIN_HEADS)
    ]
