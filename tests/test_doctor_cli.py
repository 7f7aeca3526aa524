"""`echo-node doctor` says what is there, what is missing and what to do."""

from __future__ import annotations

import json
import subprocess
import sys


def doctor(*words):
    command = [sys.executable, "-m", "echo_node.cli", "doctor", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)


def test_every_room_is_looked_at_and_the_jail_is_measured():
    done = doctor("--json")
    points = [json.loads(line) for line in done.stdout.splitlines()]
    assert {point["room"] for point in points} == {"machine", "engines", "contracts", "jail"}
    assert done.returncode == int(any(point["fine"] is False for point in points))
    assert {"torch/f32", "llama/f16", "digits-reverse 1", "seccomp"} <= {point["what"] for point in points}
    for point in points:
        if point["room"] == "jail":
            assert point["says"] == "active" if point["fine"] else point["says"] not in {"", "active"}


def test_people_get_a_table_and_a_closing_line():
    done = doctor()
    assert "Nothing is wrong" in done.stdout or "are wrong" in done.stdout
    assert not done.stderr
