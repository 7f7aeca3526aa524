"""Rules of the weights chain: succession, terms and proofs of equivocation. Pure.

A follower holds one chain of heads without gaps, from the head that it trusts (version 0, or its
link's) to its tip. Only the leader of a term appends to it. A term rises by one, by a grant of most
electors, and goes on from the grant's base head: only then may the version fall. Two statements of
one key that exclude each other are proof; the key is revoked, and the follower goes back to below
them and holds until a grant. Two grants of one term prove in the same way that an elector voted
twice. Everything here takes opened messages, whose signatures have been checked.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TypeAlias

from protocol.election import TermGrant, TermVote
from protocol.envelope import Opened
from protocol.errors import ChainError
from protocol.manifest import Manifest
from protocol.weights import WeightsHead
from protocol.wire import encode

Head: TypeAlias = Opened[WeightsHead]


@dataclasses.dataclass(frozen=True, slots=True)
class Rules:
    """Rules of a chain that the manifest fixes."""

    run: bytes
    layout: bytes
    root: bytes
    trainers: tuple[bytes, ...]
    electors: tuple[bytes, ...]

    @classmethod
    def of(cls, manifest: Opened[Manifest]) -> Rules:
        message = manifest.message
        return cls(
            manifest.id, message.model.layout, message.model.root, message.trainers, message.terms.electors
        )

    @property
    def takes_turns(self) -> bool:
        """Return whether two trainers are the only electors.

        A majority of two is both, and when it matters one is gone: so of each term one of them
        decides alone, the one that does not lead the term before.
        """
        return len(self.trainers) == 2 and set(self.trainers) == set(self.electors)

    def electors_of(self, term: int) -> tuple[bytes, ...]:
        """Return who votes on the leader of a term, by its number alone.

        Otherwise nodes that heard other things would count other votes.
        """
        return (self.trainers[(term - 1) % 2],) if self.takes_turns else self.electors

    def leaders_of(self, term: int) -> tuple[bytes, ...]:
        """Return who may lead a term; where trainers take turns, the one who decides.

        Otherwise it could give away the other's turn.
        """
        return self.electors_of(term) if self.takes_turns else self.trainers

    def majority_of(self, term: int) -> int:
        return len(self.electors_of(term)) // 2 + 1


@dataclasses.dataclass(frozen=True, slots=True)
class Equivocation:
    """Two heads of one key that exclude each other.

    Either both claim one place, or the second denies the first as its predecessor.
    """

    first: Head
    second: Head

    @classmethod
    def between(cls, a: Head, b: Head) -> Equivocation | None:
        """Return the proof that two heads make, if they make one."""
        first, second = sorted((a, b), key=lambda head: (head.message.version, head.id))
        same_leader = (a.run, a.signer, a.message.term) == (b.run, b.signer, b.message.term)
        distance = second.message.version - first.message.version
        same_place = distance == 0 and first.id != second.id
        denied = distance == 1 and second.message.previous != first.id
        return cls(first, second) if same_leader and (same_place or denied) else None


@dataclasses.dataclass(frozen=True, slots=True)
class Follower:
    """Chain of one node. Methods return a new state, or raise and change nothing.

    What a grant is worth never depends on what was heard before: a revoked key still counts as a
    vote, and a revoked leader's term is entered and held. Otherwise two nodes that hear the same in
    another order would part.
    """

    rules: Rules
    heads: tuple[Head, ...] = ()
    """Consecutive versions, without a gap."""
    term: int = 1
    leader: bytes = b""
    """Leader of the term; None if the term is contested."""
    grants: tuple[TermGrant, ...] = ()
    """Grants taken, oldest first: one for each term after the first, several where it was
    contested.
    """
    revoked: frozenset[bytes] = frozenset()
    """Keys that equivocated, as leaders or as electors."""
    floor: tuple[int, int, bytes] | None = None
    """Term, version and id of the head that a link vouches for: the chain begins there."""

    @classmethod
    def newcomer(cls, rules: Rules, floor: tuple[int, int, bytes] | None = None) -> Follower:
        """Return the state of a node that holds nothing yet.

        `floor` is what its link says; without it the chain begins at version 0.
        """
        return cls(rules, leader=rules.trainers[0], floor=floor)

    @property
    def tip(self) -> Head | None:
        return self.heads[-1] if self.heads else None

    @property
    def holding(self) -> bool:
        """Return whether the leader or its election equivocated.

        Nothing follows before a grant.
        """
        return self.leader in self.revoked or not self.leader

    def accept(self, head: Head) -> Follower:
        """Append a head, skip a held one, or revoke the signer of a contradiction."""
        self._check_belongs(head)
        message = head.message
        same = self._at(message.version)
        if same is not None and same.id == head.id:
            return self
        if not self.heads and self.floor:
            return self._begin_at_floor(head, *self.floor)
        if message.term > self.term:
            raise ChainError(
                "missing-grant", f"a head of term {message.term}, no grant beyond term {self.term} is held"
            )
        for held in (self._at(message.version - 1), same, self._at(message.version + 1)):
            proof = Equivocation.between(held, head) if held else None
            if proof:
                return self.convict(proof)
        if message.term < self.term:
            raise ChainError(
                "old-term", f"a head of term {message.term}, which term {self.term} has replaced"
            )
        if self.holding:
            raise ChainError(
                "revoked", f"a head of term {message.term}, whose leader or election was caught in a lie"
            )
        if head.signer != self.leader:
            raise ChainError("not-leader", f"a head of term {message.term} by a key that does not lead it")
        self._check_follows_tip(message)
        return dataclasses.replace(self, heads=(*self.heads, head))

    def grant(self, grant: TermGrant, branch: Sequence[Head] = ()) -> Follower:
        """Enter the next term.

        `branch` leads from a head that is held to the grant's base, if that is not held.
        """
        self._check_grant(grant)
        vote = grant.vote
        if rivals := [held for held in self.grants if held.vote.term == vote.term]:
            return self._contest(grant, rivals, branch)
        if vote.term <= self.term:
            raise ChainError("old-term", f"a grant for term {vote.term}, this node is in term {self.term}")
        if vote.term != self.term + 1:
            raise ChainError(
                "missing-grant", f"a grant for term {vote.term}, the one for {self.term + 1} is missing"
            )
        heads = self.heads_to(vote.base, branch)
        return dataclasses.replace(
            self, heads=heads, term=vote.term, leader=vote.leader, grants=(*self.grants, grant)
        )

    def convict(self, proof: Equivocation) -> Follower:
        """Revoke a key; go back to below its proof unless a grant settled it since."""
        made = Equivocation.between(proof.first, proof.second)
        if made is None:
            raise ChainError("no-proof", "two heads that do not exclude each other")
        self._check_belongs(made.first)
        self._check_belongs(made.second)
        message, liar = made.first.message, made.first.signer
        kept = self.heads
        if message.term == self.term and liar == self.leader:
            kept = tuple(head for head in kept if self._stands_before(head, message))
        if len(kept) == len(self.heads) and liar in self.revoked:
            return self
        return dataclasses.replace(self, heads=kept, revoked=self.revoked | {liar})

    def heads_to(self, base: bytes, branch: Sequence[Head] = ()) -> tuple[Head, ...]:
        """Return the heads up to a base, on this branch or on the one given."""
        for index, held in enumerate(self.heads):
            if held.id == base:
                return self.heads[: index + 1]
        if not branch or branch[-1].id != base:
            raise ChainError("gap", "the base head is not held: fetch the heads that lead to it")
        kept = self._heads_before(branch[0])
        for head in branch:
            self._check_belongs(head)
            if kept:
                self._check_linked(kept[-1], head)
            kept = (*kept, head)
        return kept

    def _at(self, version: int) -> Head | None:
        """Return the head of a version, if it is held."""
        index = version - self.heads[0].message.version if self.heads else -1
        return self.heads[index] if 0 <= index < len(self.heads) else None

    def _stands_before(self, head: Head, lie: WeightsHead) -> bool:
        vouched_for = self.floor is not None and head.id == self.floor[2]
        return vouched_for or head.message.term < lie.term or head.message.version < lie.version

    def _check_belongs(self, head: Head) -> None:
        if head.run != self.rules.run:
            raise ChainError("wrong-run", "a head of another run")
        if head.signer not in self.rules.trainers:
            raise ChainError("not-trainer", "a head by a key that is no trainer of the run")
        if head.message.layout != self.rules.layout:
            raise ChainError("wrong-layout", "a head for another layout")

    def _check_grant(self, grant: TermGrant) -> None:
        grant.verify(self.rules.run)
        voters = {ballot.elector for ballot in grant.ballots}
        term = grant.vote.term
        electors = self.rules.electors_of(term)
        if not voters <= set(electors):
            raise ChainError("not-elector", "a ballot of a key that is no elector of the term")
        if len(voters) < self.rules.majority_of(term):
            raise ChainError("no-majority", f"{len(voters)} of {len(electors)} electors")
        if grant.vote.leader not in self.rules.leaders_of(term):
            raise ChainError("not-trainer", "a grant to a key that is no trainer, or whose turn it is not")

    def _contest(self, grant: TermGrant, rivals: Sequence[TermGrant], branch: Sequence[Head]) -> Follower:
        """Revoke who voted twice where two majorities granted one term.

        If it is the current term, nobody leads it, and only what both would have gone on from
        stands.
        """
        body = encode(grant.vote)
        if any(encode(held.vote) == body for held in rivals):
            raise ChainError("old-term", f"this grant of term {grant.vote.term} is held")
        voters = {ballot.elector for ballot in grant.ballots}
        twice = {ballot.elector for held in rivals for ballot in held.ballots} & voters
        seen = dataclasses.replace(self, grants=(*self.grants, grant), revoked=self.revoked | twice)
        if grant.vote.term < self.term:
            return seen
        other = {head.id for head in self.heads_to(grant.vote.base, branch)}
        kept = tuple(head for head in self.heads if head.message.term < self.term and head.id in other)
        return dataclasses.replace(seen, heads=kept, leader=b"")

    def _begin_at_floor(self, head: Head, term: int, version: int, wanted: bytes) -> Follower:
        if order(head) < (term, version):
            raise ChainError(
                "below-link", f"version {head.message.version} is older than the link's {version}"
            )
        if head.id != wanted or order(head) != (term, version):
            raise ChainError("gap", f"the link's head, version {version}, has to come first")
        return dataclasses.replace(self, heads=(head,), term=term, leader=head.signer)

    def _check_follows_tip(self, message: WeightsHead) -> None:
        if self.tip is None:
            if message.version:
                raise ChainError("gap", f"version {message.version}, nothing before it is held")
            if message.root != self.rules.root:
                raise ChainError("wrong-root", "version 0 with other weights than the manifest's")
            return
        newest = self.tip.message
        if message.version <= newest.version:
            raise ChainError("rollback", f"version {message.version}, version {newest.version} is held")
        if message.version > newest.version + 1:
            raise ChainError("gap", f"version {message.version}, version {newest.version} is the newest held")
        if message.previous != self.tip.id:
            raise ChainError("wrong-base", f"version {message.version} does not follow the head that is held")
        if message.step < newest.step:
            raise ChainError("wrong-step", f"step {message.step} after step {newest.step}")
        if newest.term < message.term and message.anchor is None:
            raise ChainError("no-anchor", "the first head of a term without an anchor")

    def _heads_before(self, first: Head) -> tuple[Head, ...]:
        """Return the heads that a branch leaves standing."""
        if not self.heads and self.floor is None and first.message.version == 0:
            self._check_follows_tip(first.message)
            if first.signer != self.rules.trainers[0]:
                raise ChainError("not-leader", "version 0 by a key that does not lead term 1")
            return ()
        for index, held in enumerate(self.heads):
            if held.id == first.message.previous:
                return self.heads[: index + 1]
        raise ChainError("gap", "the branch to the base does not start at a head that is held")

    def _check_linked(self, before: Head, head: Head) -> None:
        """Check that a branch has one leader, or enters a term at a held grant's base."""
        one, two = before.message, head.message
        if two.previous != before.id or two.version != one.version + 1 or two.step < one.step:
            raise ChainError("wrong-base", "the branch to the base is not a chain")
        goes_on = (two.term, head.signer) == (one.term, before.signer)
        entering = (two.term, head.signer, before.id)
        enters = any((held.vote.term, held.vote.leader, held.vote.base) == entering for held in self.grants)
        if not goes_on and not enters:
            raise ChainError("wrong-base", "the branch to the base changes hands without a grant")


