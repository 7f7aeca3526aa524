"""The examples run as they stand."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_one_process_learns_in_about_forty_lines():
    path = EXAMPLES / "one_process.py"
    code = [
        line
        for line in path.read_text().splitlines()
        if line.strip() and not line.startswith(("import", "from"))
    ]
    assert len(code) <= 40
    done = subprocess.run(
        [sys.executable, str(path), "12"], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    first, last = map(
        float, re.search(r"reward ([\d.]+) at first, ([\d.]+) after 12 steps", done.stdout).groups()
    )
    assert 0.1 < first < 0.6
    assert 0.1 < last < 0.9


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_real_model_takes_steps_on_a_real_task_and_only_deltas_go_out():
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "smollm2.py"), "2"],
        capture_output=True,
        text=True,
        timeout=1400,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["steps"] == 2
    assert told["real_delta_ratio"] > 50
    assert 0 <= told["reward"] <= 1
