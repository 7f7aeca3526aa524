"""`echo-node engines`: its table, JSON, messages and exit codes."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from typer.testing import CliRunner

from echo_node.cli.main import app
from echo_node.errors import ConfigError
from tests.engine import models

ECHO_NODE = Path(sys.executable).parent / "echo-node"
QUICK = ("--seconds", "0.2", "--only", "llama/f16")
COLOUR = re.compile(r"\x1b\[(?:\d+;)*(?:3[0-8]|9[0-7])(?:;\d+)*m")


def invoke(*words):
    return CliRunner().invoke(app, ["engines", *map(str, words)], catch_exceptions=True)


def test_engines_are_measured_by_generating_and_one_is_chosen():
    done = invoke(*QUICK, "--only", "torch/f32", "--json")
    assert done.exit_code == 0, done.output
    llama, torch = (json.loads(line) for line in done.stdout.splitlines())
    assert (llama["engine"], torch["engine"]) == ("llama/f16", "torch/f32")
    assert llama["tokens_per_second"] > 0
    assert torch["tokens_per_second"] > 0
    assert torch["memory_bytes"] > llama["memory_bytes"] > 1_000_000
    assert llama["cores"] >= 1
    assert [row["chosen"] for row in (llama, torch)].count(True) == 1


def test_the_table_ends_with_the_engine_that_join_would_choose():
    done = invoke(*QUICK)
    assert done.exit_code == 0, done.output
    assert "Engines of this machine" in done.output
    assert re.search(r"llama/f16 ◀ .* cpu .* \d+ MB .* [\d,]+ ", done.output)
    assert done.output.splitlines()[-1] == "`echo-node join` chooses llama/f16, if the run takes it."


def test_what_is_not_installed_is_listed_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "llama_cpp", None)  # as if it were not installed
    done = invoke(*QUICK, "--only", "llama/q8_0")
    assert done.exit_code == 1
    missing, closing = done.output.splitlines()[-2:]
    install = 'pip install "echo-node[llama]"'
    assert missing == f"llama/f16, llama/q8_0 are not installed (needs llama_cpp): {install}"
    assert closing == "No engine runs here."
    row = json.loads(invoke(*QUICK, "--json").stdout)
    assert (row["runs"], row["installed"], row["install"]) == (False, False, install)


def test_a_model_that_an_engine_cannot_run_is_said_beside_those_that_can(tmp_path):
    folder = models.folder(
        tmp_path / "model", "Qwen3", sliding_window=8, use_sliding_window=True, max_window_layers=0
    )
    done = invoke(*QUICK, "--model", folder)
    assert done.exit_code == 1, done.output
    assert "llama/f16 does not run: " in done.output


def test_a_wrong_word_is_refused_before_any_work(tmp_path):
    assert isinstance(invoke("--only", "vllm/f16").exception, ConfigError)
    wrong = invoke(*QUICK, "--model", tmp_path).exception
    assert isinstance(wrong, ConfigError)
    assert "is no model's folder" in str(wrong)


@pytest.mark.parametrize("wish", ["", "1"])
def test_on_a_terminal_it_shows_what_it_does_and_keeps_to_the_wish_for_no_colours(wish):
    shown, output = on_a_terminal({"NO_COLOR": wish})
    assert "llama/f16: generating" in shown
    assert bool(COLOUR.search(shown)) == (not wish)
    assert "\x1b" not in output, "what is piped on is plain"
    assert "llama/f16 ◀" in output


def on_a_terminal(settings):
    """What the command shows on a terminal, and what it writes into a pipe."""
    ours, theirs = pty.openpty()
    shown = bytearray()

    def read():
        try:
            while piece := os.read(ours, 4096):
                shown.extend(piece)
        except OSError:  # the other end is closed
            return

    reader = threading.Thread(target=read)
    reader.start()
    try:
        environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100", **settings}
        command = [ECHO_NODE, "engines", *QUICK]
        done = subprocess.run(
            command,
            env=environment,
            stdin=theirs,
            stdout=subprocess.PIPE,
            stderr=theirs,
            timeout=100,
            check=True,
        )
    finally:
        os.close(theirs)
        reader.join()
        os.close(ours)
    return shown.decode(), done.stdout.decode()
