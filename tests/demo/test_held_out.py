"""The demo on a pretrained model: its recipe, its answers before and after, and what is refused."""

import dataclasses
import io
import json

import pytest
from rich.console import Console

from echo_node.config import DemoConfig, load_config
from echo_node.demo.held_out import Answer, HeldOut, first_answers
from echo_node.demo.node_status import NodeStatus
from echo_node.demo.processes import SwarmDemo, check_together
from echo_node.demo.summary import outcome, summary
from echo_node.demo.view import line, panel
from echo_node.engine.base import EngineStoppedError
from echo_node.errors import ConfigError
from echo_node.telemetry.metrics import Records
from tests.demo.test_node_status import HONEST, a_step
from tests.demo.test_processes import whole

BEFORE = HeldOut(0, 0, (Answer("larger of 4 and 61:", "4", 0.0), Answer("larger of 15 and 86:", "86", 1.0)))
AFTER = HeldOut(9, 9, (Answer("larger of 4 and 61:", "61", 1.0), Answer("larger of 15 and 86:", "86", 1.0)))


def test_the_recipe_of_smollm2_gives_way_to_what_is_set():
    plain = load_config(DemoConfig, model="smollm2")
    assert (plain.steps, plain.batch_groups, plain.algorithm["learning_rate"]) == (60, 8, 5e-6)
    changed = load_config(
        DemoConfig, None, ["model=smollm2", "algorithm.learning_rate=1e-5", "batch_groups=4"], steps=3
    )
    assert (changed.steps, changed.batch_groups) == (3, 4)
    assert changed.algorithm == {"learning_rate": 1e-5, "warm_up": 0, "entropy": 0.0}
    assert load_config(DemoConfig).steps == 220, "the embedded model keeps its own"


def test_another_model_or_an_algorithm_that_is_no_table_is_refused_in_words():
    with pytest.raises(ConfigError, match="model"):
        load_config(DemoConfig, model="gpt-7")
    with pytest.raises(ConfigError, match="algorithm is a table"):
        load_config(DemoConfig, model="smollm2", algorithm=7)


@pytest.mark.parametrize("flag", ["hostile", "in_memory"])
def test_flags_of_the_embedded_model_are_refused_with_smollm2(flag):
    with pytest.raises(ConfigError, match="go with the embedded model, not with smollm2"):
        check_together(load_config(DemoConfig, model="smollm2", **{flag: True}))


def test_terminal_summary_and_json_tell_what_the_model_says_at_first_and_at_the_end(tmp_path):
    demo = SwarmDemo(load_config(DemoConfig, model="smollm2"), Records(), tmp_path)
    demo.model_bytes = 269_000_000
    demo.first = BEFORE
    assert "held out 50% right; it says: larger of 4 and 61: 4; larger of 15 and 86: 86" in line(demo)
    demo.records.add(a_step(1, HONEST))
    shown = io.StringIO()
    Console(file=shown, width=80).print(panel(demo))
    assert "50% of 2 prompts right at first " in shown.getvalue()
    assert "at first it said:" in shown.getvalue()
    assert "larger of 4 and 61: 4" in shown.getvalue()
    trainer = NodeStatus("trainer", "trainer", b"", "")
    trainer.update({"event": "progress", "evaluation": {"curve": [[0, 0.4], [10, 0.76]]}})
    demo.members.append(trainer)
    Console(file=shown, width=80).print(panel(demo))
    assert "50% of 2 prompts right at first, 76% at step 10" in shown.getvalue()
    assert "held out 76% at step 10" in line(demo)
    assert "held_out_after" not in outcome(demo)
    demo.last = AFTER
    told = summary(demo, None)
    assert "taught the model to name the larger of two numbers" in told
    assert "On 2 held-out prompts it was right 50% of the time at first, and 100% at the end." in told
    (first,) = [each for each in told.splitlines() if "larger of 4 and 61:" in each]
    assert first.split("at first")[1].split() == ["'4'", "(wrong)", "at", "the", "end", "'61'"]
    assert (outcome(demo)["held_out_before"], outcome(demo)["held_out_after"]) == (0.5, 1.0)
    assert "--hostile" not in told, "it is refused with this model"
    assert "demo --model smollm2 --mode sequential" in told


def test_a_slow_pace_is_in_seconds_a_step(tmp_path):
    demo = SwarmDemo(load_config(DemoConfig, model="smollm2"), Records(), tmp_path)
    demo.model_bytes = 269_000_000
    for number, at in enumerate((0.0, 20.0, 50.0), 1):
        demo.records.add(dataclasses.replace(a_step(number, HONEST), at_seconds=at))
    shown = io.StringIO()
    Console(file=shown, width=80).print(panel(demo))
    assert "25.0 s a step" in shown.getvalue()


def test_the_first_answers_are_the_models_own_and_the_same_each_time(tmp_path):
    demo = SwarmDemo(DemoConfig(), Records(), tmp_path)
    demo.prepare()
    found = first_answers(tmp_path / "run", 40, "torch/f32", lambda: False)
    assert 0.05 < found.accuracy < 0.7, "warm-started: it is right about 30 % of the time"
    for each in found.answers:
        asked = each.question.removeprefix("r").removesuffix("=")
        assert (each.reward == 1.0) == (each.text == asked[::-1])
    assert first_answers(tmp_path / "run", 40, "torch/f32", lambda: False) == found


def test_measuring_stops_when_the_demo_is_stopped(tmp_path):
    SwarmDemo(DemoConfig(), Records(), tmp_path).prepare()
    with pytest.raises(EngineStoppedError):
        first_answers(tmp_path / "run", 40, "torch/f32", lambda: True)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_smollm2_passes_four_fifths_of_held_out_prompts_within_ten_minutes(tmp_path):
    told, steps, said = whole(tmp_path, "--model", "smollm2")
    assert told["held_out_before"] < 0.5
    assert told["held_out_after"] > 0.8
    assert told["seconds"] < 600, "on two cores that do nothing else"
    assert "honest" in said
    assert not any(json.dumps(step["dropped"]).count("dishonest") for step in steps)
