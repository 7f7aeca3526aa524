"""`echo-node run eval` and `run export`: a good and a spoilt version, on held-out prompts."""

from __future__ import annotations

import json
import shutil
from contextlib import closing

import numpy as np
import pytest
from typer.testing import CliRunner

from echo_node.cli.main import app
from echo_node.engine.base import TensorBytes
from echo_node.errors import ConfigError, EchoError, StoreError
from echo_node.models import embedded
from echo_node.runs.resolve import find_local_run
from echo_node.runs.run import read_model
from echo_node.runs.spec import RunSpec, new_run, open_run, write_run
from echo_node.storage.state_dir import opened, prepared
from echo_node.weights.publisher import Publisher
from echo_node.weights.store import WeightsStore
from echo_node.weights.store_metadata import write_metadata
from echo_node.weights.tensors import layout_of
from protocol import Link, Roster

PROMPTS = ("--prompts", "64")


def spoilt(state):
    """The same model with every weight well off."""
    luck = np.random.default_rng(0)
    return {
        name: TensorBytes(
            weight.dtype,
            weight.shape,
            (
                np.frombuffer(weight.data, np.uint16)
                ^ luck.integers(0, 256, len(weight.data) // 2, np.uint16)
            ).tobytes(),
        )
        for name, weight in state.items()
    }


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A trainer's state and its run: version 0 is the embedded model, version 1 a spoilt one."""
    folder = tmp_path_factory.mktemp("evaluating")
    trainer = prepared(folder / "state").identity()
    told = RunSpec(name="a test", trainers=[trainer.peer_id])
    write_run(folder / "run", new_run(told, trainer))
    run = open_run(folder / "run")
    state = read_model(embedded.folder())
    with opened(folder / "state") as held:
        weights = held.run(run.id) / "weights"
    with WeightsStore.open(weights, run.rules, layout_of(state)) as store:
        publisher = Publisher(store, trainer, luck=lambda: bytes(32))
        for step, each in enumerate((state, spoilt(state))):
            publisher.publish(each, step=step, roster=Roster(()), groups=())
    run.close()
    return folder


def invoke(place, command, *words):
    return CliRunner().invoke(
        app, ["run", command, str(place / "run"), *map(str, words), "--state", str(place / "state")]
    )


def failure(place, command, *words) -> EchoError:
    failed = invoke(place, command, *words).exception
    assert isinstance(failed, EchoError)
    assert failed.advice
    return failed


def test_versions_are_measured_and_the_best_one_is_written(place, tmp_path):
    assert "none is known to be the best" in str(failure(place, "export", tmp_path / "early"))
    done = invoke(place, "eval", "--version", 0, "--version", 1, *PROMPTS, "--json")
    assert done.exit_code == 0, done.output
    good, bad = map(json.loads, done.output.splitlines())
    assert (good["version"], bad["version"], good["prompts"]) == (0, 1, 64)
    assert 0.15 < good["reward"] < 0.6
    assert bad["reward"] < good["reward"] - good["error"]
    again = json.loads(invoke(place, "eval", "--version", 0, *PROMPTS, "--json").output)
    assert again == good, "the same prompts with the same luck"

    done = invoke(place, "export", tmp_path / "best")
    assert done.exit_code == 0, done.output
    assert "version 0 is the best of 2" in done.output
    assert read_model(tmp_path / "best") == read_model(embedded.folder())
    assert (tmp_path / "best" / "config.json").is_file()


def test_what_is_not_held_is_said_and_leaves_nothing(place, tmp_path):
    for words in (("eval", place / "run"), ("export", place / "run", tmp_path / "out", "--version", 0)):
        done = CliRunner().invoke(app, ["run", *map(str, words), "--state", str(tmp_path / "state")])
        assert "holds no version of that run" in str(done.exception)
    assert not (tmp_path / "state" / "runs").exists()


def test_who_joined_by_a_link_names_the_run_by_it_or_by_its_id(place, tmp_path):
    """Only the state has the run: manifest beside the weights, model as downloaded."""
    run = open_run(place / "run")
    run.close()
    state = tmp_path / "state"
    shutil.copytree(place / "state", state)
    held = state / "runs" / run.id.hex()
    write_metadata(held / "weights", run.sealed_manifest, layout_of(read_model(run.folder)))
    shutil.copytree(embedded.folder(), held / "model")
    link = Link(addresses=(), head=bytes(32), run=run.id, term=1, version=0)
    for name in (run.id.hex(), run.id.hex()[:8].upper(), str(link), str(held)):
        shown = CliRunner().invoke(app, ["run", "show", name, "--json", "--state", str(state)])
        assert json.loads(shown.output)["name"] == "a test"
    with closing(open_run(find_local_run(str(link), state))) as opened:
        assert opened.folder == held / "model"
    out = tmp_path / "out"
    words = ["run", "export", run.id.hex()[:8], str(out), "--version", "1", "--state", str(state)]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert (out / "config.json").is_file()


def test_what_cannot_be_measured_is_said(place, tmp_path):
    assert isinstance(failure(place, "eval", "--version", 7), StoreError)
    with opened(place / "state"):
        assert "a node runs on" in str(failure(place, "eval"))
    taken = tmp_path / "taken"
    taken.mkdir()
    assert isinstance(failure(place, "export", taken, "--version", 1), ConfigError)
    assert isinstance(failure(place, "export", tmp_path / ("x" * 300), "--version", 1), ConfigError)
