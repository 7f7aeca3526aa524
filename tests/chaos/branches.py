"""The chain of versions as all nodes together know it: the surviving branch, leaders, groups.

It is put together again from signed heads and grants alone, by rules of its own, so that a node's
word is never its proof.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from protocol import TermGrant, WeightsHead, encode, merkle_root, open_sealed
from protocol.digest import ZERO
from protocol.errors import ProtocolError
from tests.chaos.evidence import Evidence, KnownBatch, KnownGroup
from tests.chaos.holdings import KnownHead


@dataclass(frozen=True)
class Trained:
    """A group that a version was trained on: trainer, policy step and batch."""

    group: KnownGroup
    version: int
    policy_step: int
    trainer: str
    batch: int | None


@dataclass(frozen=True)
class Branches:
    """All heads and grants that any node took."""

    evidence: Evidence

    @cached_property
    def heads(self) -> dict[bytes, KnownHead]:
        return {
            head.id: head
            for node in self.evidence.nodes
            if node.holdings is not None
            for head in node.holdings.heads
        }

    @cached_property
    def grants(self) -> dict[int, list[TermGrant]]:
        """By term, each vote once."""
        found: dict[bytes, TermGrant] = {}
        for node in self.evidence.nodes:
            for grant in node.holdings.grants if node.holdings else ():
                found.setdefault(encode(grant.vote), grant)
        by_term: dict[int, list[TermGrant]] = {}
        for grant in found.values():
            by_term.setdefault(grant.vote.term, []).append(grant)
        return by_term

    @cached_property
    def leaders(self) -> dict[int, bytes]:
        first = self.evidence.manifest.message.trainers[0]
        return {1: first} | {term: grants[0].vote.leader for term, grants in self.grants.items()}

    @cached_property
    def last_leader(self) -> bytes:
        return self.leaders[max(self.leaders)]

    @cached_property
    def chain(self) -> tuple[KnownHead, ...]:
        """Return the surviving branch, from its first known head to its tip.

        The tip is the newest head that a leader signed in its term.
        """
        led = [head for head in self.heads.values() if self.leaders.get(head.message.term) == head.signer]
        at: KnownHead | None = max(led, key=lambda head: head.order, default=None)
        found = []
        while at is not None:
            found.append(at)
            at = None if at.message.previous == ZERO else self.heads.get(at.message.previous)
        return tuple(reversed(found))

    @cached_property
    def places(self) -> dict[bytes, int]:
        return {head.id: place for place, head in enumerate(self.chain)}

    def bases(self) -> Iterator[tuple[TermGrant, KnownHead]]:
        """Every change of leaders: the grant, and the head from which the new one went on."""
        for grants in self.grants.values():
            for grant in grants:
                if (base := self.heads.get(grant.vote.base)) is not None:
                    yield grant, base

    # What was trained

    @cached_property
    def trained(self) -> dict[int, tuple[Trained, ...]]:
        """Return the groups that each head of the surviving branch commits to, by version.

        Groups that no record names are left out.
        """
        found = {}
        for before, head in zip(self.chain, self.chain[1:], strict=False):
            named = next(self._named(before, head), None)
            if named is not None:
                found[head.message.version] = named
        return found

    @cached_property
    def _batches(self) -> dict[tuple[str, int, bytes], list[KnownBatch]]:
        """By trainer, version, and the head that was the newest when they were drawn."""
        found: dict[tuple[str, int, bytes], list[KnownBatch]] = {}
        for node in self.evidence.of("trainer"):
            for batch in node.trainer.batches if node.trainer else ():
                found.setdefault((node.name, batch.version, batch.tip), []).append(batch)
        return found

    def _named(self, before: KnownHead, head: KnownHead) -> Iterator[tuple[Trained, ...]]:
        """Return the groups whose ids have the head's root, by journals or records of trainers."""
        version = head.message.version
        for node in self.evidence.of("trainer"):
            if node.trainer is None:
                continue
            groups = node.trainer.groups
            batches = [  # drawn while the head before was being published, or after
                each
                for tip in (before.message.previous, before.id)
                for each in self._batches.get((node.name, version, tip), ())
            ]
            journalled = tuple(
                Trained(groups[id_], version, each.policy_step, node.name, each.number)
                for each in batches
                for id_ in each.groups
            )
            recorded = tuple(
                Trained(group, version, step, node.name, None)
                for step, group in node.trainer.recorded.get(version, ())
            )
            for named in (journalled, recorded):
                if merkle_root(sorted(each.group.id for each in named)) == head.message.groups:
                    yield named


