"""What lies where a file should be: nobody waits for ever for a pipe, and one that says something
is heard.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from echo_node.control.offline_report import look_into
from echo_node.storage import files
from echo_node.storage.state_dir import is_in_use, prepared


@pytest.fixture
def pipe(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    return path


def test_a_pipe_is_read_to_its_end_as_the_shell_gives_one():
    reading, writing = os.pipe()
    os.write(writing, b"first\nsecond\n")
    os.close(writing)
    try:
        assert files.read_given(Path(f"/dev/fd/{reading}"), 100) == b"first\nsecond\n"
    finally:
        os.close(reading)


def test_somebody_who_writes_a_little_later_is_waited_for(pipe):
    later = threading.Timer(0.2, pipe.write_bytes, (b"here",))
    later.start()
    assert files.read_given(pipe, 100) == b"here"
    later.join()


def test_a_line_is_enough_where_a_line_is_wanted(pipe):
    both = os.open(pipe, os.O_RDWR)  # it stays open, so that it has no end
    os.write(both, b"line\nmore")
    try:
        assert files.read_given(pipe, 100, line=True).startswith(b"line\n")
    finally:
        os.close(both)


def test_a_pipe_that_nobody_writes_into_is_given_up(pipe, monkeypatch):
    monkeypatch.setattr(files, "PIPE_SECONDS", 0.1)
    with pytest.raises(OSError, match="nobody writes into it"):
        files.read_given(pipe, 100)


def test_no_more_is_read_than_was_asked_for(tmp_path):
    (tmp_path / "file").write_bytes(b"x" * 100)
    assert files.read_given(tmp_path / "file", 10) == b"x" * 10
    assert files.read_given(Path("/dev/zero"), 10) == bytes(10)


@pytest.mark.parametrize("name", ["key", "lock", "backed-up", "runs/ab/weights/manifest", "control"])
def test_a_look_into_a_state_waits_for_no_pipe(tmp_path, name):
    prepared(tmp_path / "state").identity()
    path = tmp_path / "state" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    os.mkfifo(path, 0o600)
    assert not is_in_use(tmp_path / "state")
    held = look_into(tmp_path / "state")
    assert ("it is a pipe, and no file" in held.key_problem) == (name == "key")
