"""The records of a run on disk, for people and plots; and where else they may go."""

from __future__ import annotations

import dataclasses
import json
import sqlite3
import sys
import types

import pytest

from echo_node.errors import ConfigError, StoreError
from echo_node.telemetry import exporters
from echo_node.telemetry.exporters import figures, open_writer
from echo_node.telemetry.metrics import Records
from echo_node.telemetry.step_db import StepDb, read_records
from tests.telemetry.test_metrics import record


def numbered(number, **changes):
    return record(number, number=number, **changes)


def test_what_is_written_is_read_back_figure_for_figure(tmp_path):
    steps = [numbered(n, ages=(0, n % 3), reward=n / 7, dropped={"stale": n, "full": 1}) for n in range(1, 5)]
    file = StepDb(tmp_path / "records.sqlite")
    for step in steps:
        file.write(step)
        assert read_records(tmp_path / "records.sqlite")[-1] == step, "others may read meanwhile"
    file.close()
    assert read_records(tmp_path / "records.sqlite") == steps


def test_a_file_that_is_not_there_or_was_only_just_begun_has_no_steps(tmp_path):
    assert read_records(tmp_path / "none.sqlite") == []
    (tmp_path / "begun.sqlite").touch()
    assert read_records(tmp_path / "begun.sqlite") == []


def test_a_step_that_is_told_again_after_a_crash_replaces_what_was_there(tmp_path):
    file = StepDb(tmp_path / "r")
    file.write(numbered(1, ages=(0, 1, 2)))
    file.write(numbered(1, ages=(0,), reward=0.75))
    file.close()
    (only,) = read_records(tmp_path / "r")
    assert (only.reward, len(only.groups)) == (0.75, 1)


def test_plain_sql_answers_who_contributed_and_how_stale_groups_were(tmp_path):
    file = StepDb(tmp_path / "r")
    for n in range(1, 4):
        file.write(numbered(n, ages=(0, 2)))
    file.close()
    with sqlite3.connect(tmp_path / "r") as asked:
        assert asked.execute("SELECT groups, steps FROM samplers").fetchall() == [(6, 3)]
        ages = [json.loads(row[0]) for row in asked.execute("SELECT staleness FROM steps")]
    asked.close()
    assert ages == [{"0": 1, "2": 1}] * 3


def test_another_programs_file_is_left_alone(tmp_path):
    with sqlite3.connect(tmp_path / "other") as other:
        other.execute("CREATE TABLE theirs (x)")
    other.close()
    with pytest.raises(StoreError, match="another program"):
        StepDb(tmp_path / "other")
    (tmp_path / "text").write_text("not a database, but long enough to look like one" * 50)
    with pytest.raises(StoreError, match="records"):
        StepDb(tmp_path / "text")


def test_records_go_to_every_writer_while_it_is_there_and_earlier_ones_are_recalled_once(tmp_path):
    first = Records()
    with first.writing_to(StepDb(tmp_path / "r")):
        for n in (1, 2):
            first.add(numbered(n))
    first.add(numbered(3))
    second = Records()
    second.recall(read_records(tmp_path / "r"))
    second.recall(read_records(tmp_path / "r"))
    assert [step.number for step in second.steps] == [1, 2]
    second.add(numbered(3))
    assert second.steps == first.steps


# Elsewhere


def test_the_figures_of_a_step_are_flat_numbers():
    exported = figures(numbered(3, ages=(0, 0, 2), dropped={"full": 4}))
    assert exported["train/reward"] == 0.5
    assert exported["staleness/0"] == pytest.approx(2 / 3)
    assert exported["staleness/mean"] == pytest.approx(2 / 3)
    assert exported["dropped/full"] == 4.0
    assert exported["samplers"] == 1.0
    assert all(type(value) is float for value in exported.values())


class Diary(types.ModuleType):
    """Stands for trackio or wandb, which have one interface."""

    def __init__(self, name):
        super().__init__(name)
        self.calls = []

    def init(self, **options):
        self.calls.append(("init", options["project"], options["name"]))
        return self

    def log(self, exported, step):
        self.calls.append(("log", step, exported["train/reward"]))

    def finish(self):
        self.calls.append(("finish",))


@pytest.mark.parametrize("name", ["trackio", "wandb"])
def test_a_tracker_that_is_installed_gets_every_step(name, tmp_path, monkeypatch):
    diary = Diary(name)
    monkeypatch.setitem(sys.modules, name, diary)
    records = Records()
    with records.writing_to(open_writer(name, "run", tmp_path)):
        records.add(numbered(1, reward=0.25))
        records.add(numbered(2, reward=0.5))
    assert diary.calls == [("init", "echo-node", "run"), ("log", 1, 0.25), ("log", 2, 0.5), ("finish",)]


def test_tensorboard_gets_a_curve_for_each_figure(tmp_path, monkeypatch):
    curves = {}

    class SummaryWriter:
        def __init__(self, log_dir):
            curves["folder"] = log_dir

        def add_scalar(self, name, value, step):
            curves.setdefault(name, []).append((step, value))

        def close(self):
            curves["closed"] = True

    module = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = SummaryWriter
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    writer = open_writer("tensorboard", "run", tmp_path)
    for n in (1, 2):
        writer.write(numbered(n, reward=n / 2))
    writer.close()
    assert curves["train/reward"] == [(1, 0.5), (2, 1.0)]
    assert (curves["folder"], curves["closed"]) == (str(tmp_path / "tensorboard" / "run"), True)


@pytest.mark.parametrize("name", exporters.WRITERS)
def test_what_is_not_installed_is_said_in_one_sentence(name, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard" if name == "tensorboard" else name, None)
    with pytest.raises(ConfigError, match=f"{name} is not installed") as caught:
        open_writer(name, "run", tmp_path)
    assert caught.value.advice == f"pip install {name}"


def test_a_writer_that_nobody_knows_is_refused_with_the_names_of_those_that_are_known(tmp_path):
    with pytest.raises(ConfigError) as caught:
        open_writer("excel", "run", tmp_path)
    assert "tensorboard, trackio, wandb" in caught.value.advice


def test_a_writer_that_fails_says_so():
    class Broken:
        def write(self, _record):
            raise StoreError("no space")

        def close(self):
            return

    records = Records(writers=[Broken()])
    with pytest.raises(StoreError):
        records.add(numbered(1))
    assert dataclasses.asdict(records.steps[0])["number"] == 1
