"""Tolerances in a run's file: as `verifier calibrate` prints them, or by the names of classes."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest

from echo_node.cli.verifier import _toml
from echo_node.errors import ConfigError
from echo_node.runs.run import ENGINES
from echo_node.runs.spec import RunSpec, new_run, read_run_file, write_run
from echo_node.runs.tolerance_report import describe_tolerances, far_wider
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


def test_calibrated_classes_are_sealed_again_beside_the_others(tmp_path):
    made = new_run(read_run_file(write(tmp_path, "")), AUTHOR)
    wider = dataclasses.replace(ENGINES[0], d_mean=4e-4, d_most=0.026)
    again = made.with_engines({wider.engine: wider}, AUTHOR)
    before, after = open_manifest(made.sealed).message, open_manifest(again.sealed).message
    assert after.engines == (wider, *ENGINES[1:])
    assert dataclasses.replace(after, engines=before.engines) == before
    write_run(tmp_path / "out", again)
    assert read_run_file(tmp_path / "out" / "run.toml") == again.spec, "the resolved file reads back"


def test_a_runs_tolerances_are_shown_beside_the_known_ones():
    assert describe_tolerances(ENGINES) == "llama/f16, llama/f32, torch/f32 as known"
    wider = dataclasses.replace(ENGINES[0], d_mean=4e-4, d_most=0.026)
    assert describe_tolerances([wider, *ENGINES[1:]]) == (
        "llama/f16 mean 0.0004 (known 0.0003), token 0.026 (known 0.019); llama/f32, torch/f32 as known"
    )
    assert far_wider([wider, *ENGINES[1:]]) == []
    assert "no known bands" in describe_tolerances([WIDE])
    for name in ("d_mean", "d_most", "gap_most", "z_mean", "z_most"):
        far = dataclasses.replace(ENGINES[0], **{name: 3.1 * getattr(ENGINES[0], name)})
        assert far_wider([far]) == ["llama/f16"]


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
