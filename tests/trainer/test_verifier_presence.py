"""Presence of verifiers: silence costs a bounded time, and never lowers the checking."""
# ruff: noqa: ARG001 -- asking for the clock is using it

from __future__ import annotations

from collections import Counter

import trio
import trio.testing

from echo_node.runtime.reputation import NEWCOMER
from echo_node.trainer import inventory as inventory_module
from echo_node.trainer.batch_selection import Entrance
from echo_node.trainer.verdict_gate import VerdictGate
from echo_node.trainer.verdict_policy import VerdictPolicy
from echo_node.trainer.verifier_presence import (
    FEWEST_INVENTORIES,
    NO_ACKNOWLEDGEMENT,
    NO_VERDICT,
    SILENT_SECONDS,
    VERDICT_SECONDS,
    VerifierPresence,
)
from tests.crafting import TRAINER
from tests.trainer.test_inventory import ANN, JUDGE, opened_place, run_of
from tests.trainer.test_verdict_policy import VERIFIERS, give_verdict, group

ONE, OTHER = (each.public for each in VERIFIERS[:2])


def silent(presence: VerifierPresence, since: float = 0.0) -> None:
    for number in range(FEWEST_INVENTORIES):
        presence.listed(since + number)


def test_a_verifier_that_leaves_inventories_without_a_word_is_absent_until_it_acknowledges(caplog):
    presence = VerifierPresence([ONE, OTHER])
    silent(presence)
    presence.acknowledged(OTHER, 3.0, owes=False)
    assert not presence.review(SILENT_SECONDS - 1)
    assert presence.review(SILENT_SECONDS)
    assert presence.absent == {ONE: NO_ACKNOWLEDGEMENT}
    assert "counts as absent" in caplog.text, "the operator is told"
    assert not presence.review(SILENT_SECONDS + 1), "once"
    assert not presence.is_nobody_there
    presence.acknowledged(ONE, SILENT_SECONDS + 2, owes=False)
    assert presence.present == {ONE, OTHER}


def test_few_inventories_in_a_long_time_make_nobody_absent():
    presence = VerifierPresence([ONE])
    presence.listed(0.0)
    assert not presence.review(10 * SILENT_SECONDS)


def test_who_acknowledges_and_never_judges_is_absent_until_it_gives_a_verdict():
    presence = VerifierPresence([ONE])
    presence.acknowledged(ONE, 0.0, owes=True)
    presence.acknowledged(ONE, VERDICT_SECONDS - 1, owes=True)
    assert presence.review(VERDICT_SECONDS)
    assert presence.absent == {ONE: NO_VERDICT}
    presence.acknowledged(ONE, VERDICT_SECONDS + 1, owes=False)
    assert presence.is_nobody_there, "an acknowledgement is no verdict"
    presence.judged(ONE)
    assert not presence.absent


def test_a_run_without_verifiers_has_nobody_absent_and_strangers_count_for_nothing():
    presence = VerifierPresence([])
    silent(presence)
    presence.acknowledged(b"s" * 32, 0.0, owes=True)
    presence.judged(b"s" * 32)
    assert not presence.review(1e6)
    assert not presence.is_nobody_there


def test_while_all_verifiers_are_absent_the_trainer_looks_at_no_less_than_they_would():
    run = run_of()
    policy = VerdictPolicy(run, TRAINER, check=lambda _: None)
    newcomer, unannounced = group(run, 0), group(run, 1)
    policy.saw(newcomer.id, ANN.public)
    assert not policy.wants_to_check(newcomer), "a verifier will"
    silent(policy.presence)
    policy.presence.review(SILENT_SECONDS)
    assert policy.wants_to_check(newcomer)
    assert not policy.is_hard
    policy.take(policy.check(newcomer))
    assert policy.entrance(newcomer) is Entrance.OPEN, "what it found honest counts"
    for number in range(2, NEWCOMER * 10):
        one = group(run, number)
        policy.saw(one.id, ANN.public)
        policy.take(policy.check(one))
    policy.saw(unannounced.id, ANN.public, vouched=False)
    assert policy.wants_to_check(unannounced), "no standing speaks for it"
    looked = sum(policy.wants_to_check(group(run, number)) for number in range(1_000, 1_400))
    assert 15 <= looked <= 80, "about a tenth of a proven sampler's, as verifiers do"


