"""The dry run before sealing: what is right passes and is remembered, what is wrong is named."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess

import psutil
import pytest
from typer.testing import CliRunner

from echo_node.cli.main import app
from echo_node.engine import gguf_map
from echo_node.engine.gguf_families import GGUF_FAMILIES
from echo_node.engine.torch_decoder import TorchDecoder
from echo_node.errors import ConfigError
from echo_node.models import embedded
from echo_node.runs.model_support import check_model, fitting_engines
from echo_node.runs.run import ENGINES
from echo_node.trainer import dry_run, dry_run_worker, policy_model
from echo_node.trainer.dry_run_model import kept_layers
from tests.crafting import open_run
from tests.families import zoo

F32 = {"torch/f32": 1.0}
ALLOWED = {each.engine: each.d_mean for each in ENGINES}


@pytest.fixture
def made(tmp_path):
    return lambda name, **changes: zoo.make(tmp_path / "model", name, **changes)


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.setattr(dry_run_worker, "say", lambda **_: None)


def test_the_embedded_model_passes_within_the_tolerances_of_a_run():
    gaps = dry_run_worker.try_model(embedded.folder(), ALLOWED, 1.0)
    assert gaps.keys() == {"trainer", *ALLOWED}
    assert max(gaps["trainer"], gaps["torch/f32"], gaps["llama/f32"]) < 1e-5


def test_a_passed_dry_run_is_remembered_until_something_changes(tmp_path, monkeypatch):
    manifest, folder = open_run().manifest, shutil.copytree(embedded.folder(), tmp_path / "model")
    seen = []
    untried = dry_run.dry_run(manifest, folder, tmp_path, progress=lambda doing, *_: seen.append(doing))
    assert untried == ()
    assert seen[0] == "dry run: starting"
    assert "dry run: a delta into llama/f16" in seen
    (mark,) = (tmp_path / dry_run.PASSED).iterdir()
    assert json.loads(mark.read_text())["trainer"] < 1e-5

    def nothing_starts(*_, **__):
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "Popen", nothing_starts)
    dry_run.dry_run(manifest, folder, tmp_path)
    colder = dataclasses.replace(manifest.sampling, temperature=0.5)
    with pytest.raises(ConfigError, match="a process was started"):
        dry_run.dry_run(dataclasses.replace(manifest, sampling=colder), folder, tmp_path)
    (folder / "config.json").write_text((folder / "config.json").read_text() + " ")
    with pytest.raises(ConfigError, match="a process was started"):
        dry_run.dry_run(manifest, folder, tmp_path)


def test_ctrl_c_ends_the_dry_run_and_nothing_is_remembered(tmp_path):
    def interrupt(doing, *_):
        if "loading" in doing:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        dry_run.dry_run(open_run().manifest, embedded.folder(), tmp_path, progress=interrupt)
    assert not (tmp_path / dry_run.PASSED).exists()
    assert not [each for each in psutil.Process().children() if "dry_run_worker" in " ".join(each.cmdline())]


def test_a_worker_that_dies_is_one_clear_line(tmp_path, monkeypatch):
    program = tmp_path / "program"
    program.write_text("""#!/bin/sh
