"""Asynchronous mode: gossiped groups from any peer, and the receipts for them."""

from __future__ import annotations

import math
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
import trio
import trio.testing

from echo_node.errors import StoreError
from echo_node.net.base import ACCEPT, CAPACITY, IGNORE, Message, SenderMuted
from echo_node.net.memory import MemorySwarm
from echo_node.rollouts.admission import Admission
from echo_node.rollouts.gossip_validation import GossipValidator
from echo_node.runs.engine_shares import ClassShares
from echo_node.runs.run import Run
from echo_node.trainer.batch_source import BatchRequest, NoBatchError
from echo_node.trainer.gossip_source import GossipSource
from echo_node.trainer.journal import open_journal
from echo_node.trainer.rate_control import RateControl
from echo_node.trainer.receipts import Receipts
from echo_node.trainer.replay_buffer import ReplayBuffer
from echo_node.trainer.sender_quota import PATIENCE, USELESS, SenderQuota
from protocol import Receipt, canonical, fill_batches, open_sealed, seal, topics, write_batch
from protocol.errors import BadSignatureError
from tests.crafting import SAMPLERS, STRANGER, TRAINER, Chain, forged, group, open_run, roster, sealed_group

RUN = open_run(staleness=1)
GROUPS, RECEIPTS = (topics.topic(RUN.id, cargo) for cargo in (topics.GROUPS, topics.RECEIPTS))
ANN, BOB = SAMPLERS[:2]
BATCH = 4


class Trainer:
    """A source with everything real around it, and a sampler beside it on the network."""

    def __init__(self, network, sampler, inbox, journal, capacity, share):
        self.chain, self.admission = Chain(RUN), Admission(RUN)
        shares = ClassShares([replace(each, share=share) for each in RUN.manifest.engines])
        self.buffer = ReplayBuffer(
            capacity=capacity, staleness=1, batch=BATCH if share < 1 else None, shares=shares
        )
        self.network, self.sampler, self._inbox = network, sampler, inbox
        self.receipts = Receipts(network, TRAINER, RUN.id)
        validator = GossipValidator(RUN, self.admission)
        self.quota = SenderQuota(validator.named, clock=lambda: 0.0)
        self.source = GossipSource(
            RUN.id,
            BATCH,
            self.buffer,
            self.receipts,
            self.admission,
            journal,
            validator,
            self.quota,
        )
        self.journal = journal
        self.publish()

    def publish(self):
        self.head = self.chain.next(ANN, BOB)
        self.admission.published(self.head, roster(ANN, BOB))
        self.receipts.set_head(self.head)

    async def next_batch(self, step, patience=math.inf):
        """A batch; nothing, if there is none within the patience."""
        try:
            return await self.source.next_batch(BatchRequest(1, step, self.head, roster(ANN, BOB), patience))
        except NoBatchError as error:
            self.hindrance = str(error)
            return ()

    async def gossip(self, *sealed, raw=None):
        await self.sampler.publish(GROUPS, raw if raw is not None else write_batch(sealed))
        await self.settled()

    async def settled(self):
        """Wait until what was sent is on disk, by a thread that no test clock sees."""
        for _ in range(3):  # what came meanwhile has its turn after this one
            await trio.testing.wait_all_tasks_blocked()
            async with self.source._judging, self.source._keeping:
                pass
        await trio.testing.wait_all_tasks_blocked()

    def group(self, slot, sampler=ANN):
        return sealed_group(RUN, self.head.id, sampler, slot)

    async def receipt_counts(self) -> dict[str, int]:
        """How many groups receipts have named since the last time, by what they say."""
        await self.receipts.send()
        await trio.testing.wait_all_tasks_blocked()
        counts = {}
        for _ in range(len(self._inbox)):
            receipt = open_sealed((await self._inbox.receive()).data, Receipt, RUN.id).message
            for _group in receipt.accepted_ids():
                counts["accepted"] = counts.get("accepted", 0) + 1
            for _group, reason in receipt.refused_ids():
                counts[reason] = counts.get(reason, 0) + 1
        return counts

    @property
    def faults(self):
        return self.network.scores().get(ANN.public, {})


