"""The table [evaluation] of a run's file: what is refused, and what the manifest says."""

from __future__ import annotations

import pytest

from echo_node.config import load_config
from echo_node.errors import ConfigError
from echo_node.runs.algorithm import training_settings
from echo_node.runs.evaluation_settings import check_evaluation, evaluation_settings
from echo_node.runs.spec import RunSpec, new_run
from protocol import open_manifest
from protocol.manifest import Algorithm, DataSet
from tests.crafting import TRAINER, changed_run, open_run

NONCE = bytes(32)


def manifest_of(**changes):
    spec = RunSpec(name="a test", trainers=[TRAINER.peer_id], **changes)
    return open_manifest(new_run(spec, TRAINER, nonce=NONCE).sealed).message


def test_the_manifest_names_every_setting_of_the_decoding():
    found = manifest_of(evaluation={"every": 20, "prompts": 64})
    settings = evaluation_settings(found)
    assert (settings.every, settings.prompts) == (20, 64)
    assert settings.temperature == found.sampling.temperature
    assert settings.max_tokens == found.sampling.max_tokens
    assert found.algorithm.params["evaluation"]["temperature"] == 1.0
    training_settings(found)


def test_a_run_without_the_table_has_the_manifest_that_it_always_had():
    assert "evaluation" not in manifest_of().algorithm.params
    assert evaluation_settings(manifest_of()) is None


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ("every = 0", "evaluation.every"),
        ("every = 5\nprompts = 0", "evaluation.prompts"),
        ("every = 5\ntemperature = 0.0", "evaluation.temperature"),
        ("prompts = 5", "evaluation.every is missing"),
        ("every = 5\noften = true", "evaluation.often"),
        ("every = 5\nseconds = inf", "evaluation.seconds"),
    ],
)
def test_strange_settings_are_refused_by_name(table, words, tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(f'name = "x"\ntrainers = ["{TRAINER.peer_id}"]\n[evaluation]\n{table}\n')
    with pytest.raises(ConfigError, match=words):
        load_config(RunSpec, file)


def test_completions_longer_than_those_of_the_run_are_refused():
    with pytest.raises(ConfigError, match="completions of the run have at most"):
        manifest_of(evaluation={"every": 1, "max_tokens": 10_000})


@pytest.mark.parametrize(("held_out", "words"), [(12, "holds out 12 rows"), (0, "holds out no row")])
def test_more_prompts_than_held_out_rows_are_refused(held_out, words):
    run = open_run()
    params = {**run.manifest.algorithm.params, "evaluation": {"every": 1, "prompts": 64}}
    changed = changed_run(run, algorithm=Algorithm(name="grpo", params=params, version="1")).manifest
    data = (DataSet(blob=bytes(32), held_out=held_out, rows=100, size=1000),)
    object.__setattr__(changed, "data", data)
    with pytest.raises(ConfigError, match=words):
        check_evaluation(changed)
