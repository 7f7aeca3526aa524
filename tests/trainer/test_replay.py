"""The replay buffer: bounded, oldest first, and nothing leaves it that is too stale."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_node.admission import Admitted
from echo_node.contract import Prompt
from echo_node.trainer.replay import ReplayBuffer
from protocol import open_sealed
from protocol.trajectory import TrajectoryGroup
from tests.crafting import SAMPLERS, open_run, sealed_group

RUN = open_run()
HEAD = b"h" * 32


def admitted(step: int, slot: int, sampler=SAMPLERS[0]) -> Admitted:
    opened = open_sealed(sealed_group(RUN, HEAD, sampler, slot), TrajectoryGroup, RUN.id)
    return Admitted(opened, step, Prompt("r12345="))


@pytest.fixture(scope="module")
def many():
    """Groups of steps 0 to 3, four slots each, of two samplers in turn."""
    return [admitted(step, slot, SAMPLERS[slot % 2]) for step in range(4) for slot in range(4)]


def places(groups) -> list[tuple[int, int]]:
    return [(group.step, group.group.message.slot) for group in groups]


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
    """Numbers add the group of that number; a pair draws so many after the policy has moved so far."""
    buffer = ReplayBuffer(capacity=capacity, staleness=staleness)
    groups = POOL
    step, added, drawn = 0, Counter(), Counter()
    for order in orders:
        if isinstance(order, int):
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


POOL = [admitted(number // 4, number % 4) for number in range(16)]
