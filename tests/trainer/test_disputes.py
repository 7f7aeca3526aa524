"""One verifier of several condemns: what waits, who settles it, and who is overturned."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_node.trainer.batch_selection import Entrance
from echo_node.trainer.disputes import ACQUITTED_AFTER, OVERTURNS, Disputes
from echo_node.trainer.verdict_policy import UNDECIDED
from protocol import peer_id
from tests.crafting import TRAINER
from tests.trainer.test_verdict_policy import (
    ANN,
    BOB,
    NEWCOMER,
    VERIFIERS,
    give_verdict,
    group,
    policy_of,
    run_of,
)

LIAR, OTHER, THIRD = VERIFIERS


def proven(run, policy, sampler=ANN, first=1000):
    """Have a sampler earn trust, and return the policy."""
    for slot in range(first, first + NEWCOMER + 4):
        each = group(run, slot, sampler)
        policy.saw(each.id, each.sampler)
        give_verdict(policy, run, each.id, OTHER)
    return policy


def arrived(run, policy, slot, sampler=ANN):
    one = group(run, slot, sampler)
    policy.saw(one.id, one.sampler)
    policy.acknowledged([one.id], OTHER.public)
    return one


def test_groups_of_a_disputed_sampler_wait_for_another_verifier():
    run = run_of("sampled", verifiers=2)
    policy = proven(run, policy_of(run))
    bad, next_one = arrived(run, policy, 0), arrived(run, policy, 1)
    give_verdict(policy, run, bad.id, LIAR, "dishonest")
    assert not policy.is_muted(ANN.public), "muting takes two"
    assert policy.entrance(next_one) is Entrance.CLOSED
    give_verdict(policy, run, next_one.id, LIAR)
    assert policy.entrance(next_one) is Entrance.CLOSED, "not by the one that accuses it"
    give_verdict(policy, run, next_one.id, OTHER)
    assert policy.entrance(next_one) is Entrance.OPEN
    assert policy.entrance(proven_group(run, policy, BOB)) is Entrance.OPEN, "nobody else is concerned"


def proven_group(run, policy, sampler):
    proven(run, policy, sampler)
    return arrived(run, policy, 5, sampler)


@pytest.mark.parametrize("can_look", [True, False])
def test_a_trainer_looks_at_a_disputed_samplers_groups_only_if_it_can(can_look):
    run = run_of("sampled", verifiers=2)
    policy = proven(run, policy_of(run, check=(lambda _: None) if can_look else None))
    bad, next_one = arrived(run, policy, 0), arrived(run, policy, 1)
    assert not policy.wants_to_check(next_one), "nobody disputes it"
    give_verdict(policy, run, bad.id, LIAR, "dishonest")
    assert policy.wants_to_check(next_one) is can_look


def test_with_one_verifier_there_is_no_dispute():
    run = run_of("sampled", verifiers=1)
    policy = policy_of(run)
    one = arrived(run, policy, 0)
    assert give_verdict(policy, run, one.id, LIAR, "dishonest").muted == {ANN.public}
    assert not policy.disputes.is_disputed(ANN.public)


@pytest.mark.parametrize(("looks", "muted"), [("own-luck", True), (None, False)])
def test_the_trainers_own_look_at_the_condemned_group_settles_it(looks, muted):
    run = run_of("sampled", verifiers=2)
    policy = proven(run, policy_of(run, check=lambda _: looks))
    bad, next_one = arrived(run, policy, 0), arrived(run, policy, 1)
    consequences = give_verdict(policy, run, bad.id, LIAR, "dishonest")
    assert consequences.condemned == {bad.id}
    policy.contest([bad])
    assert policy.wants_to_check(next_one), "whatever the policy, before it is learnt from"
    assert policy.next_contested() is bad
    assert policy.next_contested() is None
    policy.take(policy.check(bad))
    assert policy.is_muted(ANN.public) is muted
    assert policy.disputes.overturned[LIAR.public] == (0 if muted else 1)
    assert not policy.disputes.is_disputed(ANN.public)
    assert policy.is_condemned(bad.id) is muted


def test_a_verifier_that_is_overturned_repeatedly_is_named_and_no_longer_disputes_alone(caplog):
    """It condemns everybody, honest as they are."""
    run = run_of("sampled", verifiers=3)
    policy = proven(run, policy_of(run))
    for slot in range(OVERTURNS):
        one = arrived(run, policy, slot)
        give_verdict(policy, run, one.id, LIAR, "dishonest")
        give_verdict(policy, run, one.id, OTHER)
        assert policy.is_condemned(one.id), "one against one"
        give_verdict(policy, run, one.id, THIRD)
        assert not policy.is_condemned(one.id)
    assert caplog.text.count(peer_id(LIAR.public)) == 1
    last = arrived(run, policy, 99)
    assert not give_verdict(policy, run, last.id, LIAR, "dishonest").condemned
    assert policy.entrance(last) is Entrance.OPEN
    assert not policy.disputes.is_disputed(ANN.public)
    consequences = give_verdict(policy, run, last.id, OTHER, "dishonest")
    assert consequences.condemned == {last.id}, "together with another it is heard"
    assert consequences.muted == {ANN.public}


def test_two_colluding_keys_do_not_silence_an_honest_verifier():
    """A verifier that calls a cheat's groups honest is one against one, and overturns nobody."""
    run = run_of("sampled", verifiers=2)
    policy = policy_of(run)
    for slot in range(4 * OVERTURNS):
        one = arrived(run, policy, slot)
        give_verdict(policy, run, one.id, OTHER, "dishonest")
        give_verdict(policy, run, one.id, LIAR)
        assert policy.is_condemned(one.id)
    assert not policy.disputes.overturned


def test_a_look_that_cannot_decide_overturns_nobody():
    run = run_of("sampled", verifiers=2)
    policy = policy_of(run, check=lambda _: UNDECIDED)
    one = arrived(run, policy, 0)
    give_verdict(policy, run, one.id, LIAR, "dishonest")
    policy.take(policy.check(one))
    assert policy.disputes.is_disputed(ANN.public)
    assert not policy.disputes.overturned


def test_a_dispute_that_nobody_else_confirms_ends():
    disputes = Disputes(TRAINER.public, frozenset(each.public for each in VERIFIERS))
    disputes.accused(ANN.public, LIAR.public)
    for _ in range(ACQUITTED_AFTER - 1):
        disputes.acquitted(ANN.public, OTHER.public)
        disputes.acquitted(ANN.public, LIAR.public)
    assert disputes.is_disputed(ANN.public)
    disputes.acquitted(ANN.public, OTHER.public)
    assert not disputes.is_disputed(ANN.public)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 2), st.sampled_from(["honest", "dishonest"]))))
def test_a_verifier_is_overturned_only_where_it_stands_alone(said):
    disputes = Disputes(TRAINER.public, frozenset(each.public for each in VERIFIERS))
    findings: dict[int, dict[bytes, str]] = {}
    for about, who, result in said:
        found = findings.setdefault(about, {})
        found.setdefault(VERIFIERS[who].public, result)
        by = {each: {key for key, was in found.items() if was == each} for each in ("honest", "dishonest")}
        disputes.weigh(bytes([about]), ANN.public, by["honest"], by["dishonest"])
    for key in disputes.overturned:
        alone = [found for found in findings.values() if found.get(key) == "dishonest" and len(found) == 3]
        assert disputes.overturned[key] == sum([*found.values()].count("honest") == 2 for found in alone)
