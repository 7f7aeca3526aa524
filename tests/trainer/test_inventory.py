"""Inventories: trust opens nothing that no verifier could have seen, whatever door it came by."""

from __future__ import annotations

from collections import Counter
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing

from echo_node.net.base import ACCEPT, Message, Reject, RequestError
from echo_node.net.memory import MemorySwarm
from echo_node.rollouts import taken_groups
from echo_node.rollouts.admission import Admission
from echo_node.rollouts.gossip_validation import validate_inventories
from echo_node.rollouts.record import RolloutRecord
from echo_node.rollouts.taken_groups import TakenGroups, fetch_groups
from echo_node.runtime.reputation import NEWCOMER
from echo_node.trainer import inventory as inventory_module
from echo_node.trainer.batch_selection import Entrance
from echo_node.trainer.group_admission import GroupAdmission
from echo_node.trainer.inventory import InventoryPublisher
from echo_node.trainer.receipts import Receipts
from echo_node.trainer.replay_buffer import ReplayBuffer
from echo_node.trainer.verdict_listener import VerdictEnforcer
from echo_node.trainer.verdict_policy import VerdictPolicy
from protocol import (
    Envelope,
    Inventory,
    InventoryAck,
    limits,
    open_sealed,
    seal,
    topics,
)
from protocol.manifest import Verification
from tests.crafting import SAMPLERS, TRAINER, Chain, changed_run, open_run, roster, sealed_group
from tests.trainer.test_verdict_policy import STRANGER, VERIFIERS, give_verdict

ANN = SAMPLERS[0]
JUDGE = VERIFIERS[0]


def run_of(policy="sampled", verifiers=1, quorum=1):
    return changed_run(
        open_run(),
        verification=Verification(policy=policy, quorum=quorum, share=0.0),
        verifiers=tuple(sorted(each.public for each in VERIFIERS[:verifiers])),
    )


class Place:
    """A leader that takes groups, and a verifier beside it that does what a test wants."""

    def __init__(self, run, network, desk):
        self.run, self.network, self.desk = run, network, desk
        self.policy = VerdictPolicy(run, TRAINER)
        self.buffer = ReplayBuffer(capacity=64, staleness=2, batch=8, entry=self.policy)
        self.receipts = Receipts(network, TRAINER, run.id)
        self.head = Chain(run).next(ANN)
        self.receipts.set_head(self.head)
        self.publisher = InventoryPublisher(run, network, TRAINER, self.policy, self.buffer, self.receipts)
        checks = Admission(run)
        checks.published(self.head, roster(ANN))
        enforcer = VerdictEnforcer(self.buffer, self.receipts, None)
        self.admission = GroupAdmission(checks, self.policy, enforcer, Counter(), self.publisher)
        self.inventories = []

    def take(self, *slots) -> list[RolloutRecord]:
        sealed = [Envelope.parse(sealed_group(self.run, self.head.id, ANN, slot)) for slot in slots]
        taken = [self.admission.judge(each) for each in sealed]
        for each in taken:
            self.buffer.put(each)
        return taken

    def trust(self, since=40):
        for slot in range(since, since + NEWCOMER + 2):
            (one,) = self.take(slot)
            give_verdict(self.policy, self.run, one.id, JUDGE)

    async def listed(self) -> list[Inventory]:
        await trio.testing.wait_all_tasks_blocked()
        return [each.message for each in self.inventories]

    async def acknowledge(self, inventory, lacking=(), verifier=JUDGE, drawn=()):
        ack = InventoryAck(drawn=b"".join(drawn), inventory=inventory.id, lacking=b"".join(lacking))
        await self.desk.publish(
            topics.topic(self.run.id, topics.INVENTORIES), seal(ack, verifier, self.run.id)
        )
        await trio.testing.wait_all_tasks_blocked()


