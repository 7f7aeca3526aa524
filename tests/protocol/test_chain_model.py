"""The rules of the chain under crashes, delays and a key that lies: searched exhaustively when
small, at random when not.
"""

import dataclasses
import random
from collections import deque

import pytest

from protocol import TermGrant

from .chain_model import RULES, A, B, Faults, V, beginning, parted, steps, told_everything
from .scenarios import RUN, TURN_RULES


@pytest.fixture(autouse=True)
def _signatures_are_taken_for_granted(monkeypatch):
    """They have tests of their own, and the model would spend all its time on them."""
    monkeypatch.setattr(TermGrant, "verify", lambda _self, _run: None)


def search(faults: Faults, versions: int, terms: int, wrong, most: int, rules=RULES):
    """Breadth first through all worlds. Returns how many there are and the first wrong one."""
    start = beginning(rules)
    seen, waiting = {start.key()}, deque([start])
    while waiting and len(seen) < most:
        world = waiting.popleft()
        if wrong(world):
            return len(seen), world
        for _, after in steps(world, faults, versions, terms):
            key = after.key()
            if key not in seen:
                seen.add(key)
                waiting.append(after)
    return len(seen), None


def wander(faults: Faults, seed: int, versions: int, terms: int, length: int, rules=RULES):
    """Where a random history ends."""
    found = []
    walk(faults, seed, versions, terms, length, found.append, rules)
    return found[-1]


def walk(faults: Faults, seed: int, versions: int, terms: int, length: int, wrong, rules=RULES):
    """One random history. Kinds of events are drawn first, so that rare ones happen too."""
    rng = random.Random(seed)
    world = beginning(rules)
    kinds = set()
    for _ in range(length):
        possible: dict[str, list] = {}
        for what, after in steps(world, faults, versions, terms):
            possible.setdefault(what, []).append(after)
        if not possible:
            break
        what = rng.choice(sorted(possible))
        kinds.add(what)
        world = rng.choice(possible[what])
        if wrong(world):
            return world, kinds
    return None, kinds


def now(world):
    return parted(list(world.nodes.values()))


def once_all_is_heard(world):
    """Whether nodes that heard the same, each in its own order, hold different heads or stand in
    different terms.
    """
    for seed in range(2):
        states = told_everything(world, seed)
        if parted(states) or len({state.term for state in states}) > 1:
            return True
    return False


def test_honest_keys_never_part_two_followers():
    """Every world of up to two versions and two terms; then long random histories."""
    worlds, wrong = search(Faults(), versions=2, terms=2, wrong=now, most=200_000)
    assert wrong is None
    assert 3_000 < worlds < 200_000, "the search was exhaustive, and was one"
    terms = set()
    for seed in range(60):
        wrong, kinds = walk(Faults(), seed, versions=7, terms=5, length=120, wrong=now)
        assert wrong is None
        terms |= kinds
    assert terms == {"publish", "vote", "hear"}


def test_honest_followers_that_have_heard_the_same_agree_on_the_tip():
    """The rules are not only safe: nobody gets stuck on what it slept through."""
    highest = 0
    for seed in range(60):
        world = wander(Faults(), seed, versions=7, terms=5, length=60)
        states = told_everything(world, seed)
        assert len({state.tip.id for state in states}) == 1
        assert len({(state.term, state.leader) for state in states}) == 1
        highest = max(highest, states[0].term)
    assert highest >= 4


@pytest.mark.parametrize("histories", [20, pytest.param(60, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "faults",
    [
        Faults(lying_leader=A),
        Faults(lying_leader=B),
        Faults(lying_elector=V),
        Faults(lying_elector=A),
        Faults(lying_leader=A, lying_elector=A),
        Faults(lying_leader=B, lying_elector=B),
    ],
    ids=[
        "the first leader",
        "the second leader",
        "a verifier",
        "a trainer as elector",
        "A as both",
        "B as both",
    ],
)
def test_a_lie_parts_followers_only_until_they_have_heard_it(faults, histories):
    for seed in range(histories):
        wrong, _ = walk(faults, seed, versions=5, terms=4, length=60, wrong=once_all_is_heard)
        assert wrong is None


def test_a_lie_does_part_followers_until_then():
    """Else the test above would say nothing."""
    found = [walk(Faults(lying_leader=A), seed, 4, 3, 60, now)[0] for seed in range(20)]
    assert any(found)


def test_a_leader_that_forgets_breaks_safety():
    """A head that leaves before it is on disk: the search finds the harm, so the rule is needed and
    the search works.
    """
    _, wrong = search(Faults(forgetful_leaders=True), versions=2, terms=1, wrong=now, most=50_000)
    assert wrong is not None


def test_an_elector_that_forgets_breaks_safety():
    histories = (walk(Faults(forgetful_electors=True), seed, 3, 2, 80, now)[0] for seed in range(300))
    assert any(histories)


# Two trainers that take turns

TURNS = dataclasses.replace(TURN_RULES, run=RUN)
"""Of the run whose heads the model makes."""


def two_led_one_term(world):
    """Whether followers hold two grants of one term, or heads that exclude each other."""
    led = {}
    for state in world.nodes.values():
        for held in state.grants:
            if led.setdefault(held.vote.term, held.vote) != held.vote:
                return True
    return now(world)


def test_two_trainers_that_take_turns_never_lead_one_term_and_never_part_two_followers():
    worlds, wrong = search(Faults(), 2, 3, two_led_one_term, most=200_000, rules=TURNS)
    assert wrong is None
    assert 100 < worlds < 200_000, "the search was exhaustive, and was one"
    for seed in range(60):
        assert walk(Faults(), seed, 7, 6, 120, two_led_one_term, TURNS)[0] is None


def test_of_two_that_take_turns_either_can_follow_the_other_for_ever():
    """Each term is led by who did not lead the one before, so nobody waits for the vote of a leader
    who is gone.
    """
    highest = 0
    for seed in range(60):
        states = told_everything(wander(Faults(), seed, 7, 6, 80, TURNS), seed)
        assert len({(state.tip.id, state.term, state.leader) for state in states}) == 1
        led = [A, *(held.vote.leader for held in states[0].grants)]
        assert led == [(A, B)[place % 2] for place in range(states[0].term)]
        highest = max(highest, states[0].term)
    assert highest >= 5


@pytest.mark.parametrize(
    "faults",
    [
        Faults(lying_leader=A),
        Faults(lying_leader=B),
        Faults(lying_elector=A),
        Faults(lying_elector=B),
        Faults(lying_leader=B, lying_elector=B),
    ],
    ids=["A as leader", "B as leader", "A as elector", "B as elector", "B as both"],
)
def test_a_lie_of_one_that_takes_turns_parts_followers_only_until_they_have_heard_it(faults):
    for seed in range(20):
        assert walk(faults, seed, 5, 4, 60, once_all_is_heard, TURNS)[0] is None


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_long_histories_of_every_kind():
    for seed in range(400):
        assert walk(Faults(), seed, versions=9, terms=6, length=200, wrong=now)[0] is None
        for faults in (Faults(lying_leader=A), Faults(lying_leader=B), Faults(lying_elector=V)):
            assert walk(faults, seed, versions=6, terms=5, length=100, wrong=once_all_is_heard)[0] is None
