"""Election messages: a candidate's question to an elector, and grants on request.

None is sealed: a peer on a stream is known by its key, a ballot and a grant prove themselves, and
heads are sealed. `protocol.chain` has the rules.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from protocol import limits
from protocol.digest import DIGEST_BYTES
from protocol.errors import InconsistentError
from protocol.fields import array, blob, optional, signature, slug, uint
from protocol.weights import TermGrant, TermVote
from protocol.wire import of, record, row

Branch = Annotated[
    tuple[bytes, ...], array(blob(limits.HEAD_BYTES + limits.ENVELOPE_BYTES, 1), limits.CHAIN_HEADS)
]
"""Sealed heads that lead to a base, each the predecessor of the next; empty where it is held."""


@record
class VoteQuestion:
    """Request for a vote. The peer that asks is the vote's own leader."""

    LIMIT: ClassVar[int] = limits.VOTE_BYTES

    branch: Branch
    vote: TermVote


@record
class VoteAnswer:
    """The elector's signature of the ballot, or the rule by which it refuses."""

    LIMIT: ClassVar[int] = limits.SMALL_BYTES

    refusal: Annotated[str | None, optional(slug)]
    signature: Annotated[bytes | None, optional(signature)]

    def check(self) -> None:
        if (self.refusal is None) == (self.signature is None):
            raise InconsistentError("a vote is given or refused, and not both", "refusal")


@row
class ShownGrant:
    """A grant, and the heads that lead to its base."""

    grant: TermGrant
    branch: Branch


@record
class GrantsQuestion:
    """Question for the grants of the asker's term and the next.

    `held` are ids of heads, newest first.
    """

    LIMIT: ClassVar[int] = limits.SMALL_BYTES

    held: Annotated[tuple[bytes, ...], array(blob(DIGEST_BYTES, DIGEST_BYTES), limits.HELD_HEADS)]
    term: Annotated[int, uint(limits.SAFE_INTEGER, 1)]


@record
class GrantsAnswer:
    """Grants by ascending term: one for each, or several where a term is contested."""

    LIMIT: ClassVar[int] = limits.GRANTS_BYTES

    grants: Annotated[tuple[ShownGrant, ...], array(of(ShownGrant), limits.GRANTS)]

    def check(self) -> None:
        terms = [shown.grant.vote.term for shown in self.grants]
        if terms != sorted(terms):
            raise InconsistentError("grants out of order", "grants")
        if sum(len(shown.branch) for shown in self.grants) > limits.CHAIN_HEADS:
            raise InconsistentError(f"more than {limits.CHAIN_HEADS} heads", "grants")