@asynccontextmanager
async def opened_place(run):
    async with MemorySwarm() as swarm, swarm.join(TRAINER) as network, swarm.join(JUDGE) as desk:
        place = Place(run, network, desk)

        async def read(inbox):
            async for message in inbox:
                envelope = Envelope.parse(message.data)
                if envelope.kind == Inventory.KIND:
                    place.inventories.append(envelope.open(Inventory, run.id))

        topic = topics.topic(run.id, topics.INVENTORIES)
        async with desk.subscribe(topic, lambda _: ACCEPT) as inbox, trio.open_nursery() as nursery:
            nursery.start_soon(read, inbox)
            nursery.start_soon(place.publisher.work)
            await trio.testing.wait_all_tasks_blocked()
            yield place
            nursery.cancel_scope.cancel()


async def test_a_trusted_samplers_group_opens_only_once_a_verifier_has_acknowledged_it():
    async with opened_place(run_of()) as place:
        place.trust()
        first, second = place.take(0, 1)
        assert place.policy.entrance(first) is Entrance.BOUNDED, "nobody can have seen it"
        seen = place.buffer.changed.count
        await place.publisher.flush()
        await place.listed()
        assert place.policy.entrance(first) is Entrance.BOUNDED, "a publish is not yet seen"
        await place.acknowledge(place.inventories[-1], lacking=[second.id])
        assert place.policy.entrance(first) is Entrance.OPEN
        assert place.policy.entrance(second) is Entrance.BOUNDED, "the verifier could not have it"
        assert place.buffer.changed.count > seen, "who waits for a batch hears of it"
        await place.acknowledge(place.inventories[-1])
        assert place.policy.entrance(second) is Entrance.OPEN


async def test_acknowledgements_of_other_inventories_or_of_strangers_open_nothing():
    async with opened_place(run_of()) as place:
        place.trust()
        (group,) = place.take(0)
        await place.publisher.flush()
        await place.listed()
        other = Inventory(groups=group.id, head=place.head.id, number=1, term=1)
        forged = open_sealed(seal(other, STRANGER, place.run.id), Inventory, place.run.id)
        await place.acknowledge(forged)
        await place.acknowledge(place.inventories[-1], verifier=STRANGER)
        assert place.policy.entrance(group) is Entrance.BOUNDED


def test_only_trainers_list_groups_and_only_verifiers_acknowledge():
    run = run_of()
    listed = Inventory(groups=bytes(32), head=bytes(32), number=1, term=1)
    seen = InventoryAck(drawn=b"", inventory=bytes(32), lacking=b"")

    def said(message, signer):
        return validate_inventories(run, Message("t", seal(message, signer, run.id), b"s" * 32))

    assert said(listed, TRAINER) is ACCEPT
    assert said(seen, JUDGE) is ACCEPT
    assert said(listed, JUDGE) == Reject("not-trainer")
    assert said(seen, TRAINER) == Reject("not-verifier")
    assert said(seen, STRANGER) == Reject("not-verifier")


async def test_what_nobody_acknowledges_is_listed_again_with_the_next_numbers(autojump_clock):  # noqa: ARG001 - it jumps
    async with opened_place(run_of()) as place:
        (group,) = place.take(0)
        await trio.sleep(1)
        assert [each.number for each in await place.listed()] == [1]
        await trio.sleep(20)
        again = await place.listed()
        assert [each.number for each in again] == [1, 2, 3, 4], "after 2, 4 and 8 s"
        assert {each.groups for each in again} == {group.id}
        await place.acknowledge(place.inventories[-1])
        await trio.sleep(200)
        assert len(await place.listed()) == 4


async def test_a_group_that_left_the_buffer_is_not_listed_for_ever(autojump_clock):  # noqa: ARG001 - it jumps
    async with opened_place(run_of()) as place:
        (group,) = place.take(0)
        place.buffer.remove([group.id], "stale")
        await trio.sleep(inventory_module.OUTSIDE_SECONDS + 1)
        before = len(await place.listed())
        await trio.sleep(600)
        assert len(await place.listed()) == before
        assert not place.publisher._unseen