@asynccontextmanager
async def gathering(capacity=2 * BATCH, share=1.0):
    async with (
        MemorySwarm() as swarm,
        swarm.join(TRAINER) as network,
        swarm.join(ANN) as sampler,
        sampler.subscribe(RECEIPTS, lambda _: ACCEPT) as inbox,
        open_journal(None, RUN.id) as journal,
        trio.open_nursery() as nursery,
    ):
        trainer = Trainer(network, sampler, inbox, journal, capacity, share)
        nursery.start_soon(trainer.source.listen, network)
        await trio.testing.wait_all_tasks_blocked()
        yield trainer
        nursery.cancel_scope.cancel()


async def test_groups_arrive_wait_and_make_a_batch():
    async with gathering() as trainer:
        await trainer.gossip(*(trainer.group(slot) for slot in range(3)))
        assert len(trainer.buffer) == 3
        batches = []

        async def draw():
            batches.append(await trainer.next_batch(0))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(draw)
            await trio.testing.wait_all_tasks_blocked()
            assert batches == []
            await trainer.gossip(trainer.group(3, BOB), trainer.group(4, BOB))
        assert len(batches[0]) == BATCH
        assert len(trainer.buffer) == 1
        assert await trainer.receipt_counts() == {"accepted": 5}
        assert trainer.faults == {}


async def test_a_step_that_waits_is_woken_only_by_enough_groups_of_fresh_heads():
    async with gathering() as trainer:
        await trainer.gossip(*(trainer.group(slot) for slot in range(3)))
        for _ in range(2):
            trainer.publish()
        batches = []

        async def draw():
            batches.append(await trainer.next_batch(2))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(draw)
            await trainer.gossip(*(trainer.group(slot) for slot in range(3)))
            assert batches == [], "three that grew stale do not make up the number"
            await trainer.gossip(trainer.group(3))
        assert {group.step for group in batches[0]} == {2}
        assert trainer.buffer.dropped["stale"] == 3


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"", "truncated"),
        (b"\xc1", "forbidden-type"),
        (canonical.encode([]), "out-of-range"),
        (canonical.encode({"a": 1}), "wrong-type"),
        (canonical.encode([b"no envelope"]), None),
        (canonical.encode([1]), "wrong-type"),
    ],
)
async def test_a_batch_that_is_none_is_held_against_whoever_sent_it(raw, reason):
    async with gathering() as trainer:
        await trainer.gossip(raw=raw)
        assert sum(trainer.faults.values()) == 1
        assert reason is None or reason in trainer.faults
        await trainer.gossip(trainer.group(0))
        assert await trainer.receipt_counts() == {"accepted": 1}, "and the next is heard all the same"


async def test_one_bad_envelope_or_one_of_another_run_condemns_the_whole_batch():
    other = open_run(staleness=2)
    async with gathering() as trainer:
        await trainer.gossip(raw=canonical.encode([trainer.group(0), trainer.group(1)[:-1]]))
        assert sum(trainer.faults.values()) == 1
        await trainer.gossip(trainer.group(0), sealed_group(other, trainer.head.id, ANN, 1))
        assert trainer.faults["wrong-run"] == 1
        assert len(trainer.buffer) == 0
        assert await trainer.receipt_counts() == {}


async def test_what_is_stale_double_or_a_strangers_is_refused_by_name_and_nobodys_fault():
    async with gathering() as trainer:
        old = [trainer.group(0), trainer.group(1)]
        await trainer.gossip(old[0])
        await trainer.gossip(old[0], sealed_group(RUN, trainer.head.id, STRANGER, 0))
        assert await trainer.receipt_counts() == {"accepted": 1}, "a stranger is not worth an answer"
        for _ in range(2):
            trainer.publish()
        await trainer.gossip(old[1])
        assert await trainer.receipt_counts() == {"stale": 1}
        assert trainer.faults == {}


async def test_a_group_that_was_taken_stays_taken_whatever_comes_under_its_name_later():
    async with gathering() as trainer:
        good = trainer.group(0)
        await trainer.gossip(good)
        await trainer.gossip(forged(good))
        await trainer.gossip(good, trainer.group(1))
        assert await trainer.receipt_counts() == {"accepted": 2}
        assert len(trainer.buffer) == 2


