"""Chosen heads and chosen slots are found; volunteers that stop at random never are."""

from __future__ import annotations

import numpy as np
import pytest

from echo_node.verifier.selection_audit import (
    BUDGET,
    FIRST_BUDGET,
    HEADS,
    PEERS,
    SelectionAudit,
    SlotFigures,
    z_scores,
)

PEER = b"p" * 32
SIZE = 8
"""Completions of a group."""


class World:
    """Slots of many heads, whose groups get better over time, as in training."""

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)
        self._drawn = {}

    def figures(self, head, slot):
        """Draws are fixed: the same slot always gives the same group."""
        if (head, slot) not in self._drawn:
            rewards = self.rng.random(SIZE) < 0.2 + 0.6 * min(1.0, head / 400)
            self._drawn[head, slot] = SlotFigures.of(rewards.astype(float), self.rng.integers(3, 9, SIZE))
        return self._drawn[head, slot]


def play(world, heads, sends, verified=1.0):
    """Return the head at which a sampler is found, as the verifier's loop would audit it."""
    audit, unposted = SelectionAudit(), []
    for head in range(heads):
        name = head.to_bytes(32)
        sent, announced = sends(world, head)
        if not sent:
            unposted.append(head)
            continue
        for slot in sent:
            if world.rng.random() < verified:
                audit.record(name, PEER, slot, world.figures(head, slot))
                holes = [each for each in range(announced) if each not in sent]
                new = audit.wanted(name, PEER, holes, max(announced, max(sent) + 1))
                audit.left_out(name, PEER, {each: world.figures(head, each) for each in new})
                for other in unposted[-4:]:
                    first, tail = audit.wanted_unposted(other.to_bytes(32), PEER)
                    if first:
                        audit.left_out(
                            other.to_bytes(32), PEER, {each: world.figures(other, each) for each in first}
                        )
                        audit.compared(
                            other.to_bytes(32), PEER, {each: world.figures(other, each) for each in tail}
                        )
                if audit.breach(PEER):
                    return head
    return None


def best_of_heads(count):
    """Draws four slots under each of so many heads, sends those of the best: without a hole."""

    def worth(world, head):
        return np.mean([world.figures(head, slot).reward for slot in range(4)])

    def sends(world, head):
        first = head - head % count
        best = max(range(first, first + count), key=lambda each: worth(world, each))
        return (range(4), 4) if head == best else ((), 0)

    return sends


def best_of_slots(world, head):
    """Announces eight slots, sends the better half."""
    order = sorted(range(8), key=lambda slot: -world.figures(head, slot).reward)
    return sorted(order[:4]), 8


def shortest_slots(world, head):
    order = sorted(range(8), key=lambda slot: world.figures(head, slot).length)
    return sorted(order[:4]), 8


def most_spread_slots(world, head):
    order = sorted(range(8), key=lambda slot: -world.figures(head, slot).spread)
    return sorted(order[:4]), 8


def sleeper(world, head):
    """Sleeps through runs of heads, dies in the middle of a block, whatever it drew."""
    if (head // 20) % 3 == 1 or world.rng.random() < 0.3:
        return (), 0
    if world.rng.random() < 0.2:
        return range(int(world.rng.integers(1, 8))), 8
    return range(8), 8


@pytest.mark.parametrize("seed", range(5))
def test_the_best_of_five_heads_is_found_though_it_leaves_no_hole(seed):
    assert play(World(seed), 1500, best_of_heads(5)) is not None


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("forger", [best_of_slots, shortest_slots, most_spread_slots])
def test_the_best_of_slots_is_found_by_whatever_they_were_chosen(forger, seed):
    found = play(World(seed), 400, forger)
    assert found is not None
    assert found < 200


def test_a_trusted_forger_of_whom_a_tenth_is_checked_is_found():
    found = [play(World(seed), 2000, best_of_slots, verified=0.1) for seed in range(5)]
    assert None not in found


def test_of_many_volunteers_that_sleep_and_die_at_random_none_is_found():
    found = [play(World(seed), 120, sleeper) for seed in range(200)]
    assert found == [None] * 200


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_of_thousands_of_volunteers_none_is_found():
    found = [play(World(10_000 + seed), 200, sleeper) for seed in range(3_000)]
    assert found == [None] * 3_000


def test_the_false_alarm_rate_is_the_normal_ones_for_thousands_of_honest_peers():
    """The statistic itself, on 4,000 peers: at 3 standard errors about one in 370 per figure."""
    rng = np.random.default_rng(7)
    scores = []
    for _ in range(4_000):
        heads = [
            (rng.normal(size=(int(rng.integers(1, 6)), 3)), rng.normal(size=(int(rng.integers(1, 5)), 3)))
            for _ in range(40)
        ]
        scores.append(z_scores(heads))
    beyond = (np.abs(scores) > 3).mean()
    assert 0.0005 < beyond < 0.006
    assert np.abs(scores).max() < 5.0


def test_the_budget_of_a_peer_holds_whatever_it_leaves_out():
    audit, generated = SelectionAudit(), 0
    for head in range(500):
        name = head.to_bytes(32)
        audit.record(name, PEER, 0, SlotFigures(0.5, 0.1, 5.0))
        wanted = audit.wanted(name, PEER, list(range(1, 400)), 400)
        audit.left_out(name, PEER, dict.fromkeys(wanted, SlotFigures(0.5, 0.1, 5.0)))
        generated += len(wanted)
        assert generated <= FIRST_BUDGET + BUDGET * (head + 1)
    assert generated > 200
    assert audit.breach(PEER) is None, "equal figures prove nothing"


def test_memory_is_bounded():
    audit = SelectionAudit()
    for number in range(PEERS + 10):
        audit.record(bytes(32), number.to_bytes(32), 0, SlotFigures(0.0, 0.0, 1.0))
    for number in range(HEADS + 10):
        audit.record(number.to_bytes(32), PEER, 0, SlotFigures(0.0, 0.0, 1.0))
    assert len(audit._peers) == PEERS
    assert len(audit._peers[PEER].heads) == HEADS
