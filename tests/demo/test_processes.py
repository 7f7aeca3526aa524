"""The demo's processes: none outlives it, and a failure is reported. And the long demos."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from echo_node.cli import demo as command

ECHO_NODE = str(Path(sys.executable).parent / "echo-node")
pytestmark = pytest.mark.timeout(300)  # a swarm of processes, on a machine that does other things too
ENOUGH = 0.8
THREE_MINUTES = 180.0


@contextmanager
def a_demo(folder, *words):
    """A demo that has started all its nodes, their processes by name, and their folders."""
    process = subprocess.Popen(
        [ECHO_NODE, "demo", "--out", str(folder / "out"), *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(folder)},
    )
    try:
        yield process, nodes_of(process, folder)
    finally:
        process.kill()
        process.communicate()


def nodes_of(process, folder):
    """Every node by its name, once each has started: contracts are in their jails by then."""
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline:
        told = {file.stem for file in folder.glob("echo-demo-*/*.jsonl") if file.stat().st_size}
        if {"seed", "trainer", "verifier", "sampler-1", "sampler-2"} <= told:
            break
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)  # the nodes write files; there is no event to wait for
    by_name = {}
    for node in psutil.Process(process.pid).children():
        words = node.cmdline()
        by_name[Path(words[words.index("--state") + 1]).name] = node
    return by_name


def everybody(process, nodes):
    return [
        process,
        *nodes.values(),
        *(each for node in nodes.values() for each in node.children(recursive=True)),
    ]


def all_end(processes):
    return not psutil.wait_procs(processes, timeout=10)[1]


def test_a_node_that_dies_is_told_in_words_and_takes_the_others_with_it(tmp_path):
    with a_demo(tmp_path, "--keep") as (demo, nodes):
        alive = everybody(psutil.Process(demo.pid), nodes)
        nodes["verifier"].kill()
        out, err = demo.communicate(timeout=60)
        assert demo.returncode == 1
        assert "The verifier failed: it was ended by SIGKILL." in out
        assert "Traceback" not in out + err
        assert all_end(alive)
    (kept,) = tmp_path.glob("echo-demo-*")
    assert f"are in {kept}." in out
    words = [ECHO_NODE, "run", "show", str(kept / "run")]
    shown = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert shown.returncode == 0, shown.stderr
    assert "reverse five digits" in shown.stdout, "what was kept is a run that others could join"


def test_no_node_outlives_a_demo_that_is_killed(tmp_path):
    with a_demo(tmp_path) as (demo, nodes):
        alive = everybody(psutil.Process(demo.pid), nodes)
        assert len(alive) > 6, "nodes have processes of their own"
        demo.kill()
        demo.wait(timeout=10)
        assert all_end(alive[1:])


def test_a_second_ctrl_c_ends_every_node_at_once(tmp_path):
    with a_demo(tmp_path) as (demo, nodes):
        alive = everybody(psutil.Process(demo.pid), nodes)
        nodes["seed"].suspend()  # it cannot end in order now
        demo.send_signal(signal.SIGINT)
        nodes["verifier"].wait(timeout=20)  # so the first one was heard
        demo.send_signal(signal.SIGINT)
        out, err = demo.communicate(timeout=20)
        assert demo.returncode == 130
        assert "Stopped." in out
        assert "Traceback" not in out + err
        assert all_end(alive)
    assert not list(tmp_path.glob("echo-demo-*"))


def test_ctrl_c_while_the_folder_goes_is_heard_once_it_is_gone(monkeypatch):
    remove = shutil.rmtree

    def interrupted(place, **more):
        signal.raise_signal(signal.SIGINT)
        remove(place, **more)

    monkeypatch.setattr(shutil, "rmtree", interrupted)
    with pytest.raises(KeyboardInterrupt), command._place(keep=False) as place:
        (place / "file").write_text("something")
    assert not place.exists()


def whole(folder, *words):
    """A whole demo: its line of JSON, its steps, and what it said."""
    done = subprocess.run(
        [ECHO_NODE, "demo", "--json", "--out", str(folder), *words],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    print(told)  # noqa: T201 - shown with -s
    return told, [json.loads(text) for text in (folder / "steps.jsonl").read_text().splitlines()], done.stderr


@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("mode", ["async", "sequential"])
def test_the_reward_passes_four_fifths_within_three_minutes_of_the_start(mode, tmp_path):
    told, steps, _ = whole(tmp_path, "--mode", mode)
    assert told["final_reward"] > ENOUGH
    assert told["max_staleness_trained"] <= (4 if mode == "async" else 0)
    smooth = [sum(step["reward"] for step in steps[at - 9 : at + 1]) / 10 for at in range(9, len(steps))]
    first = next(at for at, mean in enumerate(smooth, 9) if mean > ENOUGH)
    left = steps[-1]["at_seconds"] - steps[first]["at_seconds"]
    passed = told["seconds"] - left
    print(f"{mode}: above {ENOUGH} at step {first + 1}, {passed:.0f} s after the start")  # noqa: T201 - with -s
    assert passed < THREE_MINUTES, "on two cores that do nothing else"


@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("seed", ["0", "1", "2"])
@pytest.mark.parametrize("mode", ["async", "sequential"])
def test_an_environment_of_several_turns_is_learnt(mode, seed, tmp_path):
    told, steps, said = whole(tmp_path, "--task", "guess-number", "--mode", mode, "--seed", seed)
    halving = 0.1 * 1 + 0.2 * 0.75 + 0.4 * 0.5 + 0.3 * 0.25  # what an optimal player gets
    assert sum(step["reward"] for step in steps[:5]) / 5 < 0.7 * halving
    assert told["final_reward"] > 0.8 * halving
    assert told["honest_muted"] == 0, said
    assert told["seconds"] < 240, "on two cores that do nothing else"


@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("mode", ["async", "sequential"])
def test_cheats_are_caught_nobody_else_is_and_the_swarm_learns(mode, tmp_path):
    told, steps, said = whole(tmp_path, "--mode", mode, "--hostile", "--steps", "100")
    assert (told["caught"], told["cheats"], told["honest_muted"]) == (2, 2, 0), said
    assert said.count("Caught: cheat-") == 2
    first, last = (sum(step["reward"] for step in part) / 10 for part in (steps[:10], steps[-10:]))
    assert last > first + 0.2
