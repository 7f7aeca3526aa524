"""The manifest's verdict policies: what condemns a group or mutes a sampler."""

from __future__ import annotations

import dataclasses

import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st

from echo_node.contract import Prompt
from echo_node.net.base import ACCEPT
from echo_node.net.memory import MemorySwarm
from echo_node.rollouts.record import RolloutRecord
from echo_node.runtime.reputation import CLASS_IN_DOUBT, MUTE_SECONDS, NEWCOMER
from echo_node.trainer.batch_selection import Entrance
from echo_node.trainer.journal import open_journal
from echo_node.trainer.receipts import Receipts
from echo_node.trainer.replay_buffer import ReplayBuffer
from echo_node.trainer.verdict_listener import VerdictEnforcer, VerdictListener
from echo_node.trainer.verdict_policy import UNDECIDED, Consequences, VerdictPolicy
from protocol import Figures, Receipt, TrajectoryGroup, Verdict, open_sealed, seal, topics, write_batch
from protocol.manifest import Verification
from protocol.verdict import sign_draw
from tests.crafting import SAMPLERS, STRANGER, TRAINER, Chain, changed_run, identity, open_run, sealed_group
from tests.records import record_of

VERIFIERS = tuple(identity(f"verifier {n}") for n in range(3))
HEAD = b"h" * 32
FIGURES = Figures(
    contrast=0.0, d_mean=0.0, d_most=0.0, logprob_gap=0.0, reward=None, tokens=8, z_mean=0.0, z_most=0.0
)
ANN, BOB = SAMPLERS[:2]


def run_of(policy, *, quorum=1, share=0.25, verifiers=2):
    return changed_run(
        open_run(),
        verification=Verification(policy=policy, quorum=quorum, share=share),
        verifiers=tuple(each.public for each in VERIFIERS[:verifiers]),
    )


RUNS = {policy: run_of(policy) for policy in ("self", "quorum", "sampled")}


class Clock:
    now = 1_000_000.0

    def __call__(self):
        return self.now


def group(run, slot, sampler=ANN, step=0) -> RolloutRecord:
    opened = open_sealed(sealed_group(run, HEAD, sampler, slot), TrajectoryGroup, run.id)
    return record_of(opened, step, Prompt("r12345="))


def verdict(run, about: bytes, verifier, result="honest", **changes):
    message = Verdict(
        draw=sign_draw(verifier, run.id, about),
        figures=FIGURES,
        group=about,
        note="",
        reason="honest" if result == "honest" else "own-luck",
        result=result,
    )
    return open_sealed(seal(dataclasses.replace(message, **changes), verifier, run.id), Verdict, run.id)


def give_verdict(policy, run, about, verifier, result="honest"):
    return policy.take(policy.read(verdict(run, about, verifier, result)))


def policy_of(run, **options):
    return VerdictPolicy(run, TRAINER, clock=Clock(), **options)


# Who may speak


def test_only_the_manifests_verifiers_are_heard_and_only_on_groups_that_fell_to_them():
    run = RUNS["quorum"]
    policy = policy_of(run)
    about = group(run, 0).id
    assert policy.read(verdict(run, about, STRANGER)) is None
    assert policy.read(verdict(run, about, VERIFIERS[0], draw=sign_draw(VERIFIERS[1], run.id, about))) is None
    assert (
        policy.read(verdict(run, about, VERIFIERS[0], draw=sign_draw(VERIFIERS[0], run.id, bytes(32))))
        is None
    )
    assert policy.counts == {"not-a-verifier": 1, "wrong-draw": 2}
    assert policy.read(verdict(run, about, VERIFIERS[0])).result == "honest"


# What may go into a batch


def test_where_nobody_looks_everything_may_be_used():
    run = RUNS["self"]
    assert policy_of(run).entrance(group(run, 0)) is Entrance.OPEN


def test_by_quorum_a_group_needs_so_many_honest_verdicts_of_different_verifiers():
    run = run_of("quorum", quorum=2)
    policy, one = policy_of(run), group(run, 0)
    policy.saw(one.id, one.sampler)
    assert policy.entrance(one) is Entrance.CLOSED
    give_verdict(policy, run, one.id, VERIFIERS[0])
    give_verdict(policy, run, one.id, VERIFIERS[0])
    assert policy.entrance(one) is Entrance.CLOSED, "one verifier twice is one verifier"
    give_verdict(policy, run, one.id, VERIFIERS[1])
    assert policy.entrance(one) is Entrance.OPEN
    assert policy.entrance(group(run, 1)) is Entrance.CLOSED


