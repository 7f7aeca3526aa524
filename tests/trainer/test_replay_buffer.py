"""The replay buffer: bounded, fair, oldest first, and nothing leaves it that is too stale."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_node.contract import Prompt
from echo_node.rollouts.record import RolloutRecord
from echo_node.trainer.batch_selection import Entrance, Entry
from echo_node.trainer.replay_buffer import ReplayBuffer
from protocol import open_sealed
from protocol.trajectory import TrajectoryGroup
from tests.crafting import ENGINE, SAMPLERS, open_run, sealed_group
from tests.records import record_of

RUN = open_run()


def admitted(step: int, slot: int, sampler=SAMPLERS[0]) -> RolloutRecord:
    head = bytes([step]) * 32
    opened = open_sealed(sealed_group(RUN, head, sampler, slot), TrajectoryGroup, RUN.id)
    return record_of(opened, step, Prompt("r12345="))


@pytest.fixture(scope="module")
def many():
    """Groups of steps 0 to 3, four slots each, of two samplers in turn."""
    return [admitted(step, slot, SAMPLERS[slot % 2]) for step in range(4) for slot in range(4)]


def places(groups) -> list[tuple[int, int]]:
    return [(group.step, group.message.slot) for group in groups]


def test_no_more_than_its_capacity_goes_in_and_the_rest_is_counted(many):
    buffer = ReplayBuffer(capacity=5, staleness=4)
    assert [buffer.add(group) for group in many[:8]] == [True] * 5 + [False] * 3
    assert (len(buffer), buffer.full, buffer.dropped["full"]) == (5, True, 3)
    assert len(buffer.draw(2, step=0)) == 2
    assert not buffer.full
    assert buffer.add(many[5])


def test_the_oldest_go_first_whatever_the_order_of_arrival(many):
    buffer = ReplayBuffer(capacity=16, staleness=4)
    for group in reversed(many):
        buffer.add(group)
    drawn = [place for _ in range(4) for place in places(buffer.draw(4, step=3))]
    assert [step for step, _ in drawn] == sorted(step for step, _ in places(many))
    assert sorted(drawn) == places(many)
    assert len(buffer) == 0


def test_within_a_step_who_came_first_goes_first(many):
    buffer = ReplayBuffer(capacity=16, staleness=4)
    for group in (many[3], many[0], many[2], many[1]):
        buffer.add(group)
    assert set(places(buffer.draw(2, step=0))) == {(0, 3), (0, 0)}


def test_a_batch_is_sorted_so_that_its_order_is_not_that_of_arrival(many):
    orders = []
    for arrival in (many[:8], many[7::-1]):
        buffer = ReplayBuffer(capacity=16, staleness=4)
        for group in arrival:
            buffer.add(group)
        orders.append(places(buffer.draw(8, step=1)))
    assert orders[0] == orders[1] == [(0, 0), (0, 2), (0, 1), (0, 3), (1, 0), (1, 2), (1, 1), (1, 3)]


def test_turns_go_on_from_one_batch_to_the_next():
    buffer = ReplayBuffer(capacity=16, staleness=4)
    for slot in range(2):
        for sampler in SAMPLERS[:3]:
            buffer.add(admitted(0, slot, sampler))
    first, second = ({group.sampler for group in buffer.draw(2, step=0)} for _ in range(2))
    assert first == {each.public for each in SAMPLERS[:2]}
    assert SAMPLERS[2].public in second


def test_samplers_are_counted_while_they_have_groups_here():
    buffer = ReplayBuffer(capacity=16, staleness=4)
    assert buffer.samplers == 0
    for slot, sampler in enumerate((SAMPLERS[0], SAMPLERS[0], SAMPLERS[1])):
        buffer.add(admitted(0, slot, sampler))
    assert buffer.samplers == 2
    assert len(buffer.draw(2, step=0)) == 2
    assert buffer.samplers == 1


class FirstIsProven(Entry):
    """A rule by which the first sampler is proven and all others are young."""

    is_weighted = True

    def is_young(self, sampler: bytes) -> bool:
        return sampler != SAMPLERS[0].public


def test_young_keys_together_have_a_tenth_of_a_buffer_that_proven_ones_use():
    buffer = ReplayBuffer(capacity=20, staleness=4, batch=4, entry=FirstIsProven())
    for slot in range(10):
        assert buffer.add(admitted(0, slot)), "half is free for all"
    young = [buffer.add(admitted(0, 0, sampler)) for sampler in SAMPLERS[1:]]
    assert young == [True, True, False]
    assert all(buffer.add(admitted(0, slot)) for slot in range(10, 18)), "the rest is the proven one's"


def test_young_keys_may_fill_a_buffer_that_no_proven_one_uses():
    buffer = ReplayBuffer(capacity=20, staleness=4, batch=4, entry=FirstIsProven())
    groups = [admitted(0, slot, SAMPLERS[1 + slot % 3]) for slot in range(21)]
    assert [buffer.add(group) for group in groups] == [True] * 20 + [False]


def test_with_too_few_groups_nothing_is_drawn_and_nothing_is_lost(many):
    buffer = ReplayBuffer(capacity=16, staleness=4)
    for group in many[:3]:
        buffer.add(group)
    assert buffer.draw(4, step=0) == ()
    assert len(buffer) == 3
    buffer.add(many[3])
    assert len(buffer.draw(4, step=0)) == 4


def test_what_has_grown_too_stale_since_it_came_is_dropped_at_the_draw(many):
    buffer = ReplayBuffer(capacity=16, staleness=1)
    for group in many:
        buffer.add(group)
    drawn = buffer.draw(4, step=3)
    assert {group.step for group in drawn} == {2}
    assert (buffer.dropped["stale"], len(buffer)) == (8, 4)
    assert buffer.draw(4, step=5) == ()
    assert (buffer.dropped["stale"], len(buffer)) == (12, 0)


def test_a_group_exactly_at_the_bound_is_used_and_one_step_beyond_is_not(many):
    for staleness in (0, 1, 4):
        buffer = ReplayBuffer(capacity=1, staleness=staleness)
        buffer.add(many[0])
        assert places(buffer.draw(1, step=staleness)) == [(0, 0)]
        buffer.add(many[0])
        assert buffer.draw(1, step=staleness + 1) == ()


@given(
    st.lists(st.one_of(st.integers(0, 15), st.tuples(st.integers(1, 4), st.integers(0, 2))), max_size=60),
    st.integers(1, 10),
    st.integers(0, 3),
)
def test_every_group_is_drawn_dropped_or_waiting_and_never_two_of_these(orders, capacity, staleness):
    """Numbers add the group of that number; a pair is a draw after so many steps."""
    buffer = ReplayBuffer(capacity=capacity, staleness=staleness)
    groups = POOL
    step, added, drawn = 0, Counter(), Counter()
    for order in orders:
        if isinstance(order, int):
            if groups[order].id in buffer:
                continue  # admission sees to that
            added[places([groups[order]])[0]] += 1
            buffer.add(groups[order])
        else:
            count, steps = order
            step += steps
            batch = buffer.draw(count, step)
            assert len(batch) in {0, count}
            assert all(step - group.step <= staleness for group in batch)
            drawn.update(places(batch))
        assert len(buffer) <= capacity
    assert added.total() == drawn.total() + len(buffer) + buffer.dropped.total()
    assert drawn <= added


# A fair share


def by_sampler(groups) -> Counter:
    return Counter(
        SAMPLERS.index(next(one for one in SAMPLERS if one.public == group.sampler)) for group in groups
    )


def test_samplers_take_turns_so_that_a_fast_one_does_not_crowd_out_the_rest():
    """One has sixteen groups, the others two each, a step later: every batch has all."""
    buffer = ReplayBuffer(capacity=64, staleness=4)
    for slot in range(16):
        buffer.put(admitted(0, slot, SAMPLERS[0]))
    for slot in range(2):
        for sampler in SAMPLERS[1:]:
            buffer.put(admitted(1, slot, sampler))
    assert by_sampler(buffer.draw(8, step=1)) == {0: 2, 1: 2, 2: 2, 3: 2}
    assert by_sampler(buffer.draw(8, step=1)) == {0: 8}, "and nobody waits for those who bring nothing"


def test_once_a_batch_waits_nobody_brings_more_than_a_share_and_the_slow_find_room():
    buffer = ReplayBuffer(capacity=12, staleness=2, batch=4)
    fast, slow = SAMPLERS[:2]
    assert buffer.add(admitted(0, 0, slow))
    assert [buffer.add(admitted(0, slot, fast)) for slot in range(8)] == [True] * 6 + [False] * 2
    assert [buffer.add(admitted(0, slot, slow)) for slot in range(1, 8)] == [True] * 5 + [False] * 2
    assert buffer.full
    assert buffer.dropped == {"full": 4}


def test_as_long_as_no_batch_waits_the_fast_may_fill_it_alone():
    buffer = ReplayBuffer(capacity=4, staleness=0, batch=4)
    for sampler in SAMPLERS:
        buffer.reserve(sampler.public, ENGINE)
        buffer.clear_reservations()
    assert all(buffer.add(admitted(0, slot, SAMPLERS[0])) for slot in range(4))
    assert len(buffer.draw(4, step=0)) == 4


def test_a_newcomer_at_a_full_buffer_is_known_from_then_on_and_finds_room_after_the_next_draw():
    buffer = ReplayBuffer(capacity=8, staleness=1, batch=4)
    fast, newcomer = SAMPLERS[:2]
    for slot in range(8):
        assert buffer.add(admitted(0, slot, fast))
    assert not buffer.add(admitted(0, 0, newcomer)), (
        "what was acknowledged is not thrown out for somebody else's"
    )
    buffer.draw(4, step=0)
    assert [buffer.add(admitted(0, slot, fast)) for slot in range(8, 12)] == [False] * 4
    assert [buffer.add(admitted(0, slot, newcomer)) for slot in range(4)] == [True] * 4


def test_room_that_was_found_is_kept_until_the_group_is_on_disk():
    buffer = ReplayBuffer(capacity=2, staleness=0)
    ann, bob = (sampler.public for sampler in SAMPLERS[:2])
    assert [buffer.reserve(who, ENGINE) for who in (ann, bob, ann)] == [True, True, False]
    assert buffer.dropped == {"full": 1}
    buffer.clear_reservations()
    assert buffer.add(admitted(0, 0))


class Gate(Entry):
    """Groups of even slots are verified, slot 1 is closed, and two others may go in."""

    def __init__(self, *, hard):
        self.hard = hard

    @property
    def is_hard(self):
        return self.hard

    def entrance(self, group):
        slot = group.message.slot
        return Entrance.OPEN if slot % 2 == 0 else Entrance.CLOSED if slot == 1 else Entrance.BOUNDED

    def bound(self, _batch):
        return 2

    def gives_way(self, group):
        return group.message.slot in {1, 3}


def test_what_nobody_vouches_for_is_bounded_and_a_soft_bound_gives_way_when_there_is_nothing_else():
    for hard in (True, False):
        buffer = ReplayBuffer(capacity=32, staleness=0, entry=Gate(hard=hard))
        for slot in range(12):
            buffer.put(admitted(0, slot))
        assert [slot for _, slot in places(buffer.draw(8, step=0))] == [0, 2, 3, 4, 5, 6, 8, 10]
        rest = buffer.draw(3, step=0)
        assert [slot for _, slot in places(rest)] == ([] if hard else [7, 9, 11])
        assert len(buffer) == (4 if hard else 1)
        assert buffer.draw(1, step=0) == () if not hard else True, "what is closed stays closed"


def test_a_buffer_full_of_what_may_not_be_used_does_not_stop_the_run():
    buffer = ReplayBuffer(capacity=4, staleness=4, entry=Gate(hard=True))
    for slot in (1, 3, 5, 7):
        buffer.put(admitted(0, slot))
    assert buffer.draw(4, step=0) == ()
    assert buffer.make_room() == [], "only where somebody finds no room"
    assert not buffer.add(admitted(0, 0))
    assert places(buffer.make_room()) == [(0, 1), (0, 3)]
    assert buffer.dropped == {"unverified": 2, "full": 1}
    assert buffer.add(admitted(0, 0))
    assert buffer.make_room() == []


def test_groups_are_let_go_by_name_once():
    buffer = ReplayBuffer(capacity=8, staleness=0)
    groups = [admitted(0, slot, SAMPLERS[slot % 2]) for slot in range(6)]
    for group in groups:
        buffer.put(group)
        buffer.put(group)
    assert len(buffer) == 6
    gone = buffer.remove([groups[0].id, bytes(32), groups[0].id], "condemned")
    assert gone == [groups[0]]
    left = buffer.remove_where(lambda group: group.sampler == SAMPLERS[1].public, "muted")
    assert len(left) == 3
    assert (buffer.dropped, len(buffer)) == ({"condemned": 1, "muted": 3}, 2)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(1, 12))
def test_no_sampler_gets_more_of_a_batch_than_another_that_had_as_many_waiting(arrivals, count):
    buffer = ReplayBuffer(capacity=100, staleness=9)
    slots = Counter()
    for who in arrivals:
        buffer.put(CROWD[who][slots[who]])
        slots[who] += 1
    drawn = by_sampler(buffer.draw(count, step=0))
    assert drawn.total() in {0, count}
    if drawn:
        most = max(drawn.values())
        for who, held in slots.items():
            assert drawn[who] >= min(held, most - 1), "who has some left got as many as anybody, but for one"


CROWD = [[admitted(0, slot, sampler) for slot in range(60)] for sampler in SAMPLERS]
POOL = [admitted(number // 4, number % 4) for number in range(16)]


def test_a_samplers_own_reservations_count_against_its_share_and_others_do_not():
    """Two samplers share a room of 8 in which a batch of 2 waits: each has room for 4."""
    buffer = ReplayBuffer(capacity=8, staleness=0, batch=2)
    ann, bob = (sampler.public for sampler in SAMPLERS[:2])
    assert buffer.add(admitted(0, 0, SAMPLERS[1]))
    assert buffer.add(admitted(0, 0, SAMPLERS[0]))
    assert [buffer.reserve(ann, ENGINE) for _ in range(4)] == [True, True, True, False], "1 held, 3 reserved"
    assert [buffer.reserve(bob, ENGINE) for _ in range(4)] == [True, True, True, False], "ann's are not bob's"
    buffer.clear_reservations()
    assert [buffer.reserve(ann, ENGINE) for _ in range(4)] == [True, True, True, False], (
        "and all are free again"
    )


def test_reservations_of_one_sampler_in_two_engine_classes_add_up():
    buffer = ReplayBuffer(capacity=8, staleness=0, batch=2)
    ann, bob = (sampler.public for sampler in SAMPLERS[:2])
    assert buffer.reserve(bob, ENGINE)
    taken = [buffer.reserve(ann, engine) for engine in (ENGINE, "other", ENGINE, "other", ENGINE)]
    assert taken == [True, True, True, True, False]
    assert buffer.dropped == {"full": 1}