echo a library says hello
echo '{"doing": "dry run: sampling with llama/f16"}'
echo 'GGML_ASSERT(n > 0) failed' >&2
kill -9 $$
""")
    program.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(program))
    words = r"ended with signal 9 \(dry run: sampling with llama/f16\): GGML_ASSERT\(n > 0\) failed"
    with pytest.raises(ConfigError, match=words) as error:
        dry_run.dry_run(open_run().manifest, embedded.folder(), tmp_path)
    assert error.value.advice


def test_a_trainer_that_loses_the_window_is_refused_with_the_figures(made, monkeypatch):
    folder = made("mistral, window")
    own = policy_model.tree_masks

    def full(_, *rest):
        return own(type("Config", (), {"model_type": "llama"}), *rest)

    dry_run_worker.try_model(folder, F32, 1.0)
    monkeypatch.setattr(policy_model, "tree_masks", full)
    with pytest.raises(ConfigError, match=r"trainer and a plain forward pass differ by [\d.]+ nats.*mistral"):
        dry_run_worker.try_model(folder, F32, 1.0)


def test_an_engine_that_computes_otherwise_is_refused_with_the_figures(made, monkeypatch):
    folder = made("gemma")
    wrong = {**GGUF_FAMILIES, "gemma": dataclasses.replace(GGUF_FAMILIES["gemma"], norm_shift=0.5)}
    monkeypatch.setattr(gguf_map, "GGUF_FAMILIES", wrong)
    with pytest.raises(ConfigError, match=r"llama/f16 and a plain forward pass differ by .*gemma"):
        dry_run_worker.try_model(folder, {"llama/f16": 1.0}, 1.0)


def test_an_engine_that_a_delta_does_not_reach_is_refused(made, monkeypatch):
    monkeypatch.setattr(TorchDecoder, "put", lambda _, changes: list(changes))
    with pytest.raises(ConfigError, match="torch/f32 and a plain forward pass differ by"):
        dry_run_worker.try_model(made("llama"), F32, 1.0)


def test_a_class_whose_tolerance_is_too_narrow_for_the_model_is_refused(made):
    with pytest.raises(ConfigError, match=r"llama/f16 draws .* allows the class 1e-09: honest samplers"):
        dry_run_worker.try_model(made("llama"), {"llama/f16": 1e-9}, 1.0)


@pytest.mark.parametrize("name", ["gemma3_text", "qwen2, windows", "smollm3", "gpt2", "phi3, window"])
def test_a_large_model_is_tried_as_a_cut_one(made, name, monkeypatch):
    monkeypatch.setattr(dry_run_worker, "LARGEST", 0)
    tried = []
    own = dry_run_worker._pass_through
    monkeypatch.setattr(dry_run_worker, "_pass_through", lambda *given: tried.append(given[1]) or own(*given))
    folder = made(name)
    gaps = dry_run_worker.try_model(folder, F32, 1.0)
    assert gaps.keys() == {"trainer", "torch/f32"}
    assert tried != [folder]
    assert not tried[0].exists()


def test_a_window_too_long_for_a_short_try_is_tried_in_a_cut_model_too(made, monkeypatch):
    tried = []
    own = dry_run_worker._pass_through
    monkeypatch.setattr(dry_run_worker, "_pass_through", lambda *given: tried.append(given[1]) or own(*given))
    folder = made("mistral, window", sliding_window=80)
    dry_run_worker.try_model(folder, F32, 1.0)
    assert tried[0] == folder
    assert len(tried) == 2


def test_one_turn_of_layers_is_kept_and_the_one_after_it():
    assert kept_layers(["full"] * 32) == [0, 1]
    assert kept_layers(["near", "full"] * 13) == [0, 1, 2]
    assert kept_layers((["near"] * 5 + ["full"]) * 4 + ["near"] * 2) == [0, 1, 2, 3, 4, 5, 6]
    assert kept_layers(["full"] * 20 + ["near"] * 12) == [0, 1, 30, 31]
    assert kept_layers(["full"]) == [0]


def test_classes_that_cannot_run_a_model_are_left_out_with_a_note_or_refused_where_named(made):
    folder, notes = made("gemma"), []
    fitting = fitting_engines(ENGINES, folder, 60, named=False, note=notes.append)
    assert {each.engine for each in fitting} == {"llama/f16", "torch/f32"}
    assert len(notes) == 1
    assert notes[0].startswith("llama/f32 may not sample in this run")
    with pytest.raises(ConfigError, match=r"engines: llama/f32: .*rounds the activation"):
        fitting_engines(ENGINES, folder, 60, named=True, note=notes.append)


def test_llama_cpp_samples_a_window_that_it_lacks_only_as_far_as_it_is_right(made):
    folder, notes = made("phi3, window"), []
    assert len(fitting_engines(ENGINES, folder, 9, named=True, note=notes.append)) == len(ENGINES)
    fitting = fitting_engines(ENGINES, folder, 10, named=False, note=notes.append)
    assert [each.engine for each in fitting] == ["torch/f32"]
    assert "right for this model up to 9 tokens" in notes[0]


def test_a_model_is_refused_by_its_family_and_its_lengths(made):
    folder = made("phi3")
    check_model(folder, 96)
    config = json.loads((folder / "config.json").read_text())
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 32}
    (folder / "config.json").write_text(json.dumps(config | {"rope_parameters": rope}))
    check_model(folder, 32)
    with pytest.raises(ConfigError, match=r"'longrope' .*beyond 32"):
        check_model(folder, 33)


def invoke(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture
def write(tmp_path):
    me = json.loads(invoke("keys", "show", "--state", tmp_path / "state", "--json").stdout)["peer_id"]

    def write(model):
        file = tmp_path / "run.toml"
        file.write_text(f'name = "tried"\nmodel = "{model}"\ntrainers = ["{me}"]\n')
        return file

    return write


def with_tokenizer(folder):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(embedded.folder() / name, folder)
    return folder


def test_run_new_seals_a_model_that_passes_and_refuses_one_by_name(made, write, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = with_tokenizer(made("gemma2"))
    file = write(folder)
    done = invoke(
        "run", "new", file, "--out", tmp_path / "good", "--state", tmp_path / "state", "--no-calibrate"
    )
    assert done.exit_code == 0, done.output
    assert "note: llama/f32 may not sample in this run" in done.stderr
    assert len([*(tmp_path / "state" / dry_run.PASSED).iterdir()]) == 1
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(config | {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"]})
    )
    done = invoke("run", "new", file, "--out", tmp_path / "bad", "--state", tmp_path / "state")
    assert done.exit_code != 0
    assert isinstance(done.exception, ConfigError)
    assert not (tmp_path / "bad").exists()
