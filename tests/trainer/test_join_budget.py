"""Budgets for new keys: a crowd of one address waits, and four thousand volunteers do not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_node.trainer.join_budget import ALWAYS, WIDE, WINDOW_SECONDS, JoinBudget


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def join(budget, address) -> bool:
    """Join, if that may be."""
    if budget.wait(address) > 0:
        return False
    budget.spend(address)
    return True


def test_keys_of_one_address_have_one_budget_which_refills():
    clock = Clock()
    budget = JoinBudget(64, 6000, clock)
    assert sum(join(budget, "198.51.100.7") for _ in range(1000)) == 64
    assert join(budget, "198.51.100.8"), "the next address has its own"
    assert 0 < budget.wait("198.51.100.7") <= WINDOW_SECONDS / 64
    clock.now += WINDOW_SECONDS / 2
    assert sum(join(budget, "198.51.100.7") for _ in range(1000)) == 32


def test_an_ipv6_site_is_counted_by_its_64_and_by_its_48():
    budget = JoinBudget(8, 6000, Clock())
    assert sum(join(budget, f"2001:db8::{number:x}") for number in range(1, 100)) == 8
    many = sum(join(budget, f"2001:db8:0:{number:x}::1") for number in range(1, 1000))
    assert many == 8 * WIDE - 8
    assert join(budget, "2001:db8:1::1")
    assert sum(join(budget, f"::ffff:198.51.100.{n % 2}") for n in range(99)) == 16, "mapped: as IPv4"


def test_four_thousand_join_in_ten_minutes_from_their_homes_or_from_one_machine():
    for address in (lambda number: f"203.{number % 200}.{number // 200}.1", lambda _: "127.0.0.1"):
        clock, joined = Clock(), 0
        budget = JoinBudget(256, 6000, clock)
        for number in range(4000):
            clock.now = WINDOW_SECONDS * number / 4000
            joined += join(budget, address(number))
        assert joined == 4000


def test_when_a_crowd_has_spent_the_budget_of_all_others_still_come_in():
    budget = JoinBudget(64, 256, Clock())
    for number in range(1000):
        join(budget, f"198.51.{number % 8}.9")
    assert sum(join(budget, "203.0.113.5") for _ in range(20)) == ALWAYS


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["192.0.2.1", "192.0.2.2", "2001:db8::1", None, "nonsense"]), st.floats(0, 60)
        )
    ),
    st.integers(1, 20),
    st.integers(1, 40),
)
def test_no_address_has_more_than_twice_its_budget_in_any_window(steps, per_address, total):
    """A burst and a refill: whatever the order and the pauses."""
    clock = Clock()
    budget, taken = JoinBudget(per_address, total, clock), []
    for address, pause in steps:
        clock.now += pause
        waits = budget.wait(address)
        assert 0 <= waits <= 2 * WINDOW_SECONDS
        if not waits:
            budget.spend(address)
            taken.append((address, clock.now))
    for address in {each for each, _ in taken}:
        limit = total if address in (None, "nonsense") else per_address
        times = [at for each, at in taken if each == address]
        for at in times:
            assert sum(at <= other < at + WINDOW_SECONDS for other in times) <= 2 * limit + 1


@pytest.mark.parametrize("address", [None, "", "not an address", "12D3KooW"])
def test_what_is_no_address_counts_with_those_behind_relays(address):
    budget = JoinBudget(1, 3, Clock())
    assert [join(budget, address) for _ in range(4)] == [True, True, True, False]
