"""A sampler's account, as one verifier or trainer of its run keeps it: told to that sampler alone, and signed.

A verifier says what it has found itself, a trainer what it has learnt from and what came to nothing. Nobody adds up what
several say, since two verifiers may have looked at one group. It knows nothing of how accounts are kept.
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
    """How many groups came to nothing for one reason."""

    reason: Slug
    groups: Annotated[int, uint(limits.SAFE_INTEGER, 1)]


@record
class CreditStatement:
    """What the signer keeps under a sampler's key. What it does not count, since that is not its role, is 0."""

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
    """What this signer says in this run of this sampler; anything else is refused."""
    opened = open_sealed(sealed, CreditStatement, run, signer=signer)
    if opened.message.sampler != sampler:
        raise InconsistentError("the account of another sampler", "credit-statement.sampler")
    return opened
