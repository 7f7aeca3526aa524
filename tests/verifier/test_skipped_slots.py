"""Skipped slots: held against a sampler that skips the worse ones, not one that loses some."""

from __future__ import annotations

import numpy as np
import pytest

from echo_node.verifier.skipped_slots import SkippedSlots

HEAD, PEER = b"h" * 32, b"p" * 32


def found_after(worth, sent):
    """The slot at which skipped slots are held against the peer; every group triggers a check."""
    skipped = SkippedSlots()
    for slot in np.flatnonzero(sent):
        skipped.record(HEAD, PEER, int(slot), float(worth[slot]))
        audited = skipped.suspicious(HEAD, PEER)
        if audited and skipped.worth_less(HEAD, PEER, [float(worth[hole]) for hole in audited]):
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
    skipped = SkippedSlots()
    for slot in range(3, 27):
        skipped.record(HEAD, PEER, slot, float(slot % 3 == 0))
    assert skipped.suspicious(HEAD, PEER) == [0, 1, 2]
    assert skipped.worth_less(HEAD, PEER, [0.0, 0.0, 0.0]) is None
    assert skipped.worth_less(HEAD, PEER, [0.0] * 1) is None


def test_few_holes_are_not_looked_at():
    skipped = SkippedSlots()
    for slot in range(40):
        if slot % 12:
            skipped.record(HEAD, PEER, slot, 1.0)
    assert skipped.suspicious(HEAD, PEER) == []
