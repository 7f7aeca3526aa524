"""Packed matrices: the numbers of the plain ones, of the newest weights, where memory allows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from echo_node.engine import onednn_linear as packing
from echo_node.engine.base import generate_groups
from echo_node.engine.onednn_linear import OneDnnLinears
from echo_node.engine.torch_decoder import TorchDecoder
from tests.engine import models
from tests.engine.deltas import Training
from tests.engine.test_torch_decoder import each, flat, loaded, reference_logits

pytestmark = pytest.mark.skipif(
    not packing._gains(torch.empty(packing.LEAST)), reason="matrices of this machine are not packed"
)


@pytest.fixture
def all_sizes(monkeypatch):
    monkeypatch.setattr(packing, "LEAST", 1)
    monkeypatch.setattr(packing, "PAYS", 0)


def layer(*, bias=False, outputs=7):
    torch.manual_seed(1)
    return nn.Linear(5, outputs, bias=bias).requires_grad_(requires_grad=False)


@torch.inference_mode()
def through(packing, layer, rows):
    with packing.on():
        return layer(rows)


@pytest.mark.usefixtures("all_sizes")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_a_packed_matrix_gives_what_the_plain_one_gives(bias, rows):
    made, given = layer(bias=bias), torch.randn(rows, 1, 5)
    plain = made(given)
    packed = OneDnnLinears(made)
    assert torch.allclose(through(packed, made, given), plain, atol=1e-6)
    assert torch.equal(made(given), plain), "and the usual way is what it was"


@pytest.mark.usefixtures("all_sizes")
def test_a_weight_that_changed_is_packed_again_and_no_other():
    model = nn.Sequential(layer(outputs=5), layer())
    packed, given = OneDnnLinears(model), torch.randn(2, 5)
    through(packed, model, given)
    first, second = (packed._packed[each] for each in model)
    model[1].weight[0, 0] += 1.0
    packed.changed(model[1].weight)
    assert torch.allclose(through(packed, model, given), model(given), atol=1e-6)
    assert packed._packed[model[0]] is first
    assert packed._packed[model[1]] is not second


@pytest.mark.usefixtures("all_sizes")
def test_matrices_are_packed_once_they_have_served_and_anew_after_a_change(monkeypatch):
    monkeypatch.setattr(packing, "PAYS", 3)
    made, given = layer(), torch.randn(2, 5)
    packed = OneDnnLinears(made)

    def steps_until_packed():
        for step in range(1, 9):
            through(packed, made, given)
            if packed._packed[made] is not None:
                return step
        return None

    assert steps_until_packed() == 4
    assert steps_until_packed() == 1, "and it stays packed"
    packed.changed(made.weight)
    assert packed._packed[made] is None
    through(packed, made, given)
    packed.changed(made.weight)
    assert steps_until_packed() == 4, "versions that serve shortly are never packed"


@pytest.mark.usefixtures("all_sizes")
def test_without_room_for_copies_matrices_stay_as_they_are(monkeypatch):
    made = layer()
    monkeypatch.setattr(packing, "available_memory", lambda: 8 * made.weight.nbytes)
    assert OneDnnLinears(made).nbytes == made.weight.nbytes
    monkeypatch.setattr(packing, "available_memory", lambda: 8 * made.weight.nbytes - 1)
    assert OneDnnLinears(made).nbytes == 0


def test_small_matrices_and_other_types_stay_as_they_are():
    assert OneDnnLinears(layer()).nbytes == 0
    assert OneDnnLinears(nn.Linear(512, 512).to(torch.bfloat16)).nbytes == 0
    assert OneDnnLinears(nn.Linear(512, 512)).nbytes > 0


@pytest.mark.usefixtures("all_sizes")
@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("Llama", {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True}),
        ("Qwen3", {"tie_word_embeddings": True, "head_dim": 10}),
    ],
)
def test_what_is_drawn_through_packed_matrices_is_what_a_plain_pass_says(family, settings, tmp_path):
    folder = models.folder(tmp_path, family, **settings)
    engine = loaded(folder)
    requests = models.requests(6, lengths=(1, 4, 11))
    drawn = generate_groups(engine, requests)
    for request, draw, u in each(requests, drawn):
        logits = reference_logits(folder, request.prompt, draw.ids)[:, : models.LIMITS.vocab_size]
        chosen = torch.from_numpy(logits).double().log_softmax(-1).numpy()[np.arange(u.size), draw.ids]
        assert np.abs(draw.logprobs - chosen).max() < 1e-5
        assert engine.score(request.prompt, draw.ids, models.LIMITS).replay(u).d.max() < 1e-6
    assert flat(generate_groups(loaded(folder), requests)) == flat(drawn), "the same bits in a fresh engine"
    assert engine.describe().memory_bytes > loaded_plain(folder).describe().memory_bytes


def loaded_plain(folder):
    with pytest.MonkeyPatch.context() as without:
        without.setattr(packing, "available_memory", lambda: 0)
        return loaded(folder)


@pytest.mark.usefixtures("all_sizes")
def test_after_many_updates_a_step_gives_the_bits_of_a_fresh_load(tmp_path):
    folder = models.folder(tmp_path, tie_word_embeddings=True)
    training = Training(models.weights(folder))

    def step(decoder):
        decoder.make_room(3, 8)
        decoder.prefill([0, 1, 2], [np.arange(1, 4)] * 3)
        return decoder.decode(np.array([1, 2, 3]))

    def fresh_with(weights):
        decoder = TorchDecoder(folder, device="cpu", threads=1)
        decoder.load(weights)
        return decoder

    live = fresh_with(training.weights())
    for _ in range(25):
        before = step(live)
        live.put(training.step(live.granule))
        now = step(live)
        assert np.array_equal(now, step(fresh_with(training.weights())))
        assert not np.array_equal(now, before), "and it was no update of nothing"
    live.load(models.weights(folder))
    assert np.array_equal(step(live), step(fresh_with(models.weights(folder)))), "and so does one of all"