def test_by_sampling_what_nobody_vouches_for_is_bounded_in_share():
    run = run_of("sampled", share=0.25)
    policy = policy_of(run)
    first, second = group(run, 0), group(run, 1)
    assert policy.entrance(first) is Entrance.BOUNDED
    assert (policy.bound(8), policy.bound(3), policy.is_hard) == (2, 0, True)
    policy.saw(first.id, first.sampler)
    give_verdict(policy, run, first.id, VERIFIERS[0])
    assert policy.entrance(first) is Entrance.OPEN, "it was looked at itself"
    assert policy.entrance(second) is Entrance.BOUNDED
    for slot in range(2, 2 + NEWCOMER):
        other = group(run, slot)
        policy.saw(other.id, other.sampler)
        give_verdict(policy, run, other.id, VERIFIERS[0])
    assert policy.entrance(second) is Entrance.BOUNDED, "no verifier has seen it"
    policy.acknowledged([second.id], VERIFIERS[0].public)
    assert policy.entrance(second) is Entrance.OPEN, "its sampler has earned trust"
    assert policy.entrance(group(run, 0, BOB)) is Entrance.BOUNDED


def test_the_bound_holds_in_every_batch_that_is_drawn():
    run = run_of("sampled", share=0.25)
    policy = policy_of(run)
    buffer = ReplayBuffer(capacity=64, staleness=2, batch=8, entry=policy)
    groups = [group(run, slot) for slot in range(24)]
    for each in groups:
        policy.saw(each.id, each.sampler)
        buffer.put(each)
    assert buffer.draw(8, step=0) == ()
    for each in groups[:7]:
        give_verdict(policy, run, each.id, VERIFIERS[0])
    batch = buffer.draw(8, step=0)
    vouched = {each.id for each in groups[:7]}
    assert len(batch) == 8
    assert sum(each.id not in vouched for each in batch) <= 2


def test_what_verifiers_have_passed_over_gives_way_and_what_may_still_be_looked_at_does_not():
    run = RUNS["quorum"]
    policy = policy_of(run)
    groups = [group(run, slot) for slot in range(4)]
    other = group(run, 0, BOB)
    for each in (*groups, other):
        policy.saw(each.id, each.sampler)
    assert not any(policy.gives_way(each) for each in groups)
    give_verdict(policy, run, groups[2].id, VERIFIERS[0])
    assert [policy.gives_way(each) for each in groups] == [True, True, False, False]
    assert not policy.gives_way(other), "verifiers take samplers in turn"
    policy._clock.now += 61.0
    assert [policy.gives_way(each) for each in (*groups, other)] == [True, True, False, True, True]


@pytest.mark.parametrize("early", [False, True], ids=["after their groups", "before their groups"])
def test_trust_counts_groups_and_not_the_verdicts_on_them(early):
    run = run_of("sampled", verifiers=3)
    policy = policy_of(run)
    policy.acknowledged([group(run, 100).id], VERIFIERS[0].public)
    for slot in range(NEWCOMER):
        assert policy.entrance(group(run, 100)) is Entrance.BOUNDED
        one = group(run, slot)
        if not early:
            policy.saw(one.id, one.sampler)
        for verifier in VERIFIERS:
            give_verdict(policy, run, one.id, verifier)
        if early:
            policy.saw(one.id, one.sampler)
    assert policy.entrance(group(run, 100)) is Entrance.OPEN


# What condemns


def test_one_dishonest_verdict_condemns_the_group_and_two_verifiers_mute_the_sampler():
    run = RUNS["sampled"]
    policy = policy_of(run)
    first, second = group(run, 0), group(run, 1)
    for each in (first, second):
        policy.saw(each.id, each.sampler)
    consequences = give_verdict(policy, run, first.id, VERIFIERS[0], "dishonest")
    assert consequences == Consequences(condemned=frozenset((first.id,)))
    assert policy.is_condemned(first.id)
    assert not policy.is_muted(ANN.public)
    assert give_verdict(policy, run, second.id, VERIFIERS[0], "dishonest").muted == frozenset(), (
        "the same one again"
    )
    consequences = give_verdict(policy, run, second.id, VERIFIERS[1], "dishonest")
    assert consequences.muted == {ANN.public}
    assert policy.is_muted(ANN.public)
    policy._clock.now += MUTE_SECONDS + 1
    assert not policy.is_muted(ANN.public), "in proportion to what it did"


def test_where_there_is_one_verifier_its_word_is_enough():
    run = run_of("sampled", verifiers=1)
    policy, one = policy_of(run), group(run, 0)
    policy.saw(one.id, one.sampler)
    assert give_verdict(policy, run, one.id, VERIFIERS[0], "dishonest").muted == {ANN.public}


def test_an_undecided_verdict_changes_nothing():
    run = RUNS["quorum"]
    policy, one = policy_of(run), group(run, 0)
    policy.saw(one.id, one.sampler)
    assert give_verdict(policy, run, one.id, VERIFIERS[0], "undecided") == Consequences()
    assert policy.entrance(one) is Entrance.CLOSED
    assert not policy.is_condemned(one.id)