def problems_of_chain(branches: Branches) -> Iterator[str]:
    """What is wrong with the heads and grants that all nodes together hold, as one history."""
    manifest = branches.evidence.manifest.message
    run = branches.evidence.manifest.id
    for head in branches.heads.values():
        try:
            open_sealed(head.sealed, WeightsHead, run)
        except ProtocolError as error:
            yield f"the head of {head} is not signed by whom it names: {error}"
        if head.signer not in manifest.trainers:
            yield f"the head of {head} is by a key that is no trainer"
        elif branches.leaders.get(head.message.term) != head.signer:
            yield f"the head of {head} is by {branches.evidence.name_of(head.signer)}, who did not lead its term"
    yield from _problems_of_grants(branches)
    yield from _two_of_one(branches)
    yield from _problems_of_links(branches)
    for head in branches.heads.values():
        if head.id not in branches.places and not _was_left(branches, head):
            yield f"the head of {head} is on a branch that no grant has left behind"


def _problems_of_grants(branches: Branches) -> Iterator[str]:
    terms, run = branches.evidence.manifest.message.terms, branches.evidence.manifest.id
    trainers = branches.evidence.manifest.message.trainers
    for term, grants in branches.grants.items():
        if len(grants) > 1:
            yield f"term {term} was granted {len(grants)} times"
        for grant in grants:
            voters = {ballot.elector for ballot in grant.ballots}
            try:
                grant.verify(run)
            except ProtocolError as error:
                yield f"the grant of term {term} has a ballot that its elector has not signed: {error}"
            if not voters <= set(terms.electors) or 2 * len(voters) <= len(terms.electors):
                yield f"the grant of term {term} has {len(voters)} of {len(terms.electors)} electors"
            if grant.vote.leader not in trainers:
                yield f"the grant of term {term} is to a key that is no trainer"


def _two_of_one(branches: Branches) -> Iterator[str]:
    """A key that says two things of one place."""
    places: dict[tuple[bytes, int, bytes], list[KnownHead]] = {}
    for head in branches.heads.values():
        places.setdefault((head.signer, head.message.term, head.message.previous), []).append(head)
    for heads in places.values():
        if len(heads) > 1:
            yield f"two heads of one parent: {' and '.join(map(str, heads))}"


def _problems_of_links(branches: Branches) -> Iterator[str]:
    chain, manifest = branches.chain, branches.evidence.manifest.message
    if not chain:
        yield "no node holds any head"
        return
    if chain[0].message.version != 0:
        yield f"nobody holds the parent of {chain[0]}"
    elif chain[0].message.root != manifest.model.root:
        yield f"{chain[0]} has other weights than the manifest's"
    for head in branches.heads.values():  # those of branches that were left too
        before = branches.heads.get(head.message.previous)
        if before is not None:
            yield from _problems_of_link(branches, before, head)


def _problems_of_link(branches: Branches, before: KnownHead, head: KnownHead) -> Iterator[str]:
    if head.message.version != before.message.version + 1 or head.message.step < before.message.step:
        yield f"{head} follows {before}"
    if head.message.term < before.message.term:
        yield f"the term falls from {before} to {head}"
    elif head.message.term > before.message.term:
        granted = branches.grants.get(head.message.term, [])
        if all(grant.vote.base != before.id for grant in granted):
            yield f"{head} enters its term without a grant that goes on from {before}"


def _was_left(branches: Branches, head: KnownHead) -> bool:
    """Whether a later term went on from below this head."""
    return any(
        grant.vote.term > head.message.term
        and base.message.version < head.message.version
        and base.id in branches.places
        for grant, base in branches.bases()
    )


def rosters(branches: Branches) -> Mapping[bytes, bytes]:
    """The rosters that somebody still holds, by the blob's id, hashed again."""
    found: dict[bytes, bytes] = {}
    for head in branches.heads.values():
        for node in branches.evidence.nodes:
            if head.message.roster not in found and node.holdings is not None:
                data = node.holdings.roster(head.message)
                if data is not None:
                    found[head.message.roster] = data
    return found
