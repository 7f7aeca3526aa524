"""Credit statement: a sampler's account with one verifier or trainer, signed.

It is sent to that sampler alone. A verifier states what it has found itself, a trainer what it has
learnt from and what it dropped. Statements are not added up, since two verifiers may have looked at
one group.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, ClassVar

from protocol import limits
from protocol.envelope import Opened, open_sealed
from protocol.errors import InconsistentError
from protocol.fields import Counter, Ext, Key, Slug, array, check_ascending, uint
from protocol.wire import of, record, row


@row
class CreditRefusal:
    """Number of groups that were refused for one reason."""

    reason: Slug
    groups: Annotated[int, uint(limits.SAFE_INTEGER, 1)]


@record
class CreditStatement:
    """The signer's account of a sampler; counts that are not the signer's role are 0."""

    KIND: ClassVar[str] = "credit-statement"
    LIMIT: ClassVar[int] = limits.SMALL_BYTES

    at_ms: Counter
    condemned: Counter
    learnt: Counter
    refused: Annotated[tuple[CreditRefusal, ...], array(of(CreditRefusal), limits.CREDIT_REASONS)]
    sampler: Key
    since_ms: Counter
    tokens: Counter
    verified: Counter
    ext: Ext = dataclasses.field(default_factory=dict)

    def check(self) -> None:
        check_ascending((refusal.reason for refusal in self.refused), "refused")
        if self.since_ms > self.at_ms:
            raise InconsistentError("counted since a time that is yet to come", "since_ms")
        if self.tokens and not self.verified:
            raise InconsistentError("verified tokens of no group", "tokens")


def open_statement(sealed: bytes, run: bytes, *, signer: bytes, sampler: bytes) -> Opened[CreditStatement]:
    """Open the statement of this signer on this sampler in this run; refuse any other."""
    opened = open_sealed(sealed, CreditStatement, run, signer=signer)
    if opened.message.sampler != sampler:
        raise InconsistentError("the account of another sampler", "credit-statement.sampler")
    return opened