@pytest.mark.parametrize("whose", ["a verifier's", "its own"])
def test_a_narrow_breach_that_may_be_its_classes_fault_makes_a_sampler_a_newcomer_and_mutes_nobody(whose):
    run = RUNS["self"]
    policy = policy_of(run, check=lambda _: CLASS_IN_DOUBT)
    for _ in range(NEWCOMER):
        policy.trust.honest(ANN.public, policy._clock())
    about = group(run, 1)
    policy.saw(about.id, ANN.public, HEAD)
    assert not policy.is_young(ANN.public)
    if whose == "its own":
        found = policy.check(about)
    else:
        found = policy.read(verdict(run, about.id, VERIFIERS[0], UNDECIDED, reason=CLASS_IN_DOUBT))
    assert (found.result, found.reason) == (UNDECIDED, CLASS_IN_DOUBT)
    assert policy.take(found) == Consequences()
    assert policy.is_young(ANN.public), "all of its groups are looked at again"
    assert not policy.is_muted(ANN.public)
    assert list(policy.doubted) == [ANN.public]
    assert policy.entrance(about) is not Entrance.OPEN


def test_findings_are_counted_by_result_and_what_adds_nothing_is_not_counted():
    run = run_of("sampled", share=0.5, verifiers=2)
    policy = policy_of(run)
    one, other = group(run, 0), group(run, 1)
    for each in (one, other):
        policy.saw(each.id, each.sampler)
    give_verdict(policy, run, one.id, VERIFIERS[0], "honest")
    give_verdict(policy, run, one.id, VERIFIERS[1], "honest")
    give_verdict(policy, run, other.id, VERIFIERS[0], "undecided")
    assert policy.counts == {"honest": 2, "undecided": 1}
    give_verdict(policy, run, one.id, VERIFIERS[0], "honest")
    give_verdict(policy, run, one.id, VERIFIERS[0], "undecided")
    assert policy.counts == {"honest": 2, "undecided": 1}, "no graver than what it said before"
    give_verdict(policy, run, other.id, VERIFIERS[0], "dishonest")
    assert policy.counts == {"honest": 2, "undecided": 1, "dishonest": 1}


def test_a_verdict_that_comes_before_its_group_counts_when_the_group_comes():
    run = run_of("sampled", verifiers=1)
    policy, one = policy_of(run), group(run, 0)
    assert give_verdict(policy, run, one.id, VERIFIERS[0], "dishonest") == Consequences()
    consequences = policy.saw(one.id, one.sampler)
    assert (consequences.condemned, consequences.muted) == ({one.id}, {ANN.public})
    assert policy.saw(one.id, one.sampler) == Consequences(), "once"


def test_what_is_condemned_after_it_was_used_is_counted_once():
    run = RUNS["sampled"]
    policy, one = policy_of(run), group(run, 0)
    policy.saw(one.id, one.sampler)
    policy.used([one.id])
    for verifier in VERIFIERS[:2]:
        give_verdict(policy, run, one.id, verifier, "dishonest")
    assert policy.used_condemned == 1


# The trainer's own look


def test_the_trainer_looks_at_all_of_a_newcomers_groups_and_its_own_look_mutes_at_once():
    run = run_of("self", share=0.2, verifiers=0)
    wrong = {group(run, 3).id}
    policy = policy_of(run, check=lambda each: "own-luck" if each.id in wrong else None)
    groups = [group(run, slot) for slot in range(6)]
    assert all(policy.wants_to_check(each) for each in groups)
    assert policy.entrance(groups[0]) is Entrance.BOUNDED
    assert not policy.is_hard, "newcomers fill a batch where there is nobody else"
    assert policy.bound(32) == 3
    taken = [policy.take(policy.check(each)) for each in groups]
    assert [bool(each.condemned) for each in taken] == [False, False, False, True, False, False]
    assert taken[3].muted == {ANN.public}


def test_what_a_look_cannot_decide_is_neither_honest_nor_dishonest_and_what_verifiers_saw_needs_none():
    run = run_of("self", share=0.2, verifiers=1)
    policy, (one, other) = policy_of(run, check=lambda _: UNDECIDED), (group(run, 0), group(run, 1))
    for each in (one, other):
        policy.saw(each.id, each.sampler)
    assert policy.take(policy.check(one)) == Consequences()
    assert policy.trust.level(ANN.public, policy._clock()) == 0.0
    assert policy.wants_to_check(one)
    give_verdict(policy, run, one.id, VERIFIERS[0])
    assert not policy.wants_to_check(one)
    assert policy.wants_to_check(other)