async def test_beyond_the_capacity_groups_are_told_that_it_is_full():
    async with gathering(capacity=BATCH) as trainer:
        await trainer.gossip(*(trainer.group(slot) for slot in range(BATCH + 2)))
        assert len(trainer.buffer) == BATCH
        assert await trainer.receipt_counts() == {"accepted": BATCH, "full": 2}
        assert trainer.faults == {}


async def test_the_wanted_rate_feeds_a_batch_a_step_and_falls_when_plenty_is_waiting():
    async with gathering() as trainer:
        rates = []
        for first in range(0, 3 * BATCH, BATCH):
            trainer.source.stepped(2.0, samplers=2)
            rates.append(trainer.receipts.rate)
            assert len(trainer.buffer) == first
            await trainer.gossip(*(trainer.group(slot) for slot in range(first, first + BATCH)))
        assert trainer.buffer.full
        assert rates == pytest.approx([1.3, 1.0, 0.7])


async def test_the_pace_is_smoothed_and_shared_among_the_samplers():
    async with gathering() as trainer:
        trainer.source.stepped(1.0, samplers=1)
        alone = trainer.receipts.rate
        trainer.source.stepped(1.0, samplers=4)
        assert trainer.receipts.rate == pytest.approx(alone / 4)
        trainer.source.stepped(11.0, samplers=1)
        assert trainer.receipts.rate == pytest.approx(alone / 4.0), "one slow step is not the pace"
        for _ in range(50):
            trainer.source.stepped(1.0, samplers=1)
        assert trainer.receipts.rate == pytest.approx(alone, rel=1e-3)


@pytest.mark.parametrize("batch", [1, 4096])
async def test_the_rate_is_always_one_that_a_receipt_can_carry(batch):
    async with gathering() as trainer:
        trainer.source._batch = batch
        for seconds, samplers in ((0.0, 0), (1e-9, 1), (1e9, 8192)):
            trainer.source._wanting = RateControl(batch)
            trainer.source.stepped(seconds, samplers)
            assert trainer.receipts.rate > 0
            trainer.receipts.refuse(bytes([samplers % 7]) * 32, "stale")
            assert await trainer.receipt_counts() == {"stale": 1}


async def test_what_is_acknowledged_is_in_the_journal_first():
    async with gathering(capacity=BATCH) as trainer:
        await trainer.gossip(*(trainer.group(slot) for slot in range(BATCH + 2)))
        waiting = await trainer.journal.waiting()
        assert [kept.slot for kept in waiting] == list(range(BATCH)), "and nothing else is"
        assert await trainer.receipt_counts() == {"accepted": BATCH, "full": 2}
        (batch, trainer.buffer) = (trainer.buffer.draw(BATCH, 0), None)
        assert [group.sealed for group in batch] == [kept.sealed for kept in waiting]


async def test_what_cannot_be_written_down_is_not_acknowledged(monkeypatch):
    async def full_disk(_groups):
        raise StoreError("no space")

    async with gathering() as trainer:
        message = Message(GROUPS, write_batch([trainer.group(0)]), ANN.public)
        with monkeypatch.context() as meanwhile:
            meanwhile.setattr(trainer.journal, "keep", full_disk)
            with pytest.raises(StoreError):
                await trainer.source.take(message)
        assert len(trainer.buffer) == 0
        assert not trainer.buffer._reserved
        assert await trainer.receipt_counts() == {}
        await trainer.source.take(message)
        assert await trainer.receipt_counts() == {"accepted": 1}, "once there is room on the disk"


@pytest.mark.parametrize("moment", ["while its prompts are made", "while the disk is busy"])
async def test_a_delivery_that_is_broken_off_is_taken_when_it_comes_again(moment, monkeypatch):
    """Its sampler was told nothing, and so has kept its groups."""
    async with gathering() as trainer:
        message = Message(GROUPS, write_batch([trainer.group(0), trainer.group(1)]), ANN.public)
        scope, keep, prompts = trio.CancelScope(), trainer.journal.keep, Run.prompts

        async def gone_by_then(groups):
            scope.cancel()
            await keep(groups)

        def gone_meanwhile(run, keys):
            trio.from_thread.run_sync(scope.cancel)
            return prompts(run, keys)

        with monkeypatch.context() as meanwhile, scope:
            if moment == "while the disk is busy":
                meanwhile.setattr(trainer.journal, "keep", gone_by_then)
            else:
                meanwhile.setattr(Run, "prompts", gone_meanwhile)
            await trainer.source.take(message)
        assert scope.cancelled_caught
        assert await trainer.journal.waiting() == []
        await trainer.source.take(message)
        assert await trainer.receipt_counts() == {"accepted": 2}
        assert len(trainer.buffer) == len(await trainer.journal.waiting()) == 2