@dataclasses.dataclass(frozen=True, slots=True)
class Elector:
    """Memory of an elector, on disk before its vote leaves.

    There is one vote per term, as bytes.
    """

    voted: dict[int, bytes] = dataclasses.field(default_factory=dict)

    def vote(
        self, follower: Follower, vote: TermVote, branch: Sequence[Head] = (), *, lease_over: bool
    ) -> Elector:
        """Agree to a candidate, or raise.

        `branch` shows the way to the base, if this elector does not hold it.
        """
        if not lease_over:
            raise ChainError("lease", "the leader's lease has not run out")
        if vote.term != follower.term + 1:
            raise ChainError(
                "old-term", f"a candidate for term {vote.term}, the next one is {follower.term + 1}"
            )
        if self.voted.get(vote.term, encode(vote)) != encode(vote):
            raise ChainError("voted", f"this elector has given its vote of term {vote.term}")
        if vote.leader not in follower.rules.leaders_of(vote.term) or vote.leader in follower.revoked:
            raise ChainError(
                "not-trainer",
                "a candidate that is no trainer, whose turn it is not, or who was caught in a lie",
            )
        base = follower.heads_to(vote.base, branch)[-1]
        if follower.tip is not None and order(base) < order(follower.tip):
            raise ChainError(
                "behind", "a candidate whose newest head is older than one that this elector holds"
            )
        return dataclasses.replace(self, voted={**self.voted, vote.term: encode(vote)})


def order(head: Head) -> tuple[int, int]:
    """Return the sort key of a head: term, then version."""
    return head.message.term, head.message.version
