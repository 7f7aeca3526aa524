"""The benchmark of sizes, on a tiny shape: its figures follow from what the trainer holds."""

from __future__ import annotations

import json

import pytest
import torch
from rich.table import Table
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks import engine_models, size
from benchmarks.live_tensors import PeakBytes
from benchmarks.report_catalogue import BENCHMARKS
from echo_node.trainer import master_weights

TINY = {
    **engine_models.SHAPES["29M"],
    "vocab_size": 2000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
}


@pytest.fixture(autouse=True)
def tiny(monkeypatch, tmp_path):
    monkeypatch.setattr(engine_models, "FOLDER", tmp_path)
    monkeypatch.setitem(engine_models.SHAPES, "tiny", TINY)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def table():
    return Table("figure", "measured", "how")


def test_bytes_a_parameter_are_those_of_weights_remainders_moments_and_gradients(monkeypatch):
    monkeypatch.setattr(master_weights, "CHUNK", 512)
    found = size.bytes_per_parameter(table(), "tiny")
    for way, held in (("bf16", 14.0), ("accumulating", 16.0), ("f32", 18.0)):
        assert held <= found[f"bytes_per_parameter_{way}"] < held + 0.5  # chunks, positions


def test_the_head_is_measured_on_shapes_as_with_real_arithmetic(monkeypatch):
    monkeypatch.setattr(size, "TOKENS", 2048)
    found = size.head(table(), "tiny")
    assert found.keys() == {"head_peak_over_nv", "head_peak_over_trl"}
    assert found["head_peak_over_trl"] > 0


def test_a_step_and_publishing_are_timed(monkeypatch):
    monkeypatch.setattr(size, "STEP_PAIRS", 1)
    monkeypatch.setattr(size, "PUBLISH_PAIRS", 1)
    assert size.step(table(), "tiny", groups=2, size=2, tokens=8)["step_time_over_trl"] > 0
    assert size.publishing(table(), "tiny", tokens=64)["publish_stall"] > -1


def test_the_last_line_has_the_figures_of_the_catalogue(monkeypatch, capsys):
    for name in size.PARTS:
        figures = {each: 1.0 for each in BENCHMARKS["size"].bounds if name in _part_of(each)}
        monkeypatch.setitem(size.PARTS, name, lambda _rows, figures=figures: figures)
    size.main([])
    assert json.loads(capsys.readouterr().out.splitlines()[-1]).keys() == BENCHMARKS["size"].bounds.keys()


def _part_of(figure):
    return {"bytes": "bytes", "head_": "head", "step_": "step", "publi": "publishing"}[figure[:5]]


def test_a_peak_counts_what_is_made_and_not_what_was_there():
    there = torch.zeros(1000)
    with PeakBytes() as peak:
        there.add_(1.0)
        made = there + 1.0
        del made
        torch.zeros(500).add_(1.0)
    assert peak.most == 4000


def test_tensors_whose_sizes_are_symbols_do_not_count():
    """Compiled graphs leave such tensors behind, in whichever test comes before."""
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    from benchmarks.live_tensors import live_storages

    context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])
    mode = FakeTensorMode(shape_env=ShapeEnv())
    traced = mode.from_tensor(torch.empty(7), symbolic_context=context)
    assert not isinstance(traced.untyped_storage().nbytes(), int)
    assert all(isinstance(size, int) for size in live_storages().values())
