"""Slots that were left out: held against whoever leaves out the worse ones, and not against whoever loses some."""

from __future__ import annotations

import numpy as np
import pytest

from echo_node.verifier.holes import Holes

HEAD, PEER = b"h" * 32, b"p" * 32


def found_after(worth, sent):
    """The slot at which the holes are held against the peer, each group that comes being a look at them."""
    holes = Holes()
    for slot in np.flatnonzero(sent):
        holes.saw(HEAD, PEER, int(slot), float(worth[slot]))
        audited = holes.suspicious(HEAD, PEER)
        if audited and holes.worth_less(HEAD, PEER, [float(worth[hole]) for hole in audited]):
            return int(slot)
    return None


def rewards(seed):
    """Mean rewards of 96 groups of eight."""
    return np.random.default_rng(seed).random((96, 8)).mean(axis=1)


@pytest.mark.parametrize("seed", range(20))
def test_whoever_leaves_out_the_worse_half_is_found_out_within_sixty_slots(seed):
    worth = rewards(seed)
    assert found_after(worth, worth > np.median(worth)) < 60


@pytest.mark.parametrize("seed", range(20))
def test_whoever_loses_a_fifth_by_chance_is_not(seed):
    assert found_after(rewards(seed), np.random.default_rng(seed + 100).random(96) >= 0.2) is None


def test_a_few_holes_that_are_all_worth_nothing_prove_nothing():
    holes = Holes()
    for slot in range(3, 27):
        holes.saw(HEAD, PEER, slot, float(slot % 3 == 0))
    assert holes.suspicious(HEAD, PEER) == [0, 1, 2]
    assert holes.worth_less(HEAD, PEER, [0.0, 0.0, 0.0]) is None
    assert holes.worth_less(HEAD, PEER, [0.0] * 1) is None


def test_few_holes_are_not_looked_at():
    holes = Holes()
    for slot in range(40):
        if slot % 12:
            holes.saw(HEAD, PEER, slot, 1.0)
    assert holes.suspicious(HEAD, PEER) == []
