"""Groups that arrive before their weights: kept within bounds, checked once the head is here."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from echo_node.net.base import ACCEPT, IGNORE, Message
from echo_node.net.memory import MemorySwarm
from echo_node.verifier import pending_groups
from echo_node.verifier.loop import VerifierLoop
from echo_node.verifier.pending_groups import PendingGroups
from protocol import Envelope, topics, write_batch
from tests.crafting import (
    END,
    SAMPLERS,
    STRANGER,
    TRAINER,
    Chain,
    changed_run,
    completion,
    envelope,
    identity,
    open_run,
    right_answer,
    roster,
)

VERIFIER = identity("verifier")
RUN = changed_run(open_run(staleness=1), verifiers=(VERIFIER.public,))
ANN, BOB = SAMPLERS[:2]
HEADS = [bytes([number]) * 32 for number in range(4)]
GROUPS = topics.topic(RUN.id, topics.GROUPS)


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


def group(slot, sampler=ANN, head=HEADS[0]) -> Envelope:
    """One that teaches something: what does not, nobody looks at."""
    said = [right_answer(RUN, head, sampler.public, slot), completion([END], reward=0.0)]
    return envelope(RUN, head, sampler, slot, said)


def test_what_is_kept_comes_back_once_in_order_when_its_heads_are_here():
    kept = PendingGroups(Clock())
    first, second, other = group(0), group(1), group(0, BOB, HEADS[1])
    for each in (first, other, second, first):
        kept.keep(each, (HEADS[1],) if each is other else (HEADS[0],))
    assert len(kept) == 3
    assert kept.take([HEADS[0], HEADS[2]]) == [first, second]
    assert kept.take([HEADS[0]]) == []
    assert kept.take(HEADS) == [other]
    assert len(kept) == 0


def test_a_group_of_several_heads_waits_for_all_of_them():
    kept = PendingGroups(Clock())
    kept.keep(group(0), HEADS[:2])
    assert kept.take(HEADS[:1]) == []
    assert len(kept.take(HEADS[:2])) == 1


def test_what_is_kept_grows_old_and_is_let_go():
    clock = Clock()
    kept = PendingGroups(clock)
    kept.keep(group(0), HEADS[:1])
    clock.now += pending_groups.SECONDS - 1
    kept.keep(group(1), HEADS[:1])
    clock.now += 2
    assert kept.take(HEADS) == [group(1)]


def test_nobody_keeps_more_than_a_share_and_the_loudest_gives_way_first(monkeypatch):
    monkeypatch.setattr(pending_groups, "OF_ONE", 4)
    monkeypatch.setattr(pending_groups, "IN_ALL", 6)
    kept = PendingGroups(Clock())
    for slot in range(6):
        kept.keep(group(slot), HEADS[:1])
    assert len(kept) == 4
    for slot in range(3):
        kept.keep(group(slot, BOB), HEADS[:1])
    assert kept.take(HEADS) == [
        *(group(slot) for slot in (3, 4, 5)),
        *(group(slot, BOB) for slot in range(3)),
    ]


def test_bytes_are_bounded_too(monkeypatch):
    monkeypatch.setattr(pending_groups, "BYTES", 3 * len(group(0).sealed))
    kept = PendingGroups(Clock())
    for slot in range(5):
        kept.keep(group(slot), HEADS[:1])
    assert 1 <= len(kept) <= 3


class Place:
    """A verifier that receives groups before heads; the weights of a head do not matter here."""

    def __init__(self, network):
        self._chain = Chain(RUN)
        self._heads = []
        store = SimpleNamespace(follower=SimpleNamespace(heads=self._heads))
        puller = SimpleNamespace(store=store, chain=SimpleNamespace(find=self._find))
        self.loop = VerifierLoop(RUN, network, VERIFIER, None, puller, clock=Clock())

    def _find(self, wanted):
        return next((head for head in self._heads if head.id == wanted), None)

    def announce(self, *samplers):
        """The next head is heard of; its weights and roster are on their way."""
        self._heads.append(head := self._chain.next(*samplers))
        return head.id

    async def arrive(self, *samplers):
        """They are here, as `_follow` finds them."""
        newest = self._heads[-2:]
        for head in newest:
            if head.id not in self.loop._published:
                self.loop._admission.published(head, roster(*samplers))
        self.loop._published = {head.id for head in newest}
        await self.loop._admit(self.loop._pending.take(self.loop._published))

    async def hear(self, *groups, sender=ANN):
        message = Message(GROUPS, write_batch([each.sealed for each in groups]), sender.public)
        said = self.loop._look_at(message)
        if said is ACCEPT:
            await self.loop._hear(_Once(message))
        return said


class _Once:
    def __init__(self, message):
        self._message = message

    async def __aiter__(self):
        yield self._message


@pytest.fixture
async def place():
    async with MemorySwarm() as swarm, swarm.join(VERIFIER) as network:
        yield Place(network)


@pytest.mark.parametrize("heard_of", [True, False])
async def test_a_group_whose_head_is_not_here_yet_is_looked_at_when_it_is(place, heard_of):
    place.announce(ANN)
    await place.arrive(ANN)
    head = place.announce(ANN)
    if not heard_of:
        unheard = place._heads.pop()
    came_early = group(0, head=head)
    await place.hear(came_early)
    assert len(place.loop.selection) == 0
    assert len(place.loop._pending) == 1
    if not heard_of:
        place._heads.append(unheard)
    await place.arrive(ANN)
    admitted, _ = place.loop.selection.next()
    assert admitted.id == came_early.id
    assert len(place.loop._pending) == 0


async def test_what_is_of_a_head_that_was_left_behind_is_not_kept(place):
    first = place.announce(ANN)
    await place.arrive(ANN)
    for _ in range(2):
        place.announce(ANN)
        await place.arrive(ANN)
    await place.hear(group(0, head=first))
    assert len(place.loop._pending) == 0


async def test_groups_of_newcomers_are_kept_where_a_trainer_shows_them_and_not_where_a_stranger_does(place):
    """Whose names nobody here has heard of: the roster that has them comes with the head."""
    head = place.announce(ANN)
    assert await place.hear(group(0, head=head), sender=STRANGER) is IGNORE
    assert len(place.loop._pending) == 0
    assert await place.hear(group(0, head=head), sender=TRAINER) is IGNORE, "it is passed on to nobody"
    assert len(place.loop._pending) == 1
    await place.arrive(ANN)
    assert len(place.loop.selection) == 1


async def test_what_a_trainer_is_fed_that_is_no_groups_is_not_kept(place):
    said = place.loop._look_at(Message(GROUPS, b"\xff nonsense", TRAINER.public))
    assert said is IGNORE
    assert len(place.loop._pending) == 0