async def test_messages_that_come_while_the_disk_is_busy_are_written_down_together(monkeypatch):
    async with gathering(capacity=8 * BATCH) as trainer:
        kept = []
        keep = trainer.journal.keep

        async def noting(groups):
            kept.append(len(groups))
            return await keep(groups)

        monkeypatch.setattr(trainer.journal, "keep", noting)
        async with trainer.source._keeping:
            for slot in range(5):
                await trainer.sampler.publish(GROUPS, write_batch([trainer.group(slot)]))
                await trio.testing.wait_all_tasks_blocked()  # the first is read before the others come
        await trainer.settled()
        assert sum(kept) == 5
        assert len(kept) == 2, "those that were read before the disk was busy, and all the others"
        assert await trainer.receipt_counts() == {"accepted": 5}


async def test_groups_are_judged_while_others_go_to_the_disk_and_told_of_in_their_order(monkeypatch):
    """A second copy comes during the write: "duplicate" is sent after "accepted"."""
    async with gathering() as trainer:
        done, writing, judged, answers = trio.Event(), trio.Event(), trio.Event(), []
        keep, judge = trainer.journal.keep, trainer.admission.judge_all
        accept, refuse = trainer.receipts.accept, trainer.receipts.refuse

        async def slow(groups):
            writing.set()
            await done.wait()
            return await keep(groups)

        async def noted(groups):
            found = await judge(groups)
            if len(groups) == 2:
                judged.set()
            return found

        monkeypatch.setattr(trainer.journal, "keep", slow)
        monkeypatch.setattr(trainer.admission, "judge_all", noted)
        monkeypatch.setattr(
            trainer.receipts, "accept", lambda group: (answers.append("accepted"), accept(group))
        )
        monkeypatch.setattr(
            trainer.receipts, "refuse", lambda group, why: (answers.append(why), refuse(group, why))
        )
        first, second = trainer.group(0), trainer.group(1)
        async with trio.open_nursery() as nursery:
            with trio.fail_after(60):
                await trainer.sampler.publish(GROUPS, write_batch([first]))
                await writing.wait()
                await trainer.sampler.publish(GROUPS, write_batch([first, second]))
                await judged.wait()
            nursery.start_soon(trainer.source.take, Message(GROUPS, write_batch([first]), ANN.public))
            await trio.testing.wait_all_tasks_blocked()
            assert answers == []
            done.set()
        await trainer.settled()
        assert answers == ["accepted", "duplicate", "accepted", "duplicate"]
        assert len(trainer.buffer) == len(await trainer.journal.waiting()) == 2


async def test_a_delivery_by_hand_is_taken_like_gossip():
    async with gathering() as trainer:
        message = Message(GROUPS, write_batch([trainer.group(0), trainer.group(1)]), ANN.public)
        assert trainer.source.validate(message) is ACCEPT
        answer = open_sealed(await trainer.source.take(message), Receipt, RUN.id).message
        assert len(list(answer.accepted_ids())) == 2
        assert await trainer.receipt_counts() == {"accepted": 2}
        assert len(await trainer.journal.waiting()) == 2


async def test_when_nothing_comes_for_long_the_wait_ends_and_what_is_stale_is_let_go(autojump_clock):  # noqa: ARG001 - it jumps
    async with gathering() as trainer:
        await trainer.gossip(trainer.group(0))
        assert await trainer.next_batch(0, patience=30.0) == ()
        assert await trainer.next_batch(2, patience=30.0) == ()
        assert list((await trainer.journal.states()).values()) == ["stale"]


async def test_receipts_carry_the_rate_to_the_samplers():
    async with gathering() as trainer:
        trainer.source.stepped(1.0, samplers=1)
        await trainer.gossip(trainer.group(0))
        await trainer.receipts.send()
        await trio.testing.wait_all_tasks_blocked()
        receipt = open_sealed((await trainer._inbox.receive()).data, Receipt, RUN.id).message
        assert receipt.rate == pytest.approx(1.3 * BATCH)


