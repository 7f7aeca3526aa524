"""Tolerances in a run's file: as `verifier calibrate` prints them, or by the names of classes."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest

from echo_node.cli.verifier import _toml
from echo_node.errors import ConfigError
from echo_node.runs.run import ENGINES
from echo_node.runs.spec import RunSpec, new_run, read_run_file, write_run
from protocol import Identity, open_manifest

AUTHOR = Identity(b"a" * 32)
WIDE = dataclasses.replace(ENGINES[0], engine="llama/q8_0", share=0.25, d_mean=0.01)


def calibrated(*tolerances):
    return _toml(
        "a test", [SimpleNamespace(tolerance=each, off=99, refused=0, honest=()) for each in tolerances]
    )


def write(tmp_path, text):
    file = tmp_path / "run.toml"
    file.write_text(f'name = "a test"\ntrainers = ["{AUTHOR.peer_id}"]\n{text}')
    return file


def test_what_calibrate_prints_is_pasted_into_a_run_file_and_stands_in_the_manifest(tmp_path):
    measured = dataclasses.replace(ENGINES[0], d_mean=2e-4)
    text = calibrated(WIDE, measured)
    made = new_run(read_run_file(write(tmp_path, text)), AUTHOR)
    assert open_manifest(made.sealed).message.engines == (measured, WIDE)
    write_run(tmp_path / "out", made)
    assert read_run_file(tmp_path / "out" / "run.toml") == made.spec, "the resolved file reads back"


def test_calibrate_proposes_shares_that_a_swarm_of_one_class_can_fill(tmp_path):
    made = new_run(read_run_file(write(tmp_path, calibrated(WIDE))), AUTHOR)
    assert [each.share for each in open_manifest(made.sealed).message.engines] == [1.0]


@pytest.mark.parametrize(
    ("engines", "says"),
    [
        (["vax/f8"], "no tolerance is known for engines of the class vax/f8"),
        (
            [
                {
                    "engine": "vax/f8",
                    "d_mean": 0.0,
                    "d_most": 0.0,
                    "gap_most": 0.0,
                    "z_mean": 0.0,
                    "z_most": 0.0,
                }
            ],
            "vax",
        ),
        (["torch/f32", "torch/f32"], "stands there twice"),
    ],
)
def test_classes_that_nobody_knows_or_that_stand_twice_are_refused(engines, says):
    spec = RunSpec(name="a test", trainers=[AUTHOR.peer_id], engines=engines)
    with pytest.raises(ConfigError, match=says):
        new_run(spec, AUTHOR)
