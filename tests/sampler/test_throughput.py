"""Whether a machine keeps up with its run."""

import pytest

from echo_node.sampler.throughput import ThroughputMonitor


def told(call_seconds, step_seconds, *, staleness=4, calls=10, steps=10):
    monitor = ThroughputMonitor(staleness)
    for _ in range(calls):
        monitor.record_call(8, call_seconds)
    for step in range(steps + 1):
        monitor.record_head(step, step * step_seconds)
    return monitor


def test_a_machine_whose_groups_arrive_in_time_hears_nothing():
    assert told(call_seconds=4.9, step_seconds=1.0).too_slow is None
    assert told(call_seconds=4.9, step_seconds=1.0).seconds_per_group == pytest.approx(4.9 / 8)


def test_a_machine_whose_groups_are_stale_before_they_arrive_is_told_why_and_what_may_help():
    words = told(call_seconds=5.5, step_seconds=1.0).too_slow
    assert "5.5 s" in words
    assert "5.0 s" in words
    assert "--slots" in words


def test_where_groups_are_asked_for_no_number_of_slots_is_to_blame():
    words = told(call_seconds=1.5, step_seconds=1.0, staleness=0).too_slow
    assert "too slow for this run" in words
    assert "--slots" not in words


def test_nothing_is_said_before_enough_is_known():
    assert told(call_seconds=99.0, step_seconds=1.0, calls=2).too_slow is None
    assert told(call_seconds=99.0, step_seconds=1.0, steps=2).too_slow is None
    assert ThroughputMonitor(4).seconds_per_group is None


def test_heads_that_are_skipped_or_heard_twice_do_not_count_as_fast_steps():
    monitor = told(call_seconds=6.0, step_seconds=1.0, steps=0)
    for step in (4, 4, 8, 7, 12, 16):
        monitor.record_head(step, step * 1.0)
    assert monitor.too_slow is not None
    assert "steps of 1.0 s" in monitor.too_slow


def test_one_slow_call_is_not_the_pace():
    monitor = told(call_seconds=1.0, step_seconds=1.0)
    monitor.record_call(8, 12.0)
    assert monitor.too_slow is None