async def test_many_groups_are_listed_in_few_inventories():
    async with opened_place(run_of()) as place:
        for number in range(limits.INVENTORY_IDS + 3):
            place.publisher.add(RolloutRecord(number.to_bytes(32), b"s" * 32, 0, b"", 0, b"x"))
        await place.publisher.flush()
        assert [len(each.groups) // 32 for each in await place.listed()] == [limits.INVENTORY_IDS, 3]


async def test_what_found_no_room_is_not_listed():
    async with opened_place(run_of()) as place:
        (group,) = place.take(0)
        place.admission.release(group)
        await place.publisher.flush()
        assert await place.listed() == []


@pytest.mark.parametrize("policy", ["self", "sampled"])
async def test_a_run_without_verifiers_lists_nothing(policy, autojump_clock):  # noqa: ARG001 - it jumps
    async with opened_place(run_of(policy, verifiers=0)) as place:
        place.take(0, 1)
        await trio.sleep(60)
        assert await place.listed() == []


async def test_by_quorum_a_group_is_listed_until_so_many_have_seen_it(autojump_clock):  # noqa: ARG001 - it jumps
    async with opened_place(run_of("quorum", verifiers=2, quorum=2)) as place:
        place.take(0)
        await trio.sleep(1)
        await place.listed()
        await place.acknowledge(place.inventories[-1])
        await trio.sleep(3)
        assert len(await place.listed()) == 2, "one of two is not enough"
        for verifier in VERIFIERS[:2]:
            await place.acknowledge(place.inventories[-1], verifier=verifier)
        await trio.sleep(200)
        assert len(await place.listed()) == 2


async def test_a_batch_leaves_out_what_came_just_before_it_was_cut():
    async with opened_place(run_of()) as place:
        place.trust()
        await place.publisher.flush()
        await place.listed()
        await place.acknowledge(place.inventories[-1])
        late = place.take(*range(8))
        batch = place.buffer.draw(8, step=0)
        assert len(batch) == 8
        assert not {each.id for each in batch} & {each.id for each in late}


# Serving


async def test_verifiers_fetch_what_the_leader_took_and_strangers_do_not():
    async with opened_place(run_of()) as place:
        groups = place.take(0, 1, 2)
        ids = [groups[1].id, b"?" * 32, groups[2].id]
        found = await fetch_groups(place.desk, place.run.id, TRAINER.public, ids)
        assert [each.sealed for each in found] == [groups[1].sealed, groups[2].sealed]
        assert await fetch_groups(place.desk, place.run.id, TRAINER.public, [b"?" * 32]) == []
        async with place.network._swarm.join(STRANGER) as stranger:
            assert await fetch_groups(stranger, place.run.id, TRAINER.public, ids) == []
            with pytest.raises(RequestError, match="verifiers and trainers only"):
                await stranger.request(
                    TRAINER.public, topics.GROUPS_STREAM, b"anything", deadline=5, most=limits.ANSWER_BYTES
                )


async def test_more_groups_than_one_answer_holds_come_in_several(monkeypatch):
    run = run_of()
    taken = TakenGroups(run)
    sealed = [sealed_group(run, b"h" * 32, ANN, slot) for slot in range(9)]
    for each in sealed:
        taken.add(Envelope.parse(each).id, each)
    monkeypatch.setattr(limits, "GROUPS_ANSWER_BYTES", 2 * len(sealed[0]) + 40)
    asked = []

    async with MemorySwarm() as swarm, swarm.join(TRAINER) as network, swarm.join(JUDGE) as desk:
        answer = taken._answer

        async def counted(peer, question):
            asked.append(1)
            return await answer(peer, question)

        monkeypatch.setattr(taken, "_answer", counted)
        with taken.serve(network):
            ids = [Envelope.parse(each).id for each in sealed]
            found = await fetch_groups(desk, run.id, TRAINER.public, ids)
    assert [each.sealed for each in found] == sealed
    assert len(asked) == 5


def test_what_can_be_served_is_bounded(monkeypatch):
    monkeypatch.setattr(taken_groups, "HELD", 3)
    taken = TakenGroups(run_of(), most_bytes=10)
    for number in range(9):
        taken.add(bytes([number]), b"1234")
    assert [*taken._held] == [b"\x07", b"\x08"]
    assert taken._bytes == 8
    taken.discard(b"\x08")
    taken.discard(b"\x08")
    assert taken._bytes == 4