def test_without_a_check_of_its_own_the_trainer_opens_nothing_for_absent_verifiers():
    run = run_of()
    policy = VerdictPolicy(run, TRAINER)
    silent(policy.presence)
    policy.presence.review(SILENT_SECONDS)
    one = group(run, 0)
    policy.saw(one.id, ANN.public)
    assert policy.is_hard
    assert policy.entrance(one) is Entrance.BOUNDED


def test_by_quorum_nobody_stands_in_for_verifiers():
    run = run_of("quorum", verifiers=2, quorum=2)
    policy = VerdictPolicy(run, TRAINER, check=lambda _: None)
    silent(policy.presence)
    policy.presence.review(SILENT_SECONDS)
    one = group(run, 0)
    policy.saw(one.id, ANN.public)
    assert policy.entrance(one) is Entrance.CLOSED
    assert not policy.wants_to_check(one)


async def test_what_an_absent_verifier_acknowledged_is_closed_again_on_trust(autojump_clock):
    async with opened_place(run_of(verifiers=2)) as place:
        place.trust()
        (one,) = place.take(0)
        await trio.sleep(1)
        await place.listed()
        for each in place.inventories:
            await place.acknowledge(each)
        assert place.policy.entrance(one) is Entrance.OPEN
        (newcomers,) = place.take(1)
        place.policy.presence.acknowledged(JUDGE.public, trio.current_time(), owes=True)
        await trio.sleep(VERDICT_SECONDS + 1)
        assert JUDGE.public in place.policy.presence.absent
        assert place.policy.entrance(one) is Entrance.BOUNDED, "it draws lots and does not look"
        assert newcomers.id != one.id


async def test_a_silent_verifier_costs_one_wait_and_not_one_a_step(autojump_clock):
    async with opened_place(run_of()) as place:
        place.policy._check = lambda _: None
        gate = VerdictGate(place.run, place.network, place.policy, place.receipts, Counter(), place.publisher)
        waits = []
        for step in range(4):
            groups, began = place.take(*range(8 * step, 8 * step + 8)), trio.current_time()
            let_in = await gate.let_in(groups)
            waits.append(trio.current_time() - began)
            assert len(let_in) == 8
            assert all(map(place.policy.wants_to_check, let_in)), "each is looked at before it is learnt from"
        assert waits[0] <= SILENT_SECONDS + 1
        assert max(waits[1:]) < 1


async def test_a_group_is_listed_for_the_verifiers_that_have_not_acknowledged_it(autojump_clock):
    async with opened_place(run_of(verifiers=2)) as place:
        (one,) = place.take(0)
        await trio.sleep(1)
        await place.listed()
        await place.acknowledge(place.inventories[-1])
        await trio.sleep(20)
        again = await place.listed()
        assert len(again) == 4, "one of two has seen it"
        assert again[-1].groups == one.id
        await place.acknowledge(place.inventories[-1], verifier=VERIFIERS[1])
        await trio.sleep(200)
        assert len(await place.listed()) == 4


async def test_a_group_that_somebody_has_seen_is_listed_a_bounded_number_of_times(autojump_clock):
    async with opened_place(run_of(verifiers=2)) as place:
        (_one,) = place.take(0)
        await trio.sleep(1)
        await place.listed()
        await place.acknowledge(place.inventories[-1])
        await trio.sleep(3_600)
        assert len(await place.listed()) == inventory_module.MOST_TIMES
        assert not place.publisher._unseen
        assert OTHER in place.policy.presence.absent


async def test_the_acknowledgement_of_an_unreliable_verifier_opens_nothing(autojump_clock):
    async with opened_place(run_of(verifiers=2)) as place:
        place.trust()
        (one,) = place.take(0)
        await trio.sleep(1)
        await place.listed()
        place.policy.disputes.overturned[JUDGE.public] = 3
        for each in place.inventories:
            await place.acknowledge(each)
        assert place.policy.entrance(one) is Entrance.BOUNDED
        give_verdict(place.policy, place.run, one.id, VERIFIERS[1])
        assert place.policy.entrance(one) is Entrance.OPEN
