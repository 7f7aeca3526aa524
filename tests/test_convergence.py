"""The convergence benchmark in small: a few steps per side, and numbers read off rightly."""

import json

import numpy as np
import pytest

from benchmarks.convergence import Results, main, train
from benchmarks.convergence_ours import CoLocated
from benchmarks.convergence_report import bounds_lines, figures, interval, steps_to
from benchmarks.convergence_task import HeldOut, Trained
from echo_node.contract import prompt_of
from echo_node.engine.base import SlotRequest, generate_groups
from protocol import derive

STEPS = 3


@pytest.fixture(scope="module")
def start():
    """The held-out reward before any step."""
    return train("co-located", 0, 0).curve[0][1]


def test_the_held_out_reward_is_what_draws_of_the_same_prompts_score_in_the_mean(start):
    ours = CoLocated(seed=0)
    prompts, group = 128, 8
    ours.load()
    asked = [prompt_of(ours.run.contract, derive("held out", n.to_bytes(8))) for n in range(prompts)]
    requests = [
        SlotRequest(ours.run.tokenizer.encode(prompt.text), bytes([n]) * 32, group, ours.run.limits)
        for n, prompt in enumerate(asked)
    ]
    drawn = generate_groups(ours.engine, requests)
    scores = [
        [score.value for score in ours.run.scores(prompt, [draw.ids for draw in draws])]
        for prompt, draws in zip(asked, drawn, strict=True)
    ]
    exact = HeldOut(ours.run, prompts).reward(ours.weights())
    error = np.std(scores) / (prompts * group) ** 0.5
    assert abs(np.mean(scores) - exact) < 4 * error
    assert 0.2 < start < 0.4


def test_our_own_step_learns_from_its_own_draws(start):
    run = train("co-located", 0, STEPS)
    assert [step for step, _ in run.curve] == [0, STEPS]
    assert run.curve[0][1] == start
    assert run.curve[-1][1] != start


def test_trl_starts_from_the_same_weights_and_learns(start):
    pytest.importorskip("trl", reason="trl is an extra of its own")
    run = train("TRL", 0, STEPS)
    assert [step for step, _ in run.curve] == [0, STEPS]
    assert run.curve[0][1] == pytest.approx(start, abs=1e-6)
    assert run.curve[-1][1] != run.curve[0][1]


def test_a_sequential_swarm_starts_there_too_and_trains_on_nothing_old(start):
    run = train("sequential", 0, STEPS)
    assert run.curve[0] == (0, pytest.approx(start, abs=1e-6))
    assert run.curve[-1][0] == STEPS
    assert set(run.ages) == {0}


def test_at_a_bound_of_two_most_groups_are_two_steps_old_and_none_is_older():
    run = train("async S=2", 0, 6)
    assert max(run.ages) == 2
    assert run.ages[2] > sum(run.ages.values()) / 2


def trained(side, seed, *rewards):
    return Trained(side, seed, 20, [(10 * n, reward) for n, reward in enumerate(rewards)], {0: 1}, 1.0)


def test_steps_to_a_reward_are_read_between_two_points():
    assert steps_to([(0, 0.3), (10, 0.7), (20, 0.9)]) == pytest.approx(15.0)
    assert steps_to([(0, 0.85), (10, 0.9)]) == 0.0
    assert steps_to([(0, 0.3), (20, 0.7)]) == 20.0, "never there: as if it took the whole run"


def test_the_line_of_numbers_compares_medians_and_says_what_was_not_measured():
    sides = {
        "TRL": [trained("TRL", seed, 0.3, 0.8, 0.9) for seed in range(3)],
        "sequential": [trained("sequential", seed, 0.3, 0.7, 0.9) for seed in range(3)],
        "async S=4": [trained("async S=4", seed, 0.3, 0.6, 0.86) for seed in range(3)],
    }
    told = figures(sides, {"step_time_over_trl": 0.5})
    assert told["sequential_steps_over_trl"] == pytest.approx(1.5)
    assert told["async_s8_steps_over_trl"] is None
    assert told["final_reward_gap"] == pytest.approx(0.08, abs=1e-4)
    said = "\n".join(bounds_lines(told))
    assert "sequential_steps_over_trl: 1.5, at most 1.1: MISSED" in said
    assert "step_time_over_trl: 0.5, at most 0.8: holds" in said
    assert "trainer_busy_async: not measured" in said


def test_the_interval_of_a_median_holds_it_and_lies_within_the_values():
    low, high = interval([1.0, 2.0, 3.0, 4.0, 100.0])
    assert 1.0 <= low <= 3.0 <= high <= 100.0


def test_a_benchmark_that_was_broken_off_goes_on_with_what_is_missing(tmp_path):
    file = tmp_path / "results.jsonl"
    results = Results(file)
    results.add(trained("TRL", 0, 0.3, 0.8))
    file.write_text(file.read_text() + '{"side": "TRL", "se')
    again = Results(file)
    assert again.missing(["TRL", "sequential"], 2, 20) == [("sequential", 0), ("TRL", 1), ("sequential", 1)]
    again.add(trained("TRL", 1, 0.3, 0.8))
    assert [run.seed for run in Results(file).runs] == [0, 1]
    assert not Results(file, fresh=True).runs


def test_the_command_ends_with_a_picture_and_a_line_of_json(tmp_path, capsys):
    few = ["--steps", "1", "--sides", "co-located", "--processes", "1"]
    main(["steps", "--quick", *few, "--folder", str(tmp_path)])
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told["sequential_steps_over_trl"] is None
    assert (tmp_path / "convergence-quick.png").read_bytes().startswith(b"\x89PNG")
    assert len(Results(tmp_path / "convergence-quick.jsonl").runs) == 2


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_times_come_out_as_ratios(tmp_path, capsys):
    pytest.importorskip("trl", reason="trl is an extra of its own")
    main(["times", "--quick", "--folder", str(tmp_path)])
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told["step_time_over_trl"] > 0
    assert 0 < told["trainer_busy_async"] <= 1
    assert told["async_wall_over_sequential"] > 0
