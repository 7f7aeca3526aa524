"""What an engine's process writes goes away with it, however it ends, and nobody else's does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from echo_node.engine.worker.tempdir import WorkerTempDir
from echo_node.errors import EngineError

HOLDER = """
import sys
from pathlib import Path
from echo_node.engine.worker.tempdir import WorkerTempDir
scratch = WorkerTempDir(Path(sys.argv[1]))
(scratch.path / "weights").write_bytes(bytes(1000))
print(scratch.path, flush=True)
sys.stdin.read()
"""


def test_a_folder_is_there_until_it_is_removed(tmp_path):
    scratch = WorkerTempDir(tmp_path)
    (scratch.path / "deep").mkdir()
    (scratch.path / "deep" / "file").write_text("x")
    scratch.remove()
    assert list(tmp_path.iterdir()) == []
    scratch.remove()


def test_what_a_killed_process_left_is_swept_and_what_a_living_one_holds_is_not(tmp_path):
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        held = Path(process.stdout.readline().strip())
        first = WorkerTempDir(tmp_path)
        assert (held / "weights").exists()
        os.kill(process.pid, signal.SIGKILL)
    assert held.exists()
    second = WorkerTempDir(tmp_path)
    assert not held.exists()
    assert first.path.exists()
    first.remove()
    second.remove()


def test_files_and_folders_of_others_stay(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "treasure").write_text("x")
    here = tmp_path / "here"
    here.mkdir()
    (here / "echo-engine-link").symlink_to(elsewhere)
    (here / "echo-engine-file").write_text("x")
    (here / "another-folder").mkdir()
    WorkerTempDir(here).remove()
    assert (elsewhere / "treasure").exists()
    assert sorted(path.name for path in here.iterdir()) == [
        "another-folder",
        "echo-engine-file",
        "echo-engine-link",
    ]


def test_many_at_once_do_not_sweep_one_another(tmp_path):
    made, errors = [], []

    def make():
        try:
            made.extend(WorkerTempDir(tmp_path) for _ in range(20))
        except EngineError as error:
            errors.append(error)

    threads = [threading.Thread(target=make) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert len(made) == 80
    assert all(scratch.path.is_dir() for scratch in made)
    for scratch in made:
        scratch.remove()


def test_a_place_that_cannot_be_written_to_is_one_clear_error(tmp_path):
    missing = tmp_path / "missing"
    with pytest.raises(EngineError, match="no folder for the engine's files") as caught:
        WorkerTempDir(missing)
    assert "TMPDIR" in caught.value.advice
    assert not missing.exists()
