"""Announcements at the trainer: taken, answered, and what goes in without them."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest

from echo_node.net.base import Message
from echo_node.net.memory import MemorySwarm
from echo_node.rollouts.admission import Admission
from echo_node.rollouts.gossip_validation import GossipValidator
from echo_node.runs.run import Run
from echo_node.runtime.reputation import NEWCOMER
from echo_node.trainer.batch_selection import Entrance
from echo_node.trainer.gossip_source import GossipSource
from echo_node.trainer.group_admission import GroupAdmission
from echo_node.trainer.journal import open_journal
from echo_node.trainer.receipts import Receipts
from echo_node.trainer.replay_buffer import ReplayBuffer
from echo_node.trainer.sender_quota import SenderQuota
from echo_node.trainer.verdict_listener import VerdictEnforcer
from echo_node.trainer.verdict_policy import VerdictPolicy
from protocol import Envelope, Receipt, SlotAnnouncement, open_sealed, seal, topics, write_batch
from protocol.manifest import Verification
from tests.crafting import (
    SAMPLERS,
    TRAINER,
    Chain,
    changed_run,
    forged,
    identity,
    open_run,
    roster,
    sealed_group,
)

ANN, BOB = SAMPLERS[:2]
VERIFIER = identity("verifier")


@pytest.fixture(scope="module")
def run() -> Run:
    return changed_run(
        open_run(),
        verifiers=(VERIFIER.public,),
        verification=Verification(policy="sampled", quorum=1, share=0.25),
    )


class Trainer:
    """The part of a trainer that takes in groups, of a run that verifies by lot."""

    def __init__(self, run, network, journal) -> None:
        self.run = run
        self.chain = Chain(run)
        self.checks = Admission(run)
        self.policy = VerdictPolicy(run, TRAINER)
        self.buffer = ReplayBuffer(capacity=99, staleness=2, batch=4, entry=self.policy)
        self.receipts = Receipts(network, TRAINER, run.id)
        enforcer = VerdictEnforcer(self.buffer, self.receipts, journal)
        self.admission = GroupAdmission(self.checks, self.policy, enforcer, Counter())
        validator = GossipValidator(run, self.checks)
        self.source = GossipSource(
            run.id,
            4,
            self.buffer,
            self.receipts,
            self.admission,
            journal,
            validator,
            SenderQuota(validator.named),
        )
        self.head = self.next_head()
        for _ in range(2 * NEWCOMER):  # Ann is trusted
            self.policy.trust.honest(ANN.public, self.policy._clock())

    def next_head(self):
        head = self.chain.next(ANN)
        self.checks.published(head, roster(ANN))
        self.receipts.set_head(head)
        self.head = head
        return head

    def announcement(self, first, count, *, head=None, sampler=ANN) -> bytes:
        message = SlotAnnouncement(count=count, first=first, head=(head or self.head).id)
        return seal(message, sampler, self.run.id)

    def group(self, slot) -> bytes:
        return sealed_group(self.run, self.head.id, ANN, slot)

    async def deliver(self, *sealed) -> Receipt | None:
        topic = topics.topic(self.run.id, topics.GROUPS)
        answer = await self.source.take(Message(topic, write_batch(sealed), ANN.public))
        return open_sealed(answer, Receipt, self.run.id).message if answer else None

    def entrances(self) -> dict[int, Entrance]:
        """Of groups that a verifier has seen in an inventory, and not looked at."""
        for group in self.buffer:
            self.policy._known[group.id].seen_by.add(VERIFIER.public)
        return {group.slot: self.policy.entrance(group) for group in self.buffer}


@pytest.fixture
async def trainer(run, tmp_path):
    async with (
        MemorySwarm() as swarm,
        swarm.join(TRAINER) as network,
        open_journal(tmp_path / "journal.sqlite", run.id) as journal,
    ):
        yield Trainer(run, network, journal)


async def test_a_group_that_was_not_announced_is_unvouched_whatever_its_samplers_standing(trainer):
    await trainer.deliver(trainer.group(0))
    assert trainer.entrances() == {0: Entrance.BOUNDED}
    receipt = await trainer.deliver(trainer.announcement(0, 4))
    assert len([*receipt.announced_ids()]) == 1
    await trainer.deliver(trainer.group(1), trainer.group(2))
    assert trainer.entrances() == {0: Entrance.BOUNDED, 1: Entrance.OPEN, 2: Entrance.OPEN}


async def test_an_announcement_is_no_group_and_a_lost_receipt_is_given_again(trainer):
    announcement = trainer.announcement(0, 4)
    first, second = await trainer.deliver(announcement), await trainer.deliver(announcement)
    assert first == second
    assert first.accepted == b""
    assert len(trainer.buffer) == 0
    assert trainer.admission._drops == {}


async def test_an_announcement_of_a_stranger_of_an_old_head_or_forged_is_refused(trainer):
    old = trainer.head
    for _ in range(4):
        trainer.next_head()
    refused = [
        trainer.announcement(0, 4, head=old),
        trainer.announcement(0, 4, sampler=BOB),
        forged(trainer.announcement(0, 4)),
        trainer.announcement(600, 4),
    ]
    reasons = [trainer.admission.announce(Envelope.parse(sealed)).reason for sealed in refused]
    assert reasons == ["stale", "not-in-roster", "wrong-signature", "over-limit"]
    await trainer.deliver(trainer.group(0))
    assert trainer.entrances() == {0: Entrance.BOUNDED}


async def test_a_sampler_with_holes_is_vouched_for_in_proportion(trainer):
    for _ in range(30):
        trainer.next_head()
        await trainer.deliver(trainer.announcement(0, 4), trainer.group(0))
    for _ in range(3):
        trainer.next_head()
    share = trainer.admission.announced.kept_share(ANN.public)
    assert share == pytest.approx(0.27, abs=0.05)
    trainer.buffer.remove_where(lambda _: True, "seen")
    await trainer.deliver(trainer.announcement(0, 40), *(trainer.group(slot) for slot in range(40)))
    opened = sum(each is Entrance.OPEN for each in trainer.entrances().values())
    assert opened == pytest.approx(40 * share, abs=2)
    assert not trainer.policy.is_muted(ANN.public), "holes alone condemn nobody"


async def test_what_a_verifier_found_honest_goes_in_without_an_announcement(trainer):
    await trainer.deliver(trainer.group(0))
    (group,) = trainer.buffer
    trainer.policy._known[group.id].findings[VERIFIER.public] = dataclasses.replace(
        trainer.policy.check(group), verifier=VERIFIER.public
    )
    assert trainer.entrances() == {0: Entrance.OPEN}


async def test_after_a_restart_heads_of_before_need_no_announcement(trainer):
    trainer.admission.exempt_known_heads()
    await trainer.deliver(trainer.group(0))
    assert trainer.entrances() == {0: Entrance.OPEN}
    trainer.next_head()
    await trainer.deliver(trainer.group(1))
    assert trainer.entrances()[1] is Entrance.BOUNDED
