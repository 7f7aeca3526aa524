"""`echo-node verifier calibrate` on the embedded model: output, files and exit code."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from echo_node.cli import verifier
from echo_node.cli.main import app
from echo_node.errors import ConfigError, StoreError
from protocol.manifest import EngineTolerance

ECHO_NODE = Path(sys.executable).parent / "echo-node"
PNG = b"\x89PNG\r\n\x1a\n"
SMALL = ("--completions", "8", "--tokens", "16", "--engine", "llama/f16")


def invoke(*words):
    return CliRunner().invoke(app, ["verifier", "calibrate", *map(str, words)], catch_exceptions=True)


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    out = tmp_path_factory.mktemp("calibration") / "out"
    return invoke(*SMALL, "--engine", "llama/f32", "--out", out), out


def test_tolerances_come_out_as_lines_that_a_manifest_takes(shown):
    done, out = shown
    assert done.exit_code == 0, done.output
    written = (out / "tolerances.toml").read_text()
    told = [EngineTolerance(**table) for table in tomllib.loads(written)["engines"]]
    assert [each.engine for each in told] == ["llama/f16", "llama/f32"]
    assert all(0 < each.d_mean < each.d_most < 1 and each.share == 1.0 for each in told)
    assert written.strip() in done.output
    assert written.count("# Too few to know the worst: ") == 2, "eight completions are"


def test_the_table_says_what_the_bands_catch_and_the_picture_is_there(shown):
    done, out = shown
    header = next(line for line in done.output.splitlines() if line.startswith("engine"))
    assert all(name in header for name in ("worst", "refused", "own luck", "T×0.9", "T×1.1", "edited"))
    assert any(
        line.startswith("llama/f16") and line.rstrip().endswith("100%") for line in done.output.splitlines()
    )
    picture = (out / "calibration.png").read_bytes()
    assert picture.startswith(PNG)
    assert len(picture) > 10_000
    assert f"The plot is {out / 'calibration.png'}" in done.output


def test_rows_for_programs_carry_figures_tolerance_and_who_was_caught(shown):
    _, out = shown
    rows = [json.loads(line) for line in (out / "rows.jsonl").read_text().splitlines()]
    assert [row["engine"] for row in rows] == ["llama/f16", "llama/f32"]
    for row in rows:
        assert (row["completions"], row["honest_refused"]) == (8, 0)
        assert 8 <= row["tokens"] <= 8 * 16
        assert EngineTolerance(**row["tolerance"]).engine == row["engine"]
        assert row["caught"]["edited"] == 1.0
        assert row["honest_off"] <= 8
    assert rows[0]["logprob_gap"] > rows[1]["logprob_gap"] > 0


@pytest.mark.slow
def test_a_class_that_cannot_run_is_said_beside_those_that_can(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "llama_cpp", None)  # as if it were not installed
    done = invoke(*SMALL, "--engine", "torch/f32", "--out", tmp_path, "--json")
    assert done.exit_code == 0, done.output
    torch, llama = (json.loads(line) for line in done.stdout.splitlines())
    assert torch["tolerance"]["engine"] == "torch/f32"
    assert llama["engine"] == "llama/f16"
    assert "pip install" in llama["problem"]
    alone = invoke(*SMALL, "--out", tmp_path / "alone")
    assert alone.exit_code == 1
    assert "llama/f16 was not measured: " in alone.output
    assert not list((tmp_path / "alone").iterdir()), "nothing measured, nothing written"


def test_without_matplotlib_the_numbers_are_kept_and_the_picture_is_asked_for(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    said = verifier._write(tmp_path, "title", "# lines\n", [{"engine": "llama/f16"}], [])
    assert said == "No plot: the plot needs matplotlib (pip install 'echo-node[plot]')"
    assert (tmp_path / "tolerances.toml").read_text() == "# lines\n"
    assert json.loads((tmp_path / "rows.jsonl").read_text()) == {"engine": "llama/f16"}


def test_a_wrong_word_is_refused_before_any_work(tmp_path):
    assert isinstance(invoke("--engine", "vllm/f16", "--out", tmp_path).exception, ConfigError)
    assert isinstance(invoke(*SMALL, "--model", "nowhere", "--out", tmp_path).exception, ConfigError)
    (tmp_path / "file").touch()
    assert isinstance(invoke(*SMALL, "--out", tmp_path / "file").exception, StoreError)
    assert invoke("--completions", "1").exit_code == 2


def test_ctrl_c_in_the_middle_ends_it_with_one_line_and_nothing_written(tmp_path):
    ours, theirs = pty.openpty()
    command = [ECHO_NODE, "verifier", "calibrate", "--completions", "4000", "--out", tmp_path / "out"]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    with subprocess.Popen(
        command, env=environment, stdin=theirs, stdout=subprocess.PIPE, stderr=theirs, start_new_session=True
    ) as child:
        os.close(theirs)
        seen = bytearray()
        while b": drawing" not in seen:  # the bar is on the terminal
            seen += os.read(ours, 4096)
        os.killpg(child.pid, signal.SIGINT)  # as a terminal does, to its engine too
        try:
            while piece := os.read(ours, 4096):
                seen += piece
        except OSError:
            pass  # the other end is closed
        output = child.stdout.read()
        assert child.wait(60) == 130
    os.close(ours)
    assert seen.decode().rstrip().endswith("echo-node: stopped, nothing was written")
    assert b"Traceback" not in seen
    assert output == b""
    assert not list((tmp_path / "out").iterdir())
