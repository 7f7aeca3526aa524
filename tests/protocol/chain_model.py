"""A small world in which the rules of the chain are searched for a mistake.

Three nodes, each a follower, two of them trainers; all are electors, or the two trainers take
turns. Whatever was said lies in one pool, out of which any message reaches any node at any time,
any number of times or never: that is loss, delay, repetition and disorder. Any trainer may call for
a term at any time. A crash takes from a node what it had not put on disk. The rules themselves are
those of `protocol.chain`; signatures are taken for granted here.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from typing import Any

from protocol import ChainError, Elector, Follower, Opened, Rules, TermGrant, TermVote, WeightsHead
from protocol.chain import Head
from protocol.election import Ballot

from .examples import RUN, STANDBY, TRAINER, VERIFIER, name
from .scenarios import RULES, ZERO_HEAD

A, B, V = TRAINER.public, STANDBY.public, VERIFIER.public
NODES = (A, B, V)
_ANCHOR = ZERO_HEAD.message.routes


@dataclasses.dataclass(frozen=True)
class Faults:
    """What is allowed to go wrong beyond crashes and an unreliable network."""

    lying_leader: bytes | None = None
    lying_elector: bytes | None = None
    forgetful_leaders: bool = False
    forgetful_electors: bool = False


@dataclasses.dataclass(frozen=True)
class World:
    nodes: dict[bytes, Follower]
    electors: dict[bytes, Elector]
    heads: tuple[Head, ...]
    votes: frozenset[tuple[bytes, int, bytes, bytes]]
    """Elector, term, leader and base of every ballot that was cast."""
    rules: Rules = RULES

    def key(self) -> Any:
        """What tells worlds apart."""
        nodes = tuple(
            (tuple(h.id for h in n.heads), n.term, n.leader, tuple(sorted(n.revoked)), _vote_keys(n.grants))
            for n in self.nodes.values()
        )
        electors = tuple(tuple(sorted(e.voted.items())) for e in self.electors.values())
        return nodes, electors, frozenset(h.id for h in self.heads), self.votes

    def grants(self) -> list[TermGrant]:
        """Every grant that the ballots make."""
        voters: dict[tuple[int, bytes, bytes], set[bytes]] = {}
        for elector, *vote in self.votes:
            voters.setdefault(tuple(vote), set()).add(elector)
        return [
            TermGrant(tuple(Ballot(key, bytes(64)) for key in sorted(keys)), TermVote(base, leader, term))
            for (term, leader, base), keys in sorted(voters.items())
            if len(keys) >= self.rules.majority_of(term)
        ]

    def branch_to(self, base: bytes, state: Follower) -> list[Head]:
        """The heads that lead from what a node holds to a base, as a peer would send them."""
        known = {head.id: head for head in self.heads}
        held = {head.id for head in state.heads}
        branch: list[Head] = []
        while base in known and base not in held:
            branch.insert(0, known[base])
            base = known[base].message.previous
        return branch


def _vote_keys(grants: tuple[TermGrant, ...]) -> Any:
    return frozenset((grant.vote.term, grant.vote.leader, grant.vote.base) for grant in grants)


def beginning(rules: Rules = RULES) -> World:
    return World(
        {key: Follower.newcomer(rules).accept(ZERO_HEAD) for key in NODES},
        {key: Elector() for key in NODES},
        (ZERO_HEAD,),
        frozenset(),
        rules,
    )


def head_after(before: Head, signer: bytes, term: int, luck: int) -> Head:
    told = before.message
    label = f"{before.id.hex()} {signer.hex()} {term} {luck}"
    message = WeightsHead(
        groups=told.groups,
        layout=told.layout,
        luck=name(label),
        previous=before.id,
        root=name(label),
        roster=told.roster,
        routes=_ANCHOR,
        step=told.step + 1,
        term=term,
        version=told.version + 1,
    )
    return Opened(message, name(f"id {label}"), RUN, signer, b"")


def steps(world: World, faults: Faults, versions: int, terms: int) -> Iterator[tuple[str, World]]:
    """Everything that may happen next."""
    yield from _publishing(world, faults, versions)
    yield from _voting(world, faults, terms)
    yield from _hearing(world)
    if faults.forgetful_electors:
        for key in NODES:
            yield "an elector forgets", dataclasses.replace(world, electors=world.electors | {key: Elector()})


def _publishing(world: World, faults: Faults, versions: int) -> Iterator[tuple[str, World]]:
    for key in (A, B):
        state = world.nodes[key]
        lucks = 2 if key == faults.lying_leader or faults.forgetful_leaders else 1
        for tip in _tips(world, key, faults):
            if state.leader != key or tip.message.version >= versions:
                continue
            for luck in range(lucks):
                head = head_after(tip, key, state.term, luck)
                if any(head.id == known.id for known in world.heads):
                    continue
                published = dataclasses.replace(world, heads=(*world.heads, head))
                if key == faults.lying_leader:
                    yield "a leader lies", published
                elif state.tip and tip.id == state.tip.id:
                    nodes = world.nodes | {key: state.accept(head)}
                    yield "publish", dataclasses.replace(published, nodes=nodes)
                    if (
                        faults.forgetful_leaders
                    ):  # it crashed before the head was on disk, and has sent it already
                        yield "publish and forget", published


def _tips(world: World, key: bytes, faults: Faults) -> list[Head]:
    """After which heads a leader may publish: an honest one after its tip, a liar after any that
    suits it.
    """
    state = world.nodes[key]
    if key != faults.lying_leader:
        return [state.tip] if state.tip and not state.holding else []
    bases = {grant.vote.base for grant in state.grants if grant.vote.term == state.term}
    return [head for head in world.heads if head.message.term == state.term or head.id in bases]


def _voting(world: World, faults: Faults, terms: int) -> Iterator[tuple[str, World]]:
    for candidate in (A, B):
        standing = world.nodes[candidate]
        base, term = standing.tip, standing.term + 1
        if base is None or term > terms:
            continue
        for key in NODES:
            vote = (key, term, candidate, base.id)
            if vote in world.votes or key not in world.rules.electors_of(term):
                continue
            elector = world.electors[key]
            if key != faults.lying_elector:
                cast = TermVote(base.id, candidate, term)
                try:
                    branch = world.branch_to(base.id, world.nodes[key])
                    elector = elector.vote(world.nodes[key], cast, branch, lease_over=True)
                except ChainError:
                    continue
            yield (
                "vote",
                dataclasses.replace(
                    world, electors=world.electors | {key: elector}, votes=world.votes | {vote}
                ),
            )


def _hearing(world: World) -> Iterator[tuple[str, World]]:
    for key, state in world.nodes.items():
        for heard in (*world.heads, *world.grants()):
            told = tell(world, state, heard)
            if told is not state:
                yield "hear", dataclasses.replace(world, nodes=world.nodes | {key: told})


def tell(world: World, state: Follower, heard: Head | TermGrant) -> Follower:
    try:
        if isinstance(heard, TermGrant):
            return state.grant(heard, world.branch_to(heard.vote.base, state))
        return state.accept(heard)
    except ChainError:
        return state


def parted(states: list[Follower]) -> tuple[int, int] | None:
    """A (term, version) at which two followers hold different heads."""
    held: dict[tuple[int, int], bytes] = {}
    for state in states:
        for head in state.heads:
            place = (head.message.term, head.message.version)
            if held.setdefault(place, head.id) != head.id:
                return place
    return None


def told_everything(world: World, seed: int) -> list[Follower]:
    """The nodes after each has heard all that was said, in an order of its own, until nothing is
    new.
    """
    states = []
    for index, start in enumerate(world.nodes.values()):
        pool: list[Head | TermGrant] = [*world.heads, *world.grants()]
        random.Random(f"{seed} {index}").shuffle(pool)
        before, state = None, start
        while before is not state:
            before = state
            for heard in pool:
                state = tell(world, state, heard)
        states.append(state)
    return states
