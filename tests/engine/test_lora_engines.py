"""Engines with a LoRA adapter: PEFT's log-probabilities, patches, and a base that stays."""

from __future__ import annotations

from contextlib import closing, contextmanager

import numpy as np
import pytest

from echo_node.engine.base import (
    Change,
    Claim,
    SamplingLimits,
    SlotRequest,
    TensorBytes,
    Update,
    generate_groups,
)
from echo_node.engine.engine_classes import EngineSpec, make_engine
from echo_node.errors import EngineError
from echo_node.models.folder import map_folder
from echo_node.runs.run import read_model
from tests.adapters import log_probs, lora_folder, moved_folder, peft_model

pytest.importorskip("peft", reason="the extra `trl` is not installed")

LIMITS = SamplingLimits(8, 1.0, frozenset(), 16)
PROMPT = np.array([10, 4, 8, 2, 1, 3, 11])
BOUNDS = {"torch/f32": 1e-5, "llama/f32": 1e-5, "llama/f16": 0.02, "llama/bf16": 0.2, "llama/q8_0": 0.6}
FIRST, SECOND = bytes(32), bytes(31) + b"2"


@contextmanager
def engine_of(engine_class, folder):
    with closing(make_engine(EngineSpec(engine_class, folder, device="cpu", rows=8, threads=1))) as engine:
        engine.load(FIRST, read_model(folder))
        yield engine


def scores_of(engine):
    ids = np.array([3, 1, 2, 8, 4, 12])
    return engine.score_many([Claim(PROMPT, ids)], LIMITS)[0].logprobs


def patch_to(state, before):
    """An update of a tenth of all elements, and the state after it."""
    draws, changes, after = np.random.default_rng(1), [], {}
    for name, tensor in state.items():
        bits = np.frombuffer(tensor.data, "<u2").copy()
        positions = np.flatnonzero(draws.random(bits.size) < 0.1)
        bits[positions] ^= np.uint16(0x0081)  # the sign of the step, and the last digit
        changes.append(Change(name, positions, bits[positions]))
        after[name] = TensorBytes("bf16", tensor.shape, bits.tobytes())

    @contextmanager
    def opened(_granule):
        yield iter(changes)

    return Update(before, SECOND, opened), after


@pytest.mark.parametrize("engine_class", BOUNDS)
def test_an_engine_computes_what_peft_computes(engine_class):
    folder = moved_folder()
    peft = peft_model(folder)
    with engine_of(engine_class, folder) as engine:
        request = SlotRequest(PROMPT, b"k" * 32, 4, LIMITS)
        apart = 0.0
        for draw in generate_groups(engine, [request])[0]:
            expected = log_probs(peft, PROMPT, draw.ids)
            assert np.abs(draw.logprobs - expected).mean() < BOUNDS[engine_class]
            with peft.disable_adapter():
                apart = max(apart, np.abs(expected - log_probs(peft, PROMPT, draw.ids)).max())
        assert apart > 0.1, "without the adapter it would be seen"


@pytest.mark.parametrize("engine_class", ["torch/f32", "llama/f16"])
def test_a_patched_adapter_gives_the_bits_of_one_that_was_loaded(engine_class):
    folder = moved_folder()
    update, after = patch_to(read_model(folder), FIRST)
    with engine_of(engine_class, folder) as patched, engine_of(engine_class, folder) as fresh:
        before = scores_of(patched)
        patched.patch(update)
        fresh.load(SECOND, after)
        assert (scores_of(patched) == scores_of(fresh)).all()
        assert (scores_of(patched) != before).any()
        fresh.load(FIRST, read_model(folder))
        assert (scores_of(fresh) == before).all(), "the base is as it was"


@pytest.mark.parametrize("engine_class", ["torch/f32", "llama/f16"])
def test_whole_weights_are_refused_where_an_adapter_is_run(engine_class, tmp_path):
    folder = lora_folder(tmp_path / "model")
    whole = {name: TensorBytes("bf16", each.shape, each.data) for name, each in map_folder(folder).items()}
    other = read_model(lora_folder(tmp_path / "other", rank=2, alpha=4.0))
    with engine_of(engine_class, folder) as engine:
        for wrong in (whole, other):
            with pytest.raises(EngineError):
                engine.load(SECOND, wrong)
