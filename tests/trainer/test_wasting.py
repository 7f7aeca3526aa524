"""Patience with peers whose groups are of no use: how much there is, and when it comes back."""

from __future__ import annotations

from echo_node.trainer.wasting import LITTLE, PATIENCE, PEERS, PER_SECOND, Waste

ANN, BOB = b"a" * 32, b"b" * 32


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def spend(waste, sampler, count):
    for _ in range(count):
        waste.add(sampler, "over-limit")


def test_patience_with_one_is_used_up_by_that_one_alone():
    waste = Waste(Clock())
    spend(waste, ANN, int(PATIENCE) - 1)
    assert not waste.is_spent(ANN)
    waste.add(ANN, "over-limit")
    assert waste.is_spent(ANN)
    assert not waste.is_spent(BOB)


def test_patience_comes_back_with_time_and_no_further_than_it_was():
    clock = Clock()
    waste = Waste(clock)
    spend(waste, ANN, int(PATIENCE))
    clock.now += 1 / PER_SECOND
    assert not waste.is_spent(ANN)
    waste.add(ANN, "over-limit")
    assert waste.is_spent(ANN)
    clock.now += 1e6
    spend(waste, ANN, int(PATIENCE))
    assert waste.is_spent(ANN), "a long good time is no credit"


def test_strangers_without_number_do_not_fill_the_memory():
    waste = Waste(Clock())
    for number in range(3 * PEERS):
        waste.add(number.to_bytes(32), "stale")
    assert len(waste._wasted) == PEERS


def test_what_happens_to_the_best_counts_for_little():
    waste = Waste(Clock())
    waste.add(ANN, "stale", int(PATIENCE))
    waste.add(ANN, "duplicate", int(PATIENCE))
    assert not waste.is_spent(ANN)
    waste.add(ANN, "stale", int(PATIENCE / LITTLE))
    assert waste.is_spent(ANN)
