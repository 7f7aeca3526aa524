"""Every target on its seeds and some mutations, without a fuzzer; and that targets detect bugs."""

from __future__ import annotations

import importlib
import json
import logging
import subprocess
import sys
import tracemalloc
from functools import partial
from pathlib import Path

import pytest
import trio

from tests.fuzz.decoders import Mutator
from tests.fuzz.loops import bare, looped
from tests.fuzz.target import BugError, Target, plain
from tests.fuzz.targets import everywhere
from tests.fuzz.wires import Wire

TARGETS = {name: target for name, (_, target) in everywhere().items()}
CHANGES = 40
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", TARGETS)
def test_it_takes_what_is_right_refuses_what_is_not_and_brings_out_nothing_but_errors_of_ours(name):
    target = TARGETS[name]
    seeds = target.seeds()
    some = seeds[:: max(1, len(seeds) // CHANGES)]
    mutator = Mutator(20_261_116, {name: some})
    with target.open() as feed:
        taken = [feed(seed) for seed in seeds]
        assert any(taken) is target.takes
        for _ in range(CHANGES):
            start = mutator.rng.choice(some)
            feed(start[: target.prefix] + mutator.changed(start[target.prefix :]))
        tracemalloc.start()
        try:
            for seed in some[:8]:
                tracemalloc.reset_peak()
                before = tracemalloc.get_traced_memory()[0]
                feed(seed)
                peak = tracemalloc.get_traced_memory()[1] - before
                assert peak <= target.memory + 70 * len(seed), f"{peak} bytes for {len(seed)}"
        finally:
            tracemalloc.stop()


@pytest.mark.parametrize("name", TARGETS)
def test_the_code_that_it_says_it_feeds_is_there(name):
    resolve(TARGETS[name].entry)


def resolve(dotted: str) -> object:
    """What a dotted name stands for: a module, and then whatever is in it."""
    parts = dotted.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:]:
            found = getattr(found, part)
        return found
    raise LookupError(dotted)


# What a target sees


def made(feed, **more) -> Target:
    return Target(name="made", entry="", opener=plain(feed), seeds=lambda: [b"x"], **more)


def test_an_error_of_somebody_else_is_let_out():
    def feed(data):
        return {}[data]

    with made(feed).open() as fed, pytest.raises(KeyError):
        fed(b"x")


def test_an_error_that_the_caller_expects_is_a_refusal():
    def feed(data):
        return {}[data]

    with made(feed, also=(KeyError,)).open() as fed:
        assert fed(b"x") is False


def test_a_bug_that_is_contained_and_logged_is_a_bug():
    def feed(_data):
        logging.getLogger("echo_node.somewhere").error("contained")

    with made(feed).open() as fed, pytest.raises(BugError, match="contained"):
        fed(b"x")


def test_what_waits_for_ever_is_a_bug_and_what_has_a_deadline_is_not():
    async def waits(data):
        with trio.move_on_after(3_600) if data == b"deadline" else trio.CancelScope():
            await trio.sleep_forever()

    target = Target(name="made", entry="", opener=partial(looped, bare(waits)), seeds=lambda: [b"deadline"])
    with target.open() as fed:
        assert fed(b"deadline")
        with pytest.raises(BugError, match="for ever"):
            fed(b"x")


def test_a_wire_gives_what_it_was_given_and_then_falls_silent_or_ends():
    async def read(data):
        wire, found = Wire(data), b""
        try:
            with trio.move_on_after(5):
                while True:
                    found += await wire.read(2)
        except EOFError:
            return found, "ended"
        return found, "silent"

    for how, end in ((0, "ended"), (1, "silent"), (2, "ended"), (5, "silent")):
        assert trio.run(
            read, bytes([how]) + b"some words", clock=trio.testing.MockClock(autojump_threshold=0)
        ) == (
            b"some words",
            end,
        )


# The command


@pytest.mark.timeout(300)
def test_the_command_fuzzes_a_target_and_says_in_json_what_came_of_it(tmp_path):
    command = [sys.executable, "-m", "tests.fuzz", "seed-text", "--seconds", "1", "--place", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["found"] == told["failed"] == []
    assert told["by_target"]["seed-text"]["executions"] > 100
    assert "seed-text" in done.stdout.splitlines()[-2]


def test_an_input_is_repeated_by_name(tmp_path):
    file = tmp_path / "input"
    file.write_bytes(b"/dnsaddr/seed.example")
    command = [sys.executable, "-m", "tests.fuzz", "seed-text", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.stdout.strip() == f"{file}: taken", done.stderr
