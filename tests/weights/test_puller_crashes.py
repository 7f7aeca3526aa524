"""A process that pulls and is killed leaves the old version or the new one, and goes on from what
is on disk.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.weights.crash_points import ROOT


def kill(folder, kills, seed):
    command = [
        sys.executable,
        "-m",
        "tests.weights.pull_crash_points",
        str(folder / "store"),
        str(kills),
        str(seed),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"{kills} kills" in done.stdout


def test_a_process_that_is_killed_while_it_pulls_leaves_a_whole_version(tmp_path):
    kill(tmp_path, 30, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_process_that_is_killed_two_hundred_times_while_it_pulls_leaves_a_whole_version(tmp_path):
    kill(tmp_path, 200, seed=2)


def most_memory(folder, megabytes) -> dict:
    publish = [sys.executable, "-m", "tests.weights.large", "publish", str(folder), str(megabytes)]
    subprocess.run(publish, cwd=ROOT, capture_output=True, text=True, check=True)
    pull = [sys.executable, "-m", "tests.weights.large_pull", str(folder), str(megabytes)]
    done = subprocess.run(pull, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    sys.stdout.write(f"{megabytes} MiB pulled with at most {told['most'] / 1e6:.0f} MB resident, {told}\n")
    return told


@pytest.mark.timeout(180)
def test_a_state_is_pulled_without_being_held_in_memory(tmp_path):
    assert most_memory(tmp_path, 256)["most"] < 600e6


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_gigabytes_are_pulled_and_applied_in_less_than_six_hundred_megabytes(tmp_path):
    assert most_memory(tmp_path, 2048)["most"] < 600e6