async def test_a_step_that_has_nothing_to_draw_asks_for_more_and_soon_for_all_there_is(autojump_clock):  # noqa: ARG001 - it jumps
    async with gathering() as trainer:
        trainer.source.stepped(1.0, 1)
        await trainer.receipt_counts()
        calm = trainer.receipts.rate
        assert calm is not None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trainer.next_batch, 0)
            await trio.sleep(0.5)
            assert trainer.receipts.rate > calm
            await trio.sleep(2.0)
            assert trainer.receipts.rate is None
            nursery.cancel_scope.cancel()


async def test_a_trickle_does_not_put_off_the_moment_when_everybody_is_asked(autojump_clock):  # noqa: ARG001 - it jumps
    """Else samplers that came once and left could keep the others slow."""
    async with gathering() as trainer:
        trainer.source.stepped(1.0, samplers=64)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trainer.next_batch, 0)
            for slot in range(BATCH - 1):
                await trio.sleep(0.9)
                await trainer.gossip(trainer.group(slot))
            assert trainer.receipts.rate is None
            nursery.cancel_scope.cancel()


async def test_before_the_first_step_enough_is_enough():
    """How long it will take nobody knows; what came by then would all grow stale together."""
    async with gathering(capacity=4 * BATCH) as trainer:
        await trainer.gossip(*(trainer.group(slot) for slot in range(2 * BATCH - 1)))
        assert trainer.receipts.rate is None
        await trainer.gossip(trainer.group(2 * BATCH))
        assert 0 < trainer.receipts.rate < BATCH


async def test_gossip_of_strangers_gets_no_place_in_line_and_is_nobodys_fault():
    async with gathering() as trainer:
        strangers = write_batch([sealed_group(RUN, trainer.head.id, STRANGER, 0)])
        assert trainer.source.validate(Message(GROUPS, strangers, BOB.public)) is IGNORE
        mixed = write_batch([sealed_group(RUN, trainer.head.id, STRANGER, 0), trainer.group(0)])
        assert trainer.source.validate(Message(GROUPS, mixed, BOB.public)) is ACCEPT
        await trainer.gossip(raw=strangers)
        await trainer.gossip(raw=mixed)
        assert await trainer.receipt_counts() == {"accepted": 1}
        assert trainer.faults == {}


