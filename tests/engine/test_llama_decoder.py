"""The llama.cpp decoder: logits of transformers, weights that change, reloaded files."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch

from echo_node.engine.gguf import KINDS
from tests.engine import models
from tests.engine.deltas import Training
from tests.engine.references import Model, everything, gap

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
BLOCKS = {"hidden_size": 96, "intermediate_size": 160, "head_dim": 32}  # whole blocks of 32, throughout
FAMILIES = {
    "llama-20-biases": ("Llama", {"head_dim": 20, "attention_bias": True, "mlp_bias": True}),
    "llama-24-tied-llama3": (
        "Llama",
        {"head_dim": 24, "tie_word_embeddings": True, "rope_parameters": LLAMA3},
    ),
    "llama-blocks": ("Llama", {**BLOCKS, "attention_bias": True}),
    "qwen2-8-tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-20": ("Qwen2", {"hidden_size": 60, "tie_word_embeddings": False}),
    "qwen3-20-tied": ("Qwen3", {"head_dim": 20, "tie_word_embeddings": True}),
    "qwen3-24": ("Qwen3", {"head_dim": 24, "tie_word_embeddings": False}),
    "qwen3-blocks": ("Qwen3", {**BLOCKS, "tie_word_embeddings": True}),
}
CLOSE = {"f16": 0.004, "bf16": 0.02, "q8_0": 0.1, "q4_0": 0.7}
"""Mean gap between two logits, as a part of their spread: a few times what the type rounds off.

