"""Bounded engine classes: never more than their share, and never a silent standstill."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_node.contract import Prompt
from echo_node.rollouts.record import RolloutRecord
from echo_node.runs.engine_shares import ClassShares
from echo_node.trainer.batch_selection import Entrance, Entry, choose, choose_most
from echo_node.trainer.replay_buffer import ReplayBuffer
from protocol import open_sealed
from protocol.trajectory import TrajectoryGroup
from tests.crafting import ENGINE, SAMPLERS, open_run, sealed_group
from tests.records import record_of

RUN = open_run()
ROUGH, COARSE = "llama/q4_0", "llama/q8_0"
ENGINES = (ENGINE, ROUGH, COARSE)


def shares_of(rough=1.0, coarse=1.0) -> ClassShares:
    known = RUN.manifest.engines[0]
    told = {ENGINE: 1.0, ROUGH: rough, COARSE: coarse}
    return ClassShares([replace(known, engine=engine, share=share) for engine, share in told.items()])


def admitted(slot: int, engine: str, step: int = 0, sampler=SAMPLERS[0]) -> RolloutRecord:
    sealed = sealed_group(RUN, bytes([step]) * 32, sampler, slot, engine=engine)
    return record_of(open_sealed(sealed, TrajectoryGroup, RUN.id), step, Prompt("r12345="))


POOL = {
    engine: [admitted(20 * place + slot, engine, sampler=SAMPLERS[slot % 4]) for slot in range(20)]
    for place, engine in enumerate(ENGINES)
}
"""Twenty groups of each class, by four samplers."""


def classes(groups) -> Counter:
    return Counter(group.message.engine for group in groups)


def test_a_share_is_of_whole_groups_and_rounding_takes_none_away():
    shares = shares_of(coarse=0.29)
    assert [shares.most(COARSE, batch) for batch in (1, 3, 4, 32, 100)] == [0, 0, 1, 9, 29]
    assert shares.most(ENGINE, 32) == shares.most("of no manifest", 32) == 32
    assert set(shares.bounded) == {COARSE}
    assert shares.describe(100) == "llama/q8_0 may fill 29 of the 100 groups of a batch"


def test_classes_that_cannot_fill_a_batch_between_them_are_known():
    shares = shares_of(rough=0.5, coarse=0.25)
    assert shares.can_fill([ENGINE, COARSE], 8)
    assert not shares.can_fill([COARSE, ROUGH, COARSE], 8)
    assert shares_of(rough=0.5, coarse=0.5).can_fill([ROUGH, COARSE], 8)


class Lot(Entry):
    """Groups of some slots are closed, of others bounded."""

    def __init__(self, kinds, bound, *, hard):
        self._kinds, self._bound, self._hard = kinds, bound, hard

    @property
    def is_hard(self):
        return self._hard

    def entrance(self, group):
        return self._kinds[group.message.slot]

    def bound(self, batch):
        return min(self._bound, batch)


KINDS = st.lists(st.sampled_from(Entrance), min_size=60, max_size=60)
SHARES = st.builds(shares_of, st.floats(0, 1), st.floats(0, 1))


def most_that_fit(groups, count, entry, shares) -> int:
    """By counting alone: per class first what is open, then what is bounded."""
    opened, room = 0, 0
    for engine in ENGINES:
        kinds = Counter(entry.entrance(each) for each in groups if each.message.engine == engine)
        most = shares.most(engine, count)
        taken = min(kinds[Entrance.OPEN], most)
        opened += taken
        room += min(kinds[Entrance.BOUNDED], most - taken)
    bounded = min(room, entry.bound(count)) if entry.is_hard else room
    return min(count, opened + bounded)


@given(
    st.lists(st.sampled_from([each for pool in POOL.values() for each in pool]), unique_by=id, max_size=40),
    st.integers(1, 16),
    KINDS,
    st.integers(0, 8),
    SHARES,
    st.booleans(),
)
def test_no_class_has_more_than_its_share_and_a_batch_that_exists_is_found(
    groups, count, kinds, bound, shares, hard
):
    entry = Lot(kinds, bound, hard=hard)
    chosen = choose(groups, count, entry, shares)
    assert len({each.id for each in chosen}) == len(chosen)
    for engine, taken in classes(chosen).items():
        assert taken <= shares.most(engine, count)
    entrances = Counter(map(entry.entrance, chosen))
    assert not entrances[Entrance.CLOSED]
    if hard:
        assert entrances[Entrance.BOUNDED] <= entry.bound(count)
    assert len(chosen) == most_that_fit(groups, count, entry, shares)

    most = choose_most(groups, entry, shares)
    for engine, taken in classes(most).items():
        assert taken <= shares.most(engine, len(most))
    sizes = [size for size in range(len(groups) + 1) if most_that_fit(groups, size, entry, shares) == size]
    assert len(most) == max(sizes)


@given(
    st.lists(
        st.one_of(st.tuples(st.sampled_from(ENGINES), st.integers(0, 3)), st.integers(0, 2)), max_size=80
    ),
    st.integers(1, 8),
    st.integers(0, 2),
    SHARES,
)
def test_there_is_room_for_the_unbounded_until_there_is_a_batch_and_no_batch_has_more_than_a_share(
    orders, batch, staleness, shares
):
    """Feed pairs (class, sampler) as groups; a number draws a batch after so many steps."""
    buffer = ReplayBuffer(capacity=(staleness + 1) * batch, staleness=staleness, batch=batch, shares=shares)
    left = {
        engine: [[each for each in POOL[engine] if each.sampler == who.public] for who in SAMPLERS]
        for engine in ENGINES
    }
    step = 0
    for order in orders:
        if isinstance(order, int):
            step += order
            drawn = buffer.draw(batch, step)
            assert len(drawn) in {0, batch}
            assert all(taken <= shares.most(engine, batch) for engine, taken in classes(drawn).items())
            assert drawn or buffer.is_short
        elif groups := left[order[0]][order[1]]:
            had_batch = not buffer.is_short
            brought = replace(groups.pop(), step=step)
            if not buffer.add(brought) and order[0] == ENGINE:
                assert had_batch, "else nothing could ever be drawn"
        assert len(buffer) <= (staleness + 1) * batch


def test_what_a_class_has_beyond_its_share_waits_until_it_is_stale_and_is_dropped_by_that_name():
    buffer = ReplayBuffer(capacity=16, staleness=1, batch=8, shares=shares_of(coarse=0.25))
    assert [buffer.add(each) for each in POOL[COARSE][:6]] == [True] * 4 + [False] * 2
    assert buffer.dropped == {"full": 2}
    for each in POOL[ENGINE][:6]:
        assert buffer.add(each)
    assert classes(buffer.draw(8, step=0)) == {ENGINE: 6, COARSE: 2}
    for each in POOL[ENGINE][6:14]:
        buffer.add(replace(each, step=2))
    assert classes(buffer.draw(8, step=2)) == {ENGINE: 8}
    assert buffer.dropped == {"full": 2, "stale": 2}


def test_a_crowd_of_a_bounded_class_leaves_the_only_other_sampler_room_for_its_part():
    """By shares of the room alone one group would fit, and a batch would never be full."""
    buffer = ReplayBuffer(capacity=16, staleness=1, batch=8, shares=shares_of(coarse=0.25))
    for number in range(100):
        buffer.reserve(bytes([number]) * 32, COARSE)
        buffer.clear_reservations()
    for each in POOL[COARSE][:4]:
        buffer.put(each)
    alone = [each for each in POOL[ENGINE] if each.sampler == SAMPLERS[0].public]
    assert not any(buffer.reserve(bytes([number]) * 32, COARSE) for number in range(100))
    assert all(buffer.add(each) for each in alone)
    assert len(alone) == 5
    assert buffer.is_short
    for each in POOL[ENGINE][1:2]:
        assert buffer.add(each)
    assert classes(buffer.draw(8, step=0)) == {ENGINE: 6, COARSE: 2}


@pytest.mark.parametrize("of_others", [0, 3])
def test_a_buffer_that_lacks_other_classes_says_so(of_others):
    buffer = ReplayBuffer(capacity=8, staleness=0, batch=8, shares=shares_of(coarse=0.25))
    assert buffer.hindrance is None
    for each in POOL[ENGINE][:of_others]:
        buffer.add(each)
    assert buffer.hindrance is None, "too few groups have come, whosever they are"
    for each in POOL[COARSE][:4]:
        buffer.add(each)
    assert buffer.draw(8, step=0) == ()
    assert buffer.hindrance == (
        "groups of other engine classes are missing: llama/q8_0 may fill 2 of the 8 groups of a batch"
    )
    for each in POOL[ENGINE][of_others:8]:
        buffer.add(each)
    assert buffer.hindrance is None
    assert len(buffer.draw(8, step=0)) == 8