async def test_messages_that_were_looked_at_and_never_taken_do_not_pile_up():
    async with gathering() as trainer:
        for slot in range(2 * CAPACITY):
            data = write_batch([trainer.group(slot % 8), trainer.group(slot // 8)])
            assert trainer.source.validate(Message(GROUPS, data, ANN.public)) is ACCEPT
        assert len(trainer.source._validator._accepted) <= CAPACITY
        await trainer.gossip(trainer.group(0))
        assert await trainer.receipt_counts() == {"accepted": 1}


async def hand_over(trainer, sealed, sender):
    """Deliver groups in as few messages as hold them, validated like gossip."""
    for data in fill_batches(sealed):
        message = Message(GROUPS, data, sender.public)
        if trainer.source.validate(message) is ACCEPT:
            await trainer.source.take(message)


def far_ahead(trainer, count, sampler=ANN):
    """Send validly signed groups whose slots are too far ahead to be accepted."""
    return [trainer.group(10_000 + number, sampler) for number in range(count)]


def hears(trainer, sampler, slot=0):
    validation = trainer.source.validate(
        Message(GROUPS, write_batch([trainer.group(slot, sampler)]), sampler.public)
    )
    assert validation is ACCEPT or validation == SenderMuted(USELESS)
    return validation is ACCEPT


async def test_who_makes_nothing_but_useless_groups_is_not_looked_at_for_a_while_and_others_are():
    async with gathering() as trainer:
        for message in fill_batches(far_ahead(trainer, int(PATIENCE))):
            await trainer.gossip(raw=message)
        assert await trainer.receipt_counts() == {"over-limit": PATIENCE}
        assert trainer.source.validate(Message(GROUPS, b"not even read", ANN.public)) == SenderMuted(USELESS)
        assert hears(trainer, BOB)
        assert trainer.faults == {}, "nothing that whoever passed it on could have seen"
        ((who, mute),) = trainer.quota.mutes().items()
        assert (who, dict(mute.reasons)) == (ANN.public, {"over-limit": PATIENCE})
        assert mute.seconds > 0


async def test_what_is_delivered_by_hand_counts_in_the_same_way():
    async with gathering() as trainer:
        useless = far_ahead(trainer, int(PATIENCE))
        await hand_over(trainer, useless[1:], ANN)
        assert hears(trainer, ANN)
        await hand_over(trainer, useless[:1], ANN)
        assert not hears(trainer, ANN)


async def test_useless_groups_count_against_their_sampler_through_whose_hands_they_come():
    """Else a flood would only have to go by way of a verifier, who must be heard."""
    async with gathering() as trainer:
        await hand_over(trainer, far_ahead(trainer, int(PATIENCE)), TRAINER)
        assert not hears(trainer, ANN)
        more = Message(GROUPS, write_batch([trainer.group(0)]), TRAINER.public)
        assert trainer.source.validate(more) is IGNORE
        others = Message(GROUPS, write_batch([trainer.group(1), trainer.group(0, BOB)]), TRAINER.public)
        assert trainer.source.validate(others) is ACCEPT, "whoever passes on is heard"
        await trainer.source.take(others)
        assert await trainer.receipt_counts() == {"over-limit": PATIENCE, "accepted": 1}, (
            "and Ann's is not looked at"
        )


async def test_nobody_can_use_up_patience_with_another():
    """A group counts against its sampler once, then against whoever sends it again."""
    async with gathering() as trainer:
        (useless,) = far_ahead(trainer, 1, BOB)
        for _ in range(int(PATIENCE) + 1):
            await hand_over(trainer, [useless], ANN)
        assert hears(trainer, BOB)
        assert not hears(trainer, ANN)


async def test_that_there_is_no_room_or_that_a_receipt_got_lost_uses_up_nobodys_patience():
    async with gathering(capacity=BATCH) as trainer:
        sealed = [trainer.group(slot) for slot in range(2 * BATCH)]
        for _ in range(3):
            await hand_over(trainer, sealed, ANN)
        assert await trainer.receipt_counts() == {"accepted": BATCH, "full": BATCH}
        assert not trainer.quota._accounts


async def test_a_sampler_whose_groups_all_come_too_late_is_heard():
    """As they do when another trainer takes over: many may be waiting."""
    async with gathering() as trainer:
        late = [seal(replace(group(RUN, bytes(32), ANN, 0), slot=slot), ANN, RUN.id) for slot in range(2100)]
        await hand_over(trainer, late, ANN)
        assert await trainer.receipt_counts() == {"stale": 2100}
        assert hears(trainer, ANN)


async def test_what_is_forged_is_held_against_who_passed_it_on_unless_the_manifest_names_it():
    async with gathering() as trainer:
        data = write_batch([trainer.group(0), forged(trainer.group(1))])
        with pytest.raises(BadSignatureError):
            trainer.source.validate(Message(GROUPS, data, BOB.public))
        assert trainer.source.validate(Message(GROUPS, data, TRAINER.public)) is IGNORE
        await trainer.gossip(raw=data)
        assert trainer.faults == {"bad-signature": 1}
        assert len(trainer.buffer) == 0


async def test_who_brings_only_what_has_no_room_in_a_batch_does_not_keep_the_trainer_waiting_in_silence():
    """Groups keep coming and are refused; still the wait ends with a reason."""
    async with gathering(share=0.5) as trainer:
        await trainer.gossip(*(trainer.group(slot) for slot in range(6)))
        assert len(trainer.buffer) == BATCH, "half of the room, and no more"
        assert await trainer.receipt_counts() == {"accepted": BATCH, "full": 2}
        batches = []

        async def draw():
            batches.append(await trainer.next_batch(0, patience=0.3))

        with trio.fail_after(20):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(draw)
                again = Message(GROUPS, write_batch([trainer.group(5)]), ANN.public)
                while not batches:
                    await trainer.source.take(again)
        assert batches == [()]
        assert "torch/f32 may fill 2 of the 4 groups" in trainer.hindrance