Between unrelated models it is 1.1. For f32, no gap at all is wider than 1e-4.
"""
IN_PLACE = ("f32", "f16", "bf16", "q8_0")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    known = {}

    def make(name, length=30, **more):
        key = (name, length, *sorted(more))
        if key not in known:
            family, settings = FAMILIES[name]
            at = tmp_path_factory.mktemp(name)
            known[key] = Model(models.folder(at, family, **{**settings, **more}), length)
        return known[key]

    return make


@pytest.fixture
def running():
    """Decoders that are closed when the test ends."""
    open_ones = []

    def run(model, kind="f32", **settings):
        decoder = model.decoder(kind, **settings)
        open_ones.append(decoder)
        decoder.load(model.weights)
        return decoder

    yield run
    for decoder in open_ones:
        decoder.close()


def assert_close(kind, logits, wanted):
    if kind == "f32":
        assert gap(logits, wanted) < 1e-4
    else:
        assert np.abs(logits - wanted).mean() < CLOSE[kind] * wanted.std()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FAMILIES)
def test_it_says_what_transformers_says(made, running, name, kind):
    model = made(name)
    decoder, ids = running(model, kind), model.ids
    assert decoder.engine_class == f"llama/{kind}"
    assert decoder.shapes == {key: tensor.shape for key, tensor in model.weights.items()}
    assert decoder.parameters == sum(np.prod(shape) for shape in decoder.shapes.values())
    assert (decoder.vocabulary, decoder.context, decoder.device) == (40, 48, "cpu")
    assert_close(kind, decoder.score(ids, 30), model.logits)
    decoder.make_room(3, 40)
    said = [decoder.prefill([0, 1], [ids[:20], ids[:7]]).copy()]
    decoder.copy(0, 2, 12)  # its beginning
    places = np.array([20, 7, 12])
    said += [decoder.decode(ids[places + step]).copy() for step in range(9)]
    steps = (places + np.arange(9)[:, None]).ravel()
    assert_close(kind, np.concatenate(said), model.logits[[19, 6, *steps]])


def test_q8_0_is_no_other_type_in_disguise(made, running):
    model = made("qwen3-blocks")
    coarse, fine = running(model, "q8_0"), running(model, "f16")
    rough, smooth = (
        gap(coarse.score(model.ids, 30), model.logits),
        gap(fine.score(model.ids, 30), model.logits),
    )
    assert rough > 3 * smooth
    assert coarse.memory_bytes < 0.7 * fine.memory_bytes


def test_rows_may_be_filled_in_any_order_and_again(made, running):
    model = made("qwen3-20-tied")
    decoder, ids = running(model), model.ids
    decoder.make_room(4, 30)
    decoder.prefill([0, 1, 2, 3], [ids[::-1][:9]] * 4)
    logits = decoder.prefill([3, 0, 2], [ids[:5], ids[:11], ids[:2]])
    assert gap(logits, model.logits[[4, 10, 1]]) < 1e-4
    decoder.copy(3, 1, 4)
    decoder.copy(0, 3, 11)
    decoder.copy(2, 0, 1)
    assert gap(decoder.decode(ids[[1, 4, 2, 11]]), model.logits[[1, 4, 2, 11]]) < 1e-4
    assert gap(decoder.decode(ids[[2, 5]]), model.logits[[2, 5]]) < 1e-4  # rows 2 and 3 are free now
    decoder.copy(1, 1, 3)  # itself, cut short
    assert gap(decoder.decode(ids[[3, 3]]), model.logits[[3, 3]]) < 1e-4


def test_prompts_and_claims_of_more_than_one_batch_come_out_the_same(made, running):
    model = made("llama-20-biases", length=700, max_position_embeddings=1024)
    decoder, ids = running(model), model.ids
    decoder.make_room(7, 640)
    sizes = [600, 3, 512, 611, 77, 601, 1]
    logits = decoder.prefill(range(7), [ids[:size] for size in sizes])  # 2405 tokens, 2048 at once
    assert gap(logits, model.logits[np.array(sizes) - 1]) < 2e-4
    assert gap(decoder.decode(ids[sizes]), model.logits[sizes]) < 2e-4
    assert (
        gap(decoder.score(ids, 650), model.logits[-650:]) < 2e-4
    )  # more than fits the rows, 512 logits at once
    assert gap(decoder.score(ids[:50], 1), model.logits[49:50]) < 2e-4
    assert gap(decoder.prefill([5], [ids[:4]]), model.logits[3:4]) < 2e-4  # the rows are still there


@pytest.mark.parametrize("name", ["llama-blocks", "qwen3-20-tied", "qwen2-20"])
@pytest.mark.parametrize("kind", IN_PLACE)
def test_after_fifty_deltas_the_logits_are_those_of_a_fresh_load_bit_for_bit(made, running, name, kind):
    model = made(name)
    live = running(model, kind)
    assert live.live
    before = everything(live, model.ids)
    training = Training(model.weights)
    for _ in range(50):
        live.put(training.step(live.granule))
    fresh = model.decoder(kind)
    fresh.load(training.weights())
    after = everything(live, model.ids)
    assert after == everything(fresh, model.ids)
    assert all(old != new for old, new in zip(before, after, strict=True))
    fresh.close()
    live.load(model.weights)  # all of them, in place
    assert everything(live, model.ids) == before


def test_a_delta_is_seen_by_the_next_prefill_of_rows_in_use(made, running):
    model = made("qwen3-blocks")
    live, training = running(model, "f16"), Training(model.weights)
    live.make_room(2, 40)
    before = live.prefill([0, 1], [model.ids[:9]] * 2).copy()
    live.put(training.step(1))
    after = live.prefill([0, 1], [model.ids[:9]] * 2)
    assert (before != after).any()
    np.testing.assert_array_equal(after[0], after[1])


@pytest.mark.parametrize(
    ("kind", "settings"), [("q4_0", {}), ("f16", {"_mapped": False}), ("q8_0", {"_mapped": False})]
)
def test_where_writes_are_not_seen_the_file_is_loaded_again(made, running, caplog, kind, settings):
    model = made("qwen3-blocks")
    with caplog.at_level(logging.WARNING):
        decoder = running(model, kind, **settings)
        assert decoder.live is False
        training = Training(model.weights)
        decoder.make_room(3, 40)
        for _ in range(50):
            decoder.put(training.step(decoder.granule))
    told = [record for record in caplog.records if "does not see writes" in record.getMessage()]
    assert len(told) == (0 if kind == "q4_0" else 1)  # q4 is never tried
    decoder.prefill([0, 1, 2], [model.ids[:4]] * 3)  # the room is as it was
    fresh = model.decoder(kind)
    fresh.load(training.weights())
    assert everything(decoder, model.ids) == everything(fresh, model.ids)
    fresh.close()


def test_weights_that_say_nothing_leave_the_self_test_to_the_next_ones(made, running):
    model = made("qwen3-20-tied")
    broken = {**model.weights, "model.norm.weight": models.tensor(torch.full((24,), torch.nan).bfloat16())}
    decoder = model.decoder("bf16")
    decoder.load(broken)
    assert decoder.live is None
    assert np.isnan(decoder.score(model.ids, 30)).all()
    decoder.load(model.weights)
    assert decoder.live
    assert everything(decoder, model.ids) == everything(running(model, "bf16"), model.ids)
    decoder.close()


def test_a_type_that_is_repacked_would_be_silently_wrong_in_place(made, running):
    model = made("qwen3-blocks")
    decoder = running(model, "q4_0")
    before = decoder.score(model.ids, 30).copy()
    decoder.live = True  # what `put` would do if it did not know better
    decoder.put(Training(model.weights).step(32))
    in_place = decoder.score(model.ids, 30).copy()
    decoder._reload(decoder._file)
    loaded = decoder.score(model.ids, 30)
    assert (loaded != before).any()
    if (in_place == loaded).all():
        pytest.skip("this machine does not repack q4_0")
