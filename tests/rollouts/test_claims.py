"""Claimed rewards: they earn nothing, differ at a price, and are a lie only where jails agree."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from types import SimpleNamespace

import pytest

from echo_node.contract import Score
from echo_node.contract.jail.worker import Failed
from echo_node.rollouts import claims
from echo_node.rollouts.admission import Admission, Refused
from echo_node.rollouts.record import RolloutRecord
from echo_node.runs.run import Run
from echo_node.trainer.batch_scoring import BatchScorer
from echo_node.trainer.journal import open_journal
from echo_node.trainer.receipts import Receipts
from echo_node.trainer.replay_buffer import ReplayBuffer
from echo_node.trainer.verdict_listener import VerdictEnforcer
from echo_node.trainer.verdict_policy import VerdictPolicy
from tests.crafting import SAMPLERS, TRAINER, Chain, changed_run, envelope, open_run, roster

ANN, BOB = SAMPLERS[:2]
PURE = open_run()
IMPURE = changed_run(PURE, contract=dataclasses.replace(PURE.manifest.contract, pure=False))


def admitted(run, slot=0, sampler=ANN, **changes):
    """A group of right answers, whose honest rewards are 1, as admission takes it."""
    head = Chain(run).next(ANN, BOB)
    admission = Admission(run)
    admission.published(head, roster(ANN, BOB))
    return admission.judge(envelope(run, head.id, sampler, slot, **changes))


def results(monkeypatch, *attempts):
    """Let the contract's jails give these results, one after the other, for each completion."""
    left = itertools.chain(attempts, itertools.repeat(attempts[-1]))
    monkeypatch.setattr(Run, "results", lambda _run, _prompt, rows: [next(left)] * len(rows))


def test_a_claim_is_refused_where_none_may_be_and_required_where_the_contract_is_pure():
    assert isinstance(admitted(PURE), RolloutRecord)
    assert isinstance(admitted(IMPURE, rewards=None), RolloutRecord)
    for refused in (admitted(IMPURE), admitted(PURE, rewards=None)):
        assert isinstance(refused, Refused)
        assert (refused.reason, refused.signed) == ("wrong-reward", True)


def test_a_claim_that_two_fresh_jails_refute_is_a_lie():
    lie = claims.find_lie(PURE, admitted(PURE, rewards=(1.0, 0.5)))
    assert lie == "claimed reward 0.5, the contract gives 1"
    assert claims.find_lie(PURE, admitted(PURE, rewards=(1.0, 1.0 + 1e-7))) is None


@pytest.mark.parametrize(
    "attempts",
    [
        (Score(0.0, ""), Score(0.5, "")),
        (Failed("it took longer than 5 seconds"), Score(0.0, "")),
        (Score(0.0, ""), Failed("it took longer than 5 seconds")),
        (Score(0.0, ""), Score(1.0, "")),
    ],
    ids=["other values", "a time-out first", "a time-out then", "one that agrees with the claim"],
)
def test_jails_that_do_not_give_one_other_value_prove_nothing(attempts, monkeypatch):
    group = admitted(PURE, rewards=(1.0, 1.0))
    results(monkeypatch, *attempts)
    assert claims.find_lie(PURE, group) is None


def test_fresh_means_that_the_jail_has_seen_no_other_text(monkeypatch):
    renewed = []
    run = open_run()
    jailed = SimpleNamespace(sandbox=SimpleNamespace(renew=lambda: renewed.append(1)))
    monkeypatch.setattr("echo_node.runs.run.JailedContract", SimpleNamespace)
    monkeypatch.setattr(Run, "results", lambda _run, _prompt, rows: [Score(0.0, "")] * len(rows))
    group = admitted(run)
    assert claims.find_lie(dataclasses.replace(run, contract=jailed), group) is not None
    assert len(renewed) == claims.FRESH == 2


class Place:
    """A trainer that scores batches."""

    def __init__(self, run, journal):
        self.policy = VerdictPolicy(run, TRAINER)
        self.receipts = Receipts(None, TRAINER, run.id)
        self.left_out = Counter()
        buffer = ReplayBuffer(capacity=64, staleness=2, entry=self.policy)
        enforcer = VerdictEnforcer(buffer, self.receipts, journal)
        self.scorer = BatchScorer(run, self.policy, enforcer, self.receipts, journal, self.left_out)

    async def score(self, *groups):
        for each in groups:
            self.policy.saw(each.id, each.sampler)
        return await self.scorer.score(groups)


async def test_a_lie_about_rewards_leaves_its_group_out_and_mutes_its_sampler():
    async with open_journal(None, PURE.id) as journal:
        place = Place(PURE, journal)
        lie, other, honest = admitted(PURE, 0, rewards=(1.0, 0.0)), admitted(PURE, 1), admitted(PURE, 0, BOB)
        scored, left_out = await place.score(lie, other, honest)
        assert [each.id for each in scored] == [honest.id]
        assert scored[0].rewards == (1.0, 1.0)
        assert left_out == {lie.id: "wrong-reward", other.id: "muted"}
        assert place.receipts._refused == {lie.id: "wrong-reward", other.id: "muted"}
        assert place.policy.is_muted(ANN.public)
        assert not place.policy.is_muted(BOB.public)
        assert [found.reason for found in await journal.findings()] == ["wrong-reward"]


async def test_equal_claims_do_not_decide_what_is_learnt():
    """The hole: all claims equal, and what is learnt is what the contract gives."""
    async with open_journal(None, PURE.id) as journal:
        place = Place(PURE, journal)
        wrong = admitted(PURE, 0, rewards=(0.0, 0.0))
        scored, left_out = await place.score(wrong)
        assert (scored, left_out) == ((), {wrong.id: "wrong-reward"})


async def test_a_time_out_on_a_loaded_machine_refuses_the_group_and_blames_nobody(monkeypatch):
    async with open_journal(None, PURE.id) as journal:
        place = Place(PURE, journal)
        group = admitted(PURE, 0)
        results(monkeypatch, Failed("it took longer than 5 seconds"))
        scored, left_out = await place.score(group)
        assert (scored, left_out) == ((), {group.id: "wrong-reward"})
        assert not place.policy.is_muted(ANN.public)
        assert await journal.findings() == []


async def test_without_claims_every_reward_is_the_trainers_own():
    async with open_journal(None, IMPURE.id) as journal:
        place = Place(IMPURE, journal)
        scored, left_out = await place.score(admitted(IMPURE, 0, rewards=None))
        assert [each.rewards for each in scored] == [(1.0, 1.0)]
        assert not left_out
