"""Inventories at a verifier: lots are drawn over what the leader took, by whatever door."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import trio
import trio.testing

from echo_node.net.base import ACCEPT
from echo_node.net.memory import MemorySwarm
from echo_node.rollouts.taken_groups import TakenGroups, fetch_groups
from echo_node.runtime.change_signal import ChangeSignal
from echo_node.verifier import loop as verifier_loop
from echo_node.verifier.inventories import InventoryLog
from echo_node.verifier.loop import VerifierLoop
from protocol import Envelope, Inventory, InventoryAck, open_sealed, seal, topics
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

VERIFIER, HEIR = identity("verifier"), identity("heir")
RUN = changed_run(open_run(staleness=1), trainers=(TRAINER.public, HEIR.public), verifiers=(VERIFIER.public,))
ANN, BOB = SAMPLERS[:2]
TOPIC = topics.topic(RUN.id, topics.INVENTORIES)


class Place:
    """A verifier and a leader that took groups; the weights of a head do not matter here."""

    def __init__(self, leader, desk):
        self.leader = leader
        self.chain = Chain(RUN)
        self.heads = [self.chain.next(ANN, BOB)]
        self.follower = SimpleNamespace(heads=self.heads, leader=TRAINER.public, term=1)
        chain = SimpleNamespace(find=lambda wanted: next((h for h in self.heads if h.id == wanted), None))
        puller = SimpleNamespace(store=SimpleNamespace(follower=self.follower), chain=chain)
        self.loop = VerifierLoop(RUN, desk, VERIFIER, None, puller)
        self.publish()
        self.taken = TakenGroups(RUN)
        self.acks = []
        self.heard = ChangeSignal()

    def publish(self):
        """The newest head's weights are here."""
        self.loop._admission.published(self.heads[-1], roster(ANN, BOB))
        self.loop._published = {head.id for head in self.heads}

    def group(self, slot, sampler=ANN, head=None, reward=1.0) -> Envelope:
        head = head or self.heads[0]
        said = [right_answer(RUN, head.id, sampler.public, slot), completion([END], reward=reward)]
        return envelope(RUN, head.id, sampler, slot, said)

    def take(self, *groups):
        for each in groups:
            self.taken.add(each.id, each.sealed)
        return groups

    async def gossip(self, *groups):
        await self.loop._admit([*groups])

    async def list(self, *groups, by=TRAINER, number=1, term=1):
        inventory = Inventory(
            groups=b"".join(each.id for each in groups), head=self.heads[-1].id, number=number, term=term
        )
        sealed = seal(inventory, by, RUN.id)
        await self.leader.publish(TOPIC, sealed)
        with trio.move_on_after(5):
            wanted = open_sealed(sealed, Inventory, RUN.id).id
            while not any(each.inventory == wanted for each in self.acks):
                await self.heard.wait()
        return self.acks[-1] if self.acks else None

    @property
    def drawn(self):
        return {*self.loop.selection._new, *self.loop.selection._known}


@pytest.fixture
async def place(monkeypatch, nursery):
    monkeypatch.setattr(verifier_loop, "GOSSIP_SECONDS", 0.05)
    async with MemorySwarm() as swarm, swarm.join(TRAINER) as leader, swarm.join(VERIFIER) as desk:
        made = Place(leader, desk)
        made.swarm, made.desk = swarm, desk

        async def read(inbox):
            async for message in inbox:
                said = Envelope.parse(message.data)
                if said.kind == InventoryAck.KIND:
                    made.acks.append(said.open(InventoryAck, RUN.id, signer=VERIFIER.public).message)
                    made.heard.notify()

        async with (
            leader.subscribe(TOPIC, lambda _: ACCEPT) as acks,
            desk.subscribe(TOPIC, lambda _: ACCEPT) as inventories,
        ):
            nursery.start_soon(read, acks)
            nursery.start_soon(made.loop._hear_inventories, inventories)
            with made.taken.serve(leader):
                yield made
            nursery.cancel_scope.cancel()


async def test_what_came_by_hand_is_fetched_drawn_and_acknowledged(place):
    known, by_hand = place.group(0), place.group(1)
    await place.gossip(known)
    place.take(by_hand)
    ack = await place.list(known, by_hand)
    assert ack.lacking == b""
    assert place.drawn == {known.id, by_hand.id}, "a newcomer's groups are all drawn"
    assert place.loop.inventories.counts == {"listed": 2, "fetched": 1}


async def test_a_leader_that_lists_what_it_does_not_serve_is_named_and_gets_no_acknowledgement(place, caplog):
    known, phantom = place.group(0), place.group(1)
    await place.gossip(known)
    ack = await place.list(known, phantom)
    assert [*ack.lacking_ids()] == [phantom.id]
    assert place.loop.inventories.counts["not served"] == 1
    assert "neither it nor others serve" in caplog.text


