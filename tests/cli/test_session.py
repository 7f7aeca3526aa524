"""A node within what a person allows it, as a process on loopback."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request

import pytest

from echo_node.runs.spec import RunSpec, new_run, write_run
from echo_node.storage.state_dir import prepared
from protocol import Identity

TRAINER = Identity(b"t" * 32)


@pytest.fixture
def sampler(tmp_path):
    """A sampler of a run that nobody leads, with these words more."""
    told = RunSpec(name="a test", trainers=[TRAINER.peer_id], engines=["torch/f32"])
    write_run(tmp_path / "run", new_run(told, TRAINER))
    started = []

    def start(*words):
        command = [
            sys.executable,
            "-m",
            "echo_node",
            "join",
            "--role",
            "sampler",
            str(tmp_path / "run"),
            "--json",
        ]
        places = ("--state", str(tmp_path / "state"), "--listen", "/ip4/127.0.0.1/tcp/0", *words)
        started.append(subprocess.Popen([*command, *places], stdout=subprocess.PIPE, text=True))
        return started[-1]

    yield start
    for process in started:
        process.terminate()
        process.wait(60)
        process.stdout.close()


def told(process, event):
    return next(found for line in process.stdout if (found := json.loads(line))["event"] == event)


def test_a_state_that_takes_more_than_is_allowed_pauses_the_node_and_it_says_what_it_works_with(
    sampler, tmp_path
):
    place = prepared(tmp_path / "state")
    (place.path / "ballast").write_bytes(b"x" * 3_000_000)
    assert place.size() >= 3_000_000
    process = sampler("--max-disk", "1MB", "--slots", "4", "--threads", "1")
    told(process, "listening")
    first, second = (json.loads(process.stdout.readline()) for _ in range(2))
    engine, paused = sorted((first, second), key=lambda each: each["event"])
    assert (engine["engine"], engine["threads"], engine["slots"]) == ("torch/f32", 1, 4)
    assert paused["event"] == "paused"


def test_the_token_of_the_page_is_for_the_terminal_alone(sampler):
    process = sampler("--page", "0", "--page-buttons", "--threads", "1")
    url = told(process, "page")["url"]
    told(process, "listening")
    with urllib.request.urlopen(f"{url}api/snapshot") as answer:  # noqa: S310 - the page of the node just started
        shown = answer.read().decode()
    assert "page at http" in shown
    assert "token=" not in shown
