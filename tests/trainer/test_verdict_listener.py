"""Verdicts at a standby: a new leader starts with the findings of the last one."""

from __future__ import annotations

from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing

from echo_node.net.memory import MemorySwarm
from echo_node.rollouts.admission import Admission
from echo_node.trainer.journal import open_journal
from echo_node.trainer.receipts import Receipts
from echo_node.trainer.recovery import restore_groups
from echo_node.trainer.replay_buffer import ReplayBuffer
from echo_node.trainer.verdict_listener import StandbyVerdictListener
from echo_node.trainer.verdict_policy import VerdictPolicy
from protocol import Envelope, topics, write_batch
from tests.crafting import SAMPLERS, TRAINER, changed_run, identity, open_run, sealed_group
from tests.trainer.test_verdict_policy import STRANGER, VERIFIERS, verdict

HEIR = identity("heir")
ANN, BOB = SAMPLERS[:2]
HEAD = b"h" * 32
RUN = changed_run(
    open_run(),
    trainers=(TRAINER.public, HEIR.public),
    verifiers=tuple(sorted(each.public for each in VERIFIERS[:2])),
)
VERDICTS = topics.topic(RUN.id, topics.VERDICTS)


def group(slot, sampler=ANN) -> bytes:
    return Envelope.parse(sealed_group(RUN, HEAD, sampler, slot)).id


class Listening:
    """A trainer that stands by, and verifiers that speak."""

    def __init__(self, listener, network, verifiers, journal):
        self.listener, self.network, self.journal = listener, network, journal
        self._verifiers = verifiers

    async def give_verdict(self, about, verifier, result="dishonest"):
        signed_verdict = verdict(RUN, about, verifier, result)
        await self._verifiers.publish(VERDICTS, write_batch([signed_verdict.sealed]))
        await trio.testing.wait_all_tasks_blocked()

    async def findings(self, count):
        with trio.fail_after(20):
            while len(found := await self.journal.findings()) < count:  # noqa: ASYNC110 - files tell nobody
                await trio.sleep(0.01)
        return found

    async def opinion(self) -> VerdictPolicy:
        """That of a trainer which begins to lead with this journal."""
        policy = VerdictPolicy(RUN, HEIR)
        await restore_groups(
            self.journal,
            [HEAD],
            checks=Admission(RUN),
            policy=policy,
            receipts=Receipts(self.network, HEIR, RUN.id),
            buffer=ReplayBuffer(capacity=8, staleness=2),
            admission=Admission(RUN),
        )
        return policy


@asynccontextmanager
async def listening():
    async with (
        MemorySwarm() as swarm,
        swarm.join(HEIR) as network,
        swarm.join(VERIFIERS[0]) as verifiers,
        open_journal(None, RUN.id) as journal,
        trio.open_nursery() as nursery,
    ):
        listener = StandbyVerdictListener(RUN, network, HEIR, journal)
        nursery.start_soon(listener.follow)
        await trio.testing.wait_all_tasks_blocked()
        yield Listening(listener, network, verifiers, journal)
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("first", ["the group", "the verdicts"])
async def test_an_heir_knows_whom_verifiers_have_muted_whatever_it_heard_first(first):
    async with listening() as heir:
        bad, good = group(0), group(0, BOB)
        if first == "the group":
            await heir.listener.saw({bad: ANN.public, good: BOB.public})
        for verifier in VERIFIERS[:2]:
            await heir.give_verdict(bad, verifier)
            await heir.give_verdict(good, verifier, "honest")
        if first == "the verdicts":
            assert await heir.journal.findings() == []
            await heir.listener.saw({bad: ANN.public, good: BOB.public})
        found = await heir.findings(4)
        assert {each.sampler for each in found} == {ANN.public, BOB.public}
        opinion = await heir.opinion()
        assert opinion.is_muted(ANN.public)
        assert not opinion.is_muted(BOB.public)
        assert opinion.trust.level(BOB.public, found[-1].at) > 0
        assert opinion.is_condemned(bad)


async def test_one_verifier_of_two_does_not_mute_in_an_heirs_opinion_either():
    async with listening() as heir:
        await heir.listener.saw({group(0): ANN.public})
        await heir.give_verdict(group(0), VERIFIERS[0])
        await heir.findings(1)
        opinion = await heir.opinion()
        assert opinion.is_condemned(group(0))
        assert not opinion.is_muted(ANN.public)


async def test_what_strangers_say_is_not_passed_on_and_not_kept():
    async with listening() as heir:
        await heir.listener.saw({group(0): ANN.public})
        await heir.give_verdict(group(0), STRANGER)
        await heir.give_verdict(group(0), VERIFIERS[1])
        assert [each.verifier for each in await heir.findings(1)] == [VERIFIERS[1].public]
        assert heir.network.scores()[VERIFIERS[0].public] == {"not-verifier": 1}


async def test_verdicts_on_groups_that_are_never_heard_are_bounded(monkeypatch):
    monkeypatch.setattr("echo_node.trainer.verdict_listener.NAMELESS", 3)
    async with listening() as heir:
        for slot in range(5):
            await heir.give_verdict(group(slot), VERIFIERS[0])
        await heir.listener.saw({group(slot): ANN.public for slot in range(5)})
        assert [each.group for each in await heir.findings(3)] == [group(slot) for slot in (2, 3, 4)]
