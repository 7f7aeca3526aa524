"""The records of a run, and rates."""

from __future__ import annotations

import json

import pytest

from echo_node.telemetry import metrics
from echo_node.telemetry.metrics import Rate, Records, StepRecord, TrainedGroup


def record(step: int = 1, reward: float = 0.5, ages: tuple[int, ...] = (0,), **changes) -> StepRecord:
    told = {
        "step": step,
        "policy_step": step - 1,
        "version": step,
        "head": b"h" * 32,
        "reward": reward,
        "spread": 0.1,
        "loss": -0.2,
        "entropy": 0.3,
        "clip_share": 0.0,
        "mismatch_kl": 0.0,
        "effective_sample_share": 1.0,
        "gradient_norm": 1.5,
        "tokens": 48,
        "groups": tuple(
            TrainedGroup(bytes([n]) * 32, b"s" * 32, n, b"h" * 32, step - 1 - age)
            for n, age in enumerate(ages)
        ),
        "dropped": {"stale": 2},
        "waited_seconds": 0.1,
        "step_seconds": 0.2,
        "at_seconds": 0.3,
    }
    return StepRecord(**{**told, **changes})


def test_staleness_counts_groups_by_how_many_steps_old_they_were():
    assert record(9, ages=(0, 2, 2, 4)).staleness == {0: 1, 2: 2, 4: 1}


def test_a_record_as_json_has_no_bytes_and_loses_no_figure():
    told = record(9, ages=(0, 2, 2))
    plain = json.loads(json.dumps(told.plain()))
    assert plain.keys() == {*StepRecord.__dataclass_fields__, "staleness", "by_sampler"}
    assert plain["head"] == "68" * 32
    assert plain["groups"] == [group.id.hex() for group in told.groups]
    assert plain["staleness"] == {"0": 1, "2": 2}
    assert (plain["reward"], plain["dropped"]) == (0.5, {"stale": 2})


def test_records_go_to_their_file_line_by_line_as_they_come(tmp_path):
    file = tmp_path / "steps.jsonl"
    records = Records(file)
    for step in (1, 2, 3):
        records.add(record(step))
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        assert [line["step"] for line in lines] == list(range(1, step + 1))
    assert len(records.steps) == 3


def test_without_a_file_records_stay_in_memory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Records().add(record())
    assert list(tmp_path.iterdir()) == []


def test_the_reward_is_the_mean_of_the_last_few_steps():
    records = Records()
    assert records.reward() == 0.0
    for step in range(1, 21):
        records.add(record(step, reward=step / 20))
    assert records.reward() == pytest.approx(sum(range(11, 21)) / 200)
    assert records.reward(last=1) == 1.0
    assert records.reward(last=100) == pytest.approx(10.5 / 20)


def test_the_oldest_group_ever_trained_on_is_remembered():
    records = Records()
    assert records.max_staleness == 0
    for step, ages in ((5, (0, 1)), (6, (3, 0)), (7, (0,)), (8, ())):
        records.add(record(step, ages=ages))
    assert records.max_staleness == 3


class Clock:
    def __init__(self, monkeypatch):
        self.now = 1_000.0
        monkeypatch.setattr(metrics.time, "monotonic", lambda: self.now)


def test_a_rate_is_that_of_the_last_seconds_and_falls_to_nothing(monkeypatch):
    clock = Clock(monkeypatch)
    rate = Rate(seconds=5.0)
    assert rate.per_second() == 0.0
    for _ in range(40):
        rate.add(10)
        clock.now += 0.25
    assert rate.per_second() == pytest.approx(40, rel=0.1)
    clock.now += 4.0
    assert 0 < rate.per_second() < 40
    clock.now += 2.0
    assert rate.per_second() == 0.0


def test_a_first_burst_is_no_endless_rate(monkeypatch):
    Clock(monkeypatch)
    rate = Rate()
    rate.add(100)
    assert rate.per_second() == 400


def test_a_rate_of_very_many_events_is_still_right_and_bounded(monkeypatch):
    clock = Clock(monkeypatch)
    rate = Rate(seconds=5.0)
    for _ in range(50_000):
        rate.add(1)
        clock.now += 0.0001
    assert rate.per_second() == pytest.approx(10_000, rel=0.05)
    assert len(rate._events) <= 4_096
