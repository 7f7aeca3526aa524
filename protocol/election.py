"""Election messages: heartbeat, votes, grants, and requests for both.

Both are votes and grants; the heartbeat is the leader's.

A heartbeat is sealed. Requests and answers are not: a peer on a stream is known by its key, a
ballot and a grant prove themselves, and heads are sealed. `protocol.chain` has the rules.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, ClassVar

from protocol import limits, wire
from protocol.digest import DIGEST_BYTES
from protocol.envelope import sign_body, verify_body
from protocol.errors import InconsistentError, ProtocolError
from protocol.fields import (
    Counter,
    Digest,
    Ext,
    Key,
    Signature,
    array,
    blob,
    check_ascending,
    optional,
    signature,
    slug,
    uint,
)
from protocol.identity import Identity
from protocol.wire import of, record, row

Branch = Annotated[
    tuple[bytes, ...], array(blob(limits.HEAD_BYTES + limits.ENVELOPE_BYTES, 1), limits.CHAIN_HEADS)
]
"""Sealed heads that lead to a base, each the predecessor of the next; empty where it is held."""


@record
class Heartbeat:
    """The leader is alive, and this is its newest head.

    A sampler stops without a fresh one.
    """

    KIND: ClassVar[str] = "heartbeat"
    LIMIT: ClassVar[int] = limits.SMALL_BYTES

    head: Digest
    term: Annotated[int, uint(limits.SAFE_INTEGER, 1)]
    time_ms: Counter
    version: Counter
    ext: Ext = dataclasses.field(default_factory=dict)


@record
class TermVote:
    """An elector's one vote of a term: the leader, and the head to go on from."""

    KIND: ClassVar[str] = "vote"
    LIMIT: ClassVar[int] = limits.SMALL_BYTES

    base: Digest
    leader: Key
    term: Annotated[int, uint(limits.SAFE_INTEGER, 2)]
    ext: Ext = dataclasses.field(default_factory=dict)


@row
class Ballot:
    """One elector's signature under a grant."""

    elector: Key
    signature: Signature


@record
class TermGrant:
    """Votes of a majority, which prove that the leader may lead the term."""

    LIMIT: ClassVar[int] = limits.GRANT_BYTES

    ballots: Annotated[tuple[Ballot, ...], array(of(Ballot), limits.KEYS, 1)]
    vote: TermVote

    def check(self) -> None:
        check_ascending((ballot.elector for ballot in self.ballots), "ballots")

    def verify(self, run: bytes) -> None:
        """Raise unless every ballot is signed by its elector for this run."""
        body = wire.encode(self.vote)
        for index, ballot in enumerate(self.ballots):
            try:
                verify_body(TermVote.KIND, body, ballot.elector, ballot.signature, run)
            except ProtocolError as error:
                error.within(f"ballots[{index}]")
                raise


def cast(vote: TermVote, elector: Identity, run: bytes) -> Ballot:
    """Sign a vote that is already on disk."""
    return Ballot(elector.public, sign_body(TermVote.KIND, wire.encode(vote), elector, run))


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
