"""Calibration of a new run: measured once, kept, bounded in time, never a reason to fail."""

from __future__ import annotations

from contextlib import closing

import numpy as np
import pytest

from echo_node.engine.engine_classes import make_engine
from echo_node.errors import EngineError
from echo_node.models import embedded
from echo_node.runs.run import ENGINES
from echo_node.verifier import run_calibration
from echo_node.verifier.run_calibration import FEWEST_TOKENS, KEPT, LARGEST, SECONDS, calibrate_run
from tests.crafting import open_run

PROMPTS = [np.array([1, 2, 3, 4]), np.array([5, 6, 7])]
KNOWN = {each.engine: each for each in ENGINES}


@pytest.fixture(scope="module")
def manifest():
    run = open_run()
    yield run.manifest
    run.close()


@pytest.fixture
def started(monkeypatch):
    """The engines that were started, in this process."""
    found = []

    def start(spec):
        found.append(spec.engine_class)
        return closing(make_engine(spec))

    monkeypatch.setattr(run_calibration, "WorkerEngine", start)
    monkeypatch.setattr(run_calibration, "available_memory", lambda: None)
    return found


def run(manifest, cache, *classes, clock=lambda: 0.0, **more):
    """Calibrate classes on the embedded model, with time for all slots unless there is a clock."""
    return calibrate_run(manifest, embedded.folder(), cache, classes, PROMPTS, clock=clock, **more)


def test_a_class_is_measured_once_and_kept(manifest, started, tmp_path):
    doing = []
    found = run(manifest, tmp_path, "llama/f16", "torch/f32", progress=lambda *each: doing.append(each))
    assert started == ["torch/f32", "llama/f16"], "the judge draws its own class"
    for name, each in found.items():
        assert each.tokens >= FEWEST_TOKENS
        assert not each.why_not
        for bound in ("d_mean", "d_most", "gap_most", "z_mean", "z_most"):
            assert getattr(KNOWN[name], bound) <= getattr(each.tolerance, bound)
    assert found["torch/f32"].tolerance == KNOWN["torch/f32"]
    assert any("calibrating llama/f16" in what and total > 0 for what, _, total in doing)
    del started[:]
    assert run(manifest, tmp_path, "llama/f16", "torch/f32") == found
    assert not started, "a second run new starts no engine"


def test_a_rotten_file_is_measured_again_and_another_class_alone(manifest, started, tmp_path):
    run(manifest, tmp_path, "torch/f32")
    (kept,) = (tmp_path / KEPT).iterdir()
    for rotten in ("", "{}", '{"tokens": 4, "tolerance": {"d_mean": "x"}}', '{"tokens": 4, "tolerance": 7}'):
        kept.write_text(rotten)
        del started[:]
        assert run(manifest, tmp_path, "torch/f32")["torch/f32"].tokens >= FEWEST_TOKENS
        assert started == ["torch/f32"]


@pytest.mark.usefixtures("started")
def test_kept_bounds_are_raised_to_what_is_known(manifest, tmp_path):
    run(manifest, tmp_path, "torch/f32")
    (kept,) = (tmp_path / KEPT).iterdir()
    bounds = '{"d_mean": 0, "d_most": 0.5, "gap_most": 0, "z_mean": 0, "z_most": 0}'
    kept.write_text(f'{{"tokens": 4, "tolerance": {bounds}}}')
    found = run(manifest, tmp_path, "torch/f32")["torch/f32"].tolerance
    assert found.d_most == 0.5
    assert found.d_mean == KNOWN["torch/f32"].d_mean


@pytest.mark.usefixtures("started")
@pytest.mark.parametrize("broken", ["torch/f32", "llama/f16"])
def test_an_engine_that_dies_leaves_the_known_bounds(manifest, monkeypatch, tmp_path, broken):
    def start(spec):
        if spec.engine_class == broken:
            raise EngineError("it died while loading weights")
        return closing(make_engine(spec))

    monkeypatch.setattr(run_calibration, "WorkerEngine", start)
    found = run(manifest, tmp_path, "llama/f16", "torch/f32")
    assert found["llama/f16"].tolerance == KNOWN["llama/f16"]
    assert found["llama/f16"].why_not == "it died while loading weights"
    assert bool(found["torch/f32"].why_not) == (broken == "torch/f32")


@pytest.mark.usefixtures("started")
def test_a_slow_engine_ends_in_time_and_leaves_the_known_bounds(manifest, tmp_path):
    now = [0.0]

    def clock():  # called before each token, at least
        now[0] += 1.0
        return now[0]

    found = run(manifest, tmp_path, "llama/f16", seconds=SECONDS, clock=clock)["llama/f16"]
    assert found.tolerance == KNOWN["llama/f16"]
    assert "only" in found.why_not
    assert now[0] < 2 * SECONDS
    assert not (tmp_path / KEPT).exists()


def test_what_does_not_fit_is_not_measured(manifest, started, monkeypatch, tmp_path):
    monkeypatch.setattr(run_calibration, "LARGEST", 1_000)
    assert "--calibrate" in run(manifest, tmp_path, "llama/f16")["llama/f16"].why_not
    monkeypatch.setattr(run_calibration, "available_memory", lambda: 1_000_000)
    assert "memory" in run(manifest, tmp_path, "llama/f16", asked=True)["llama/f16"].why_not
    monkeypatch.setattr(run_calibration, "kinds", list)
    assert "not installed" in run(manifest, tmp_path, "llama/f16", asked=True)["llama/f16"].why_not
    assert not started
    assert LARGEST > 135_000_000, "SmolLM2-135M is calibrated unasked"
