"""Trainer's receipt: accepted and refused groups, announcements, rate.

Refusals have a reason; the rate is the one wanted of samplers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Annotated, ClassVar

from protocol import limits
from protocol.digest import DIGEST_BYTES
from protocol.errors import InconsistentError, OutOfRangeError
from protocol.fields import Counter, Digest, Ext, Slug, array, blob, check_ascending, number, optional, uint
from protocol.wire import of, record, row

REASONS = (
    "condemned",  # a verdict found it dishonest
    "drawn-reply",  # calls tokens drawn that only the environment can have written
    "duplicate",  # this slot has been filled
    "forked-head",  # sampled on a branch that a new term left behind; nobody's fault
    "full",  # the buffer is full: slow down
    "malformed",  # its bytes are not a message of this wire
    "muted",  # the peer is muted for what it sent before
    "not-in-roster",  # the sampler had not joined when the head was published
    "over-limit",  # larger than the manifest allows
    "stale",  # older than the staleness bound
    "unknown-head",  # sampled under a head that nobody published
    "unnamed-sampler",  # nobody can replay the environment, and the manifest does not name this key
    "wrong-engine",  # not the engine class that it joined with
    "wrong-prompt",  # not the prompt of its slot
    "wrong-reward",  # claims rewards that the contract does not give, or where none may be claimed
    "wrong-signature",  # not signed by whom it names
)
"""Reasons that have a meaning today. Others may come: an unknown reason is shown too."""

_IDS = blob(limits.RECEIPT_IDS * DIGEST_BYTES, DIGEST_BYTES, DIGEST_BYTES)


@row
class Refusal:
    """Groups that were refused for one reason, as concatenated ids."""

    reason: Slug
    ids: Annotated[bytes, _IDS]


@record
class Receipt:
    """Acknowledgement of many groups.

    `rate` is the wanted groups per second per sampler.
    """

    KIND: ClassVar[str] = "receipt"
    LIMIT: ClassVar[int] = limits.RECEIPT_BYTES

    accepted: Annotated[bytes, blob(limits.RECEIPT_IDS * DIGEST_BYTES, 0, DIGEST_BYTES)]
    head: Digest
    rate: Annotated[float | None, optional(number(0.0, 1e6))]
    refused: Annotated[tuple[Refusal, ...], array(of(Refusal), limits.RECEIPT_REASONS)]
    term: Annotated[int, uint(limits.SAFE_INTEGER, 1)]
    version: Counter
    announced: Annotated[bytes, blob(limits.RECEIPT_IDS * DIGEST_BYTES, 0, DIGEST_BYTES)] = b""
    """Ids of announcements of slots that were taken."""
    ext: Ext = dataclasses.field(default_factory=dict)

    def check(self) -> None:
        check_ascending((refusal.reason for refusal in self.refused), "refused")
        ids = [*self.accepted_ids(), *self.announced_ids()]
        ids += [group for refusal in self.refused for group in split_ids(refusal.ids)]
        if len(ids) > limits.RECEIPT_IDS:
            raise OutOfRangeError(f"{len(ids)} groups, at most {limits.RECEIPT_IDS} are allowed")
        if len(set(ids)) != len(ids):
            raise InconsistentError("one group answered twice")

    def accepted_ids(self) -> Iterator[bytes]:
        return split_ids(self.accepted)

    def announced_ids(self) -> Iterator[bytes]:
        return split_ids(self.announced)

    def refused_ids(self) -> Iterator[tuple[bytes, str]]:
        return ((group, refusal.reason) for refusal in self.refused for group in split_ids(refusal.ids))


def split_ids(joined: bytes) -> Iterator[bytes]:
    """Split concatenated ids."""
    return (joined[i : i + DIGEST_BYTES] for i in range(0, len(joined), DIGEST_BYTES))
