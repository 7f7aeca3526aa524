"""`echo-node contract`: from an empty folder to a contract that is installed, tested and scored."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from echo_node.cli.main import app
from echo_node.contract.builtin import BUILT_IN
from echo_node.errors import ConfigError, ContractError


def invoke(*words):
    return CliRunner().invoke(app, ["contract", *map(str, words)], catch_exceptions=True)


def rows(done):
    return [json.loads(line) for line in done.output.splitlines()]


def run(*command, cwd=None, path=""):
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(path), os.environ.get("PYTHONPATH")])),
    }
    return subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def echo_node(*words, path):
    return run("-m", "echo_node", "contract", *words, path=path)


def test_the_built_in_contracts_are_listed():
    assert {(row["name"], row["version"]) for row in rows(invoke("list", "--json"))} >= set(BUILT_IN)
    shown = invoke("list")
    assert shown.exit_code == 0
    assert "built in" in shown.output
    assert "digits-reverse" in shown.output


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            f"{name}@{version}",
            marks=[pytest.mark.slow] if name in {"knights-knaves", "reasoning-gym"} else [],
        )
        for name, version in sorted(BUILT_IN)  # of those that stand on reasoning-gym, one name is enough
    ],
)
def test_every_built_in_contract_passes_its_trial(name):
    done = invoke("test", name, "--json")
    assert {row["verdict"] for row in rows(done)} == {"passed"}, done.output
    assert done.exit_code == 0


def test_a_trial_that_fails_ends_with_one_and_says_why():
    done = invoke("test", "digits-reverse", "--param", "digits=99")
    assert done.exit_code == 1
    assert "failed" in done.output
    assert "from 1 to 32" in " ".join(done.output.replace("│", " ").split())
    refused = invoke("test", "reasoning-gym", "--param", "task=countdown", "--json")
    assert refused.exit_code == 1
    assert "evaluates the answer as Python" in rows(refused)[0]["found"]


def test_samples_are_shown_with_a_right_and_a_wrong_answer():
    shown = invoke("show", "digits-reverse@1", "--param", "digits=3", "--samples", "2")
    assert shown.exit_code == 0, shown.output
    assert shown.output.startswith("digits-reverse 1, scores from 0 to 1\n")
    assert shown.output.count("scores 1: ") == 2
    assert shown.output.count("scores 0: ") == 2
    sample = rows(invoke("show", "digits-reverse", "--param", "digits=3", "--json"))[0]
    assert sample["prompt"] == f"r{sample['answer'][::-1]}="
    assert (sample["answer_score"]["value"], sample["wrong_score"]["value"]) == (1.0, 0.0)
    missing = invoke("show", "chess")
    assert isinstance(missing.exception, ContractError)
    assert "no contract chess" in str(missing.exception)


@pytest.mark.parametrize("word", ["digits", "=3"])
def test_a_parameter_has_a_name_and_a_value(word):
    assert isinstance(invoke("show", "digits-reverse", "--param", word).exception, ConfigError)


@pytest.mark.parametrize("name", ["Upper", "a--b", "-a", "a/b", "../up", "", "x" * 41, "é"])
def test_a_name_that_is_none_is_refused(name, tmp_path):
    done = invoke("new", "--folder", tmp_path / "new", "--", name)
    assert isinstance(done.exception, ConfigError)
    assert not (tmp_path / "new").exists()


def test_a_folder_that_is_there_is_left_alone(tmp_path):
    (tmp_path / "mine").write_text("mine")
    assert isinstance(invoke("new", "sums", "--folder", tmp_path).exception, ConfigError)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


@pytest.mark.timeout(300)  # six programs, one after the other
def test_a_new_contract_is_installed_listed_tried_and_scored(tmp_path):
    package, site = tmp_path / "package", tmp_path / "site"
    assert invoke("new", "word-sums", "--folder", package).exit_code == 0
    contract = (package / "echo_contract_word_sums.py").read_text()
    assert len(contract.splitlines()) <= 35
    assert "@" not in contract
    flags = ("--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--target")
    installed = run("-m", "pip", "install", *flags, site, package)
    assert installed.returncode == 0, installed.stderr
    listed = [json.loads(line) for line in echo_node("list", "--json", path=site).stdout.splitlines()]
    assert {"name": "word-sums", "version": "1", "package": "echo-contract-word-sums"} in listed
    trial = echo_node("test", "word-sums", "--param", "largest=99999", path=site)
    assert trial.returncode == 0, trial.stdout
    shown = json.loads(echo_node("show", "word-sums", "--samples", "1", "--json", path=site).stdout)
    assert shown["answer_score"]["value"] == 1.0
    assert shown["wrong_score"]["value"] == 0.0
    own = run("-m", "pytest", "-q", "-p", "no:cacheprovider", cwd=package, path=site)
    assert own.returncode == 0, own.stdout
    assert "3 passed" in own.stdout