def test_what_the_trainer_found_honest_itself_counts_as_verified():
    run = run_of("self", share=0.2, verifiers=0)
    policy, one = policy_of(run, check=lambda _: None), group(run, 0)
    policy.saw(one.id, one.sampler)
    assert policy.entrance(one) is Entrance.BOUNDED
    policy.take(policy.check(one))
    assert policy.entrance(one) is Entrance.OPEN


def test_whom_the_trainer_trusts_it_looks_at_more_seldom_but_never_less_than_its_share():
    run = run_of("self", share=0.5, verifiers=0)
    policy = policy_of(run, check=lambda _: None)
    for _ in range(10 * NEWCOMER):
        policy.trust.honest(ANN.public, policy._clock())
    looked_at = sum(policy.wants_to_check(group(run, slot)) for slot in range(200))
    assert 60 < looked_at < 140
    assert policy.entrance(group(run, 0)) is Entrance.OPEN


@pytest.mark.parametrize(("policy", "share"), [("self", 0.0), ("sampled", 0.5), ("quorum", 0.5)])
def test_the_trainer_looks_at_nothing_itself_where_the_run_does_not_say_so(policy, share):
    run = run_of(policy, share=share)
    assert not policy_of(run, check=lambda _: None).wants_to_check(group(run, 0))


@given(
    st.lists(
        st.tuples(
            st.integers(0, 3), st.integers(0, 1), st.sampled_from(["honest", "dishonest", "undecided"])
        ),
        max_size=24,
    )
)
@settings(max_examples=40)
def test_findings_in_any_order_and_number_condemn_the_same_groups(said):
    """Gossiped verdicts repeat and come in any order: a verifier's gravest counts."""
    run = RUNS["sampled"]
    groups = POOL
    outcomes = []
    for order in (said, said + said, sorted(said), sorted(said, reverse=True)):
        policy = policy_of(run)
        for each in groups:
            policy.saw(each.id, each.sampler)
        for about, who, result in order:
            give_verdict(policy, run, groups[about].id, VERIFIERS[who], result)
        outcomes.append([policy.is_condemned(each.id) for each in groups])
    expected = ["dishonest" in {result for about, _, result in said if about == n} for n in range(4)]
    assert outcomes == [expected] * 4


POOL = [group(RUNS["sampled"], slot) for slot in range(4)]


# On the network


async def test_a_verdict_takes_a_waiting_group_out_of_the_buffer_and_its_sampler_is_told():
    run = run_of("sampled", verifiers=1)
    head = Chain(run).next(ANN, BOB)
    groups = [group(run, slot, sampler) for sampler in (ANN, BOB) for slot in range(2)]
    async with (
        MemorySwarm() as swarm,
        swarm.join(TRAINER) as network,
        swarm.join(VERIFIERS[0]) as verifier,
        swarm.join(STRANGER) as stranger,
        verifier.subscribe(topics.topic(run.id, topics.RECEIPTS), lambda _: ACCEPT) as inbox,
        open_journal(None, run.id) as journal,
        trio.open_nursery() as nursery,
    ):
        policy, receipts = policy_of(run), Receipts(network, TRAINER, run.id)
        receipts.set_head(head)
        buffer = ReplayBuffer(capacity=8, staleness=2, batch=2, entry=policy)
        listener = VerdictListener(run, policy, VerdictEnforcer(buffer, receipts, journal), journal)
        await journal.keep(groups)
        for each in groups:
            policy.saw(each.id, each.sampler)
            buffer.put(each)
            receipts.accept(each.id)
        await receipts.send()
        nursery.start_soon(listener.listen, network)
        seen = buffer.changed.count
        await trio.testing.wait_all_tasks_blocked()
        topic = topics.topic(run.id, topics.VERDICTS)
        bad = verdict(run, groups[0].id, VERIFIERS[0], "dishonest").sealed
        await stranger.publish(topic, write_batch([verdict(run, groups[2].id, STRANGER, "dishonest").sealed]))
        await verifier.publish(topic, write_batch([bad, verdict(run, groups[3].id, VERIFIERS[0]).sealed]))
        with trio.fail_after(10):
            await buffer.changed.wait(since=seen)
        assert {each.id for each in buffer} == {groups[2].id, groups[3].id}
        assert network.scores().get(STRANGER.public) == {"not-verifier": 1}
        await receipts.send()
        await trio.testing.wait_all_tasks_blocked()
        refused = {}
        for _ in range(len(inbox)):
            receipt = open_sealed((await inbox.receive()).data, Receipt, run.id).message
            refused |= dict(receipt.refused_ids())
        assert refused == {groups[0].id: "condemned", groups[1].id: "muted"}
        states = await journal.states()
        assert [states[each.id] for each in groups] == ["condemned", "muted", "waiting", "waiting"]
        assert [(found.result, found.sampler) for found in await journal.findings()] == [
            ("dishonest", ANN.public),
            ("honest", BOB.public),
        ]
        nursery.cancel_scope.cancel()
