"""What verifiers drew is not used before their verdicts, and neither is what came after it."""

from __future__ import annotations

import pytest

from echo_node.trainer.batch_selection import Entrance
from echo_node.trainer.disputes import OVERTURNS
from echo_node.trainer.due_verdicts import BLOCKING_SECONDS, OF_ONE, SAMPLERS, DueVerdicts
from tests.trainer.test_inventory import ANN, JUDGE, opened_place
from tests.trainer.test_inventory import run_of as listing_run
from tests.trainer.test_verdict_policy import (
    BOB,
    NEWCOMER,
    VERIFIERS,
    give_verdict,
    group,
    policy_of,
    run_of,
)

FIRST, SECOND, _ = VERIFIERS


class Swarm:
    """A policy with one proven sampler, and verifiers that acknowledge what a test wants."""

    def __init__(self, verifiers=1) -> None:
        self.run = run_of("sampled", verifiers=verifiers)
        self.policy = policy_of(self.run)
        self.clock = self.policy._clock
        self.slot = 0
        for sampler in (ANN, BOB):
            for _ in range(NEWCOMER + 2):
                give_verdict(self.policy, self.run, self.arrive(sampler, seen_by=()).id, FIRST)

    def arrive(self, sampler=ANN, *, drawn=False, seen_by=(FIRST,)):
        self.slot += 1
        one = group(self.run, self.slot, sampler)
        self.policy.saw(one.id, one.sampler)
        for each in seen_by:
            self.policy.acknowledged([one.id], each.public, {one.id} if drawn else ())
        return one

    def entrances(self, *groups) -> str:
        return "".join(self.policy.entrance(each).value[0] for each in groups)


async def test_a_group_that_was_drawn_and_those_after_it_wait_for_the_verdict():
    async with opened_place(listing_run()) as place:
        place.trust()
        before, drawn, after = place.take(0, 1, 2)
        await place.publisher.flush()
        await place.listed()
        await place.acknowledge(place.inventories[-1], drawn=[drawn.id])
        found = [place.policy.entrance(each) for each in (before, drawn, after)]
        assert found == [Entrance.OPEN, Entrance.CLOSED, Entrance.CLOSED]
        assert place.policy.awaits(after)
        give_verdict(place.policy, place.run, drawn.id, JUDGE)
        assert place.policy.entrance(after) is Entrance.OPEN


def test_what_a_sampler_sends_after_it_turned_is_learnt_from_until_the_first_draw_and_no_longer():
    swarm = Swarm()
    forged = [swarm.arrive(drawn=number % 4 == 3) for number in range(40)]
    assert swarm.entrances(*forged) == "o" * 3 + "c" * 37, "however long the verdict takes"
    assert swarm.entrances(swarm.arrive(BOB)) == "o", "nobody else waits"


def test_a_verdict_on_a_later_group_does_not_open_an_earlier_one_that_was_drawn():
    swarm = Swarm()
    by_hand, shown = swarm.arrive(drawn=True), swarm.arrive(drawn=True)
    give_verdict(swarm.policy, swarm.run, shown.id, FIRST)
    assert swarm.entrances(by_hand, shown, swarm.arrive()) == "coc"


def test_a_group_whose_verdict_came_before_it_was_listed_waits_for_nothing():
    swarm = Swarm()
    one = swarm.arrive(seen_by=())
    give_verdict(swarm.policy, swarm.run, one.id, FIRST)
    swarm.policy.acknowledged([one.id], FIRST.public, {one.id})
    assert swarm.entrances(one, swarm.arrive()) == "oo"


def test_a_verifier_that_drops_what_it_drew_holds_up_others_for_a_while_and_that_group_for_good():
    swarm = Swarm()
    dropped, after = swarm.arrive(drawn=True), swarm.arrive()
    swarm.clock.now += BLOCKING_SECONDS + 1
    swarm.policy.acknowledged([dropped.id], FIRST.public, {dropped.id})  # listed again: no new wait
    assert swarm.entrances(dropped, after) == "co"


@pytest.mark.parametrize("silent", ["absent", "overturned"])
def test_who_is_absent_or_was_overturned_holds_up_nobody(silent):
    swarm = Swarm(verifiers=2)
    one = swarm.arrive(seen_by=(FIRST,))
    swarm.policy.acknowledged([one.id], SECOND.public, {one.id})
    assert swarm.entrances(one) == "c"
    if silent == "absent":
        for now in range(3):
            swarm.policy.presence.listed(float(now))
        swarm.policy.presence.acknowledged(FIRST.public, 99.0, owes=False)
        swarm.policy.presence.review(100.0)
        assert SECOND.public in swarm.policy.presence.absent
    else:
        swarm.policy.disputes.overturned[SECOND.public] = OVERTURNS
    assert swarm.entrances(one) == "o"


def test_what_is_remembered_is_bounded():
    due = DueVerdicts()
    for order in range(2 * OF_ONE):
        due.drew(b"one", b"verifier", order, 0.0)
    assert len(due._due[b"one"][b"verifier"]) == OF_ONE
    for number in range(SAMPLERS):
        due.drew(number.to_bytes(4, "big"), b"verifier", 0, 0.0)
    assert len(due._due) == SAMPLERS
    due.judged((5).to_bytes(4, "big"), b"verifier", 0)
    assert len(due._due) == SAMPLERS - 1


@pytest.mark.parametrize("verdict_first", [False, True])
def test_a_verifier_does_not_vouch_for_groups_of_its_own(verdict_first):
    run = run_of("sampled", verifiers=2)
    policy = policy_of(run)
    own = group(run, 0, FIRST)
    steps = [lambda: policy.saw(own.id, own.sampler), lambda: give_verdict(policy, run, own.id, FIRST)]
    for step in reversed(steps) if verdict_first else steps:
        step()
    policy.acknowledged([own.id], FIRST.public)
    assert policy.entrance(own) is Entrance.BOUNDED
    assert policy.trust.level(FIRST.public, policy._clock()) == 0
    assert policy.counts["own-group"] == 1
    give_verdict(policy, run, own.id, SECOND)
    assert policy.entrance(own) is Entrance.OPEN
