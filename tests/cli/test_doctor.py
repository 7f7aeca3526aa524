"""`echo-node doctor` says what is there, what is missing and what to do."""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
import sys
import time

import pytest
from typer.testing import CliRunner

from echo_node.cli.main import app
from echo_node.doctor import clock, connectivity, libraries, machine, ports, state, toolchain
from echo_node.errors import ConfigError
from echo_node.storage import state_dir
from protocol import Identity

ROOMS = {
    "machine",
    "clock",
    "building",
    "libraries",
    "ports",
    "disk",
    "state",
    "engines",
    "contracts",
    "jail",
    "network",
}
NOBODY = f"/ip4/127.0.0.1/tcp/9/p2p/{Identity(b'n' * 32).peer_id}"


def doctor(*words, **environment):
    command = [sys.executable, "-m", "echo_node", "doctor", *map(str, words)]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=100, env=os.environ | environment
    )


def named(points, what):
    return next(point for point in points if point.what == what)


def test_every_room_is_looked_at_and_the_jail_is_measured(tmp_path):
    done = doctor("--json", "--state", tmp_path / "none")
    points = [json.loads(line) for line in done.stdout.splitlines()]
    assert {point["room"] for point in points} == ROOMS
    assert done.returncode == int(any(point["fine"] is False for point in points))
    assert {"torch/f32", "llama/f16", "digits-reverse 1", "seccomp"} <= {point["what"] for point in points}
    for point in points:
        assert bool(point["fix"]) == (point["fine"] is not True), "what is not fine says how to mend it"
        if point["room"] == "jail":
            assert point["says"] == "active" if point["fine"] else point["says"] not in {"", "active"}
    assert not any(tmp_path.iterdir()), "it looks and makes nothing"


def test_people_get_a_table_and_a_closing_line(tmp_path):
    done = doctor("--state", tmp_path / "none")
    assert "Nothing is wrong" in done.stdout or "wrong." in done.stdout
    assert "give one: echo-node doctor --seed" in done.stdout
    assert not done.stderr


def test_a_terminal_without_our_signs_gets_others(tmp_path):
    done = doctor("--state", tmp_path / "none", PYTHONIOENCODING="ascii")
    assert "wrong" in done.stdout.splitlines()[-1]
    assert "+ | machine" in done.stdout
    assert not done.stderr


def test_a_state_that_cannot_be_looked_at_is_one_of_the_findings(tmp_path):
    done = doctor("--json", "--state", tmp_path / ("x" * 300))
    points = [json.loads(line) for line in done.stdout.splitlines()]
    assert (done.returncode, done.stderr) == (1, "")
    assert "File name too long" in next(point["says"] for point in points if point["what"] == "folder")


def test_a_seed_that_answers_tells_how_this_machine_is_reached(tmp_path):
    words = (
        "--role",
        "bootstrap",
        "--json",
        "--state",
        tmp_path / "seed",
        "--listen",
        "/ip4/127.0.0.1/tcp/0",
    )
    command = [sys.executable, "-m", "echo_node", "join", *map(str, words)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as seed:
        try:
            address = [json.loads(seed.stdout.readline()) for _ in range(2)][1]["addresses"][0]
            answered, reach = connectivity.look([address], seconds=60)
        finally:
            seed.terminate()
            seed.communicate(timeout=60)
    assert (answered.what, answered.fine, answered.says) == (address, True, "answered")
    assert reach.what == "reach"
    assert "dial this machine" in reach.says


def test_a_seed_that_is_silent_is_named_with_what_to_do():
    silent, reach = connectivity.look([NOBODY], seconds=1)
    assert (silent.what, silent.fine, silent.says) == (NOBODY, False, "did not answer")
    assert "firewall" in silent.fix
    assert reach.fine is False


def test_a_seed_that_cannot_be_read_is_the_persons_mistake():
    done = CliRunner().invoke(app, ["doctor", "--seed", "over there"])
    assert isinstance(done.exception, ConfigError)
    assert "over there" in str(done.exception)


def test_a_port_in_use_is_seen_and_left_alone():
    assert not ports.problem_of("127.0.0.1", 0)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert "in use" in ports.problem_of("127.0.0.1", taken.getsockname()[1])


def test_libraries_are_held_against_their_pins():
    points = libraries.look(
        [
            "libp2p==0.0.1",
            "numpy>=1.26",
            "no-such-thing>=1",
            'nor-this==2; extra == "llama"',
            'nor-that; extra == "dev"',
        ]
    )
    assert {point.what: point.fine for point in points} == {
        "libp2p": False,
        "no-such-thing": False,
        "nor-this": None,
        "others": True,
    }
    assert named(points, "libp2p").fix == 'pip install "libp2p==0.0.1"'
    assert named(points, "nor-this").fix == 'pip install "echo-node[llama]"'


def test_the_state_its_key_and_its_backup_are_looked_at(tmp_path):
    place = state_dir.prepared(tmp_path)
    whose = place.identity().peer_id
    points = state.look(tmp_path)
    assert "format 1, no node runs" in named(points, "folder").says
    assert whose in named(points, "key").says
    assert named(points, "backup").fix == "echo-node keys backup"
    place.note_backup(whose)
    with state_dir.opened(tmp_path):
        points = state.look(tmp_path)
    assert named(points, "backup").fine
    assert "a node runs on it" in named(points, "folder").says
    place.key.chmod(0o644)
    assert "chmod 600" in named(state.look(tmp_path), "key").fix
    (tmp_path / "format").write_text("99\n")
    assert named(state.look(tmp_path), "folder").fine is False


def test_a_state_that_is_a_file_cannot_be_written_to(tmp_path):
    (tmp_path / "file").touch()
    points = state.look(tmp_path / "file")
    assert named(points, "writing").fine is False
    assert named(points, "folder").fine is False


def test_a_clock_that_was_set_back_is_behind_what_was_written(tmp_path):
    place = state_dir.prepared(tmp_path)
    place.identity()
    assert all(point.fine for point in clock.look(tmp_path))
    tomorrow = time.time() + 86_400
    os.utime(place.key, (tomorrow, tomorrow))
    past = named(clock.look(tmp_path), "past")
    assert past.fine is None
    assert "1.0 days in the future" in past.says
    assert "timedatectl" in past.fix


def test_a_clock_from_before_the_program_is_wrong(tmp_path, monkeypatch):
    monkeypatch.setattr(clock.time, "time", lambda: 0.0)
    (date,) = clock.look(tmp_path)
    assert date.fine is False
    assert "1970" in date.says


def test_too_few_open_files_are_named_with_the_command():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1_000, before[1]))
    try:
        found = named(machine.look(), "open files")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert found.fine is None
    assert found.fix.startswith("ulimit -n ")


@pytest.mark.parametrize("what", ["compiler", "GMP headers"])
def test_without_a_compiler_it_says_what_to_install(monkeypatch, tmp_path, what):
    monkeypatch.setenv("PATH", str(tmp_path))
    found = named(toolchain.look(), what)
    assert found.fine is None
    assert "apt install" in found.fix