async def test_what_the_leader_no_longer_has_is_fetched_from_another_verifier(place):
    here, lost = place.take(place.group(0), place.group(1))
    place.taken.discard(lost.id)
    others = TakenGroups(RUN)
    others.add(lost.id, lost.sealed)
    async with place.swarm.join(HEIR) as other:
        with others.serve(other):
            ack = await place.list(here, lost)
    assert ack.lacking == b""
    assert [*ack.drawn_ids()] == [here.id, lost.id]
    assert place.loop.inventories.counts == {"listed": 2, "fetched": 2}


async def test_a_verifier_serves_what_it_has_seen_to_who_is_named_and_nobody_else(place):
    (group,) = place.take(place.group(0))
    await place.list(group)
    with place.loop._taken.serve(place.desk):
        found = await fetch_groups(place.leader, RUN.id, VERIFIER.public, [group.id])
        assert [each.id for each in found] == [group.id]
        async with place.swarm.join(STRANGER) as stranger:
            assert await fetch_groups(stranger, RUN.id, VERIFIER.public, [group.id]) == []


async def test_an_inventory_of_anybody_but_the_leader_is_not_followed(place):
    group = place.group(0)
    place.take(group)
    for by, term in ((HEIR, 1), (STRANGER, 1)):
        with trio.move_on_after(0.3):
            await place.list(group, by=by, term=term)
    place.follower.term = 2
    with trio.move_on_after(0.3):
        await place.list(group)
    assert not place.acks
    assert not place.drawn


async def test_the_group_that_the_leader_took_is_checked_though_another_came_by_gossip(place):
    shown, taken = place.group(0), place.group(0, reward=0.0)
    assert shown.id != taken.id
    await place.gossip(shown)
    place.take(taken)
    ack = await place.list(taken)
    assert ack.lacking == b""
    assert taken.id in place.drawn


async def test_a_verifier_that_restarted_checks_slots_far_from_the_first(place):
    late = place.group(200)
    place.take(late)
    assert (await place.list(late)).lacking == b""
    assert late.id in place.drawn


async def test_nobody_vouches_for_a_sampler_that_this_verifier_has_muted(place):
    place.loop.trust.condemned(ANN.public, "luck-not-its-own", place.loop._clock())
    groups = place.take(place.group(0), place.group(0, BOB))
    ack = await place.list(*groups)
    assert [*ack.lacking_ids()] == [groups[0].id]


async def test_a_group_of_a_head_that_is_not_here_yet_is_acknowledged_once_it_is(place):
    place.heads.append(place.chain.next(ANN, BOB))
    (early,) = place.take(place.group(0, head=place.heads[1]))
    assert [*(await place.list(early)).lacking_ids()] == [early.id]
    place.publish()
    await place.loop._admit(place.loop._pending.take(place.loop._published))
    (again,) = place.loop.inventories.acknowledge_again()
    assert open_sealed(again, InventoryAck, RUN.id).message.lacking == b""
    assert place.loop.inventories.acknowledge_again() == []


async def test_a_replayed_inventory_costs_nothing_and_a_group_listed_twice_is_drawn_once(place):
    (group,) = place.take(place.group(0))
    await place.list(group)
    await place.list(group, number=2)
    assert len(place.acks) == 2
    assert place.loop.inventories.counts["fetched"] == 1
    assert len(place.loop.selection) == 1


async def test_a_group_that_gossip_brings_in_time_is_not_fetched(place, monkeypatch):
    monkeypatch.setattr(verifier_loop, "GOSSIP_SECONDS", 60.0)
    group = place.group(0)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(place.list, group)
        await trio.testing.wait_all_tasks_blocked(0.02)
        assert not place.acks
        await place.gossip(group)
    assert place.loop.inventories.counts == {"listed": 1}
    assert place.acks[0].lacking == b""


def test_what_a_verifier_remembers_is_bounded(monkeypatch):
    monkeypatch.setattr("echo_node.verifier.inventories.SEEN", 3)
    monkeypatch.setattr("echo_node.verifier.inventories.KEPT", 2)
    log = InventoryLog(RUN.id, VERIFIER)
    for number in range(9):
        log.saw(bytes([number]) * 32, drawn=False)
        log.acknowledge(bytes([number]) * 32, (b"?" * 32,))
    assert log.missing([bytes([number]) * 32 for number in range(9)]) == [
        bytes([number]) * 32 for number in range(6)
    ]
    assert len(log._incomplete) == 2
