"""Masters in 16 extra bits: value and remainder are the float32 master, bit for bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from echo_node.trainer import layer_upcast, master_weights, output_head
from echo_node.trainer.master_bits import join, split
from echo_node.trainer.master_weights import MasterWeights
from echo_node.trainer.sharding import Unsharded
from tests.trainer.test_step import bits, new_step, ragged_batch, same

TIES = (0x3F808000, 0x3F7F8000, 0xBF808000, 0x00008000, 0x80008000, 0x00007FFF, 0x007F8000, 0x7F7F8000)
EDGES = (0x00000000, 0x80000000, 0x00000001, 0x807FFFFF, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F7F7FFF)
FINITE = st.integers(0, 2**32 - 1).filter(lambda bits: bits >> 23 & 0xFF != 0xFF)


def floats(patterns):
    signed = [pattern - 2**32 if pattern >= 2**31 else pattern for pattern in patterns]
    return torch.tensor(signed, dtype=torch.int32).view(torch.float32)


def half_up(pattern):
    return (pattern + 0x8000 >> 16) & 0xFFFF


@given(st.lists(FINITE | st.sampled_from(TIES + EDGES), min_size=1))
def test_every_finite_master_comes_back_from_its_value_and_remainder(patterns):
    masters = floats(patterns)
    values, remainders = split(masters)
    assert (values.dtype, remainders.dtype) == (torch.bfloat16, torch.int16)
    assert [value & 0xFFFF for value in values.view(torch.int16).tolist()] == list(map(half_up, patterns))
    for held in (values, values.float()):
        assert torch.equal(join(held, remainders).view(torch.int32), masters.view(torch.int32))


def test_at_ties_no_two_masters_have_one_pair_and_the_top_becomes_infinite():
    masters = floats(TIES + EDGES)
    pairs = list(zip(*(each.view(torch.int16).tolist() for each in split(masters)), strict=True))
    assert len(set(pairs)) == len(pairs)
    assert pairs[0][0] == 0x3F81
    assert pairs[1][0] == 0x3F80
    values, _ = split(floats((0x7F7F7FFF, 0x7F7F8000, 0xFF7FFFFF)))
    assert values.float().tolist() == [values[0].float(), torch.inf, -torch.inf]
    assert values[0].isfinite()


def test_every_value_has_each_remainder_once():
    lower = torch.arange(2**16, dtype=torch.int32)
    for upper in (0, 0x3F80, 0x7F7F, -0x8000, -0x4080):
        values, remainders = split(((upper << 16) + lower).view(torch.float32))
        assert torch.equal(join(values, remainders).view(torch.int32), (upper << 16) + lower)
        assert len(set(zip(values.view(torch.int16).tolist(), remainders.tolist(), strict=True))) == 2**16


@pytest.mark.parametrize("copy", ["bf16", "f32"])
@pytest.mark.parametrize("chunk", [2**20, 64])
def test_masters_are_those_of_torchs_adamw_on_float32_weights(monkeypatch, copy, chunk):
    monkeypatch.setattr(master_weights, "CHUNK", chunk)
    torch.manual_seed(0)
    start = {name: torch.randn(shape) for name, shape in (("a", (37, 11)), ("b", (1000,)), ("c", (3,)))}
    weights = {name: torch.nn.Parameter(tensor.clone()) for name, tensor in start.items()}
    masters = MasterWeights(
        weights, Unsharded(), copy=copy, betas=(0.9, 0.99), epsilon=1e-8, weight_decay=0.01
    )
    plain = [torch.nn.Parameter(tensor) for tensor in start.values()]
    reference = torch.optim.AdamW(plain, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.01, fused=True)
    for number in range(20):
        for (name, weight), expected in zip(weights.items(), plain, strict=True):
            slope = None if (name, number) == ("c", 0) else torch.randn(weight.shape)
            weight.grad, expected.grad = (None, None) if slope is None else (slope.clone(), slope.clone() / 3)
        norm = masters.take_gradient(3, 1.0)
        assert norm == torch.nn.utils.clip_grad_norm_(plain, 1.0)
        masters.update(3e-3)
        reference.param_groups[0]["lr"] = 3e-3
        reference.step()
        for part, expected in zip(masters.parts.values(), plain, strict=True):
            assert torch.equal(part.view(torch.int32), expected.detach().view(torch.int32))


def test_a_copy_in_float32_gives_the_same_bits():
    narrow, wide = new_step(), new_step(compute_copy="f32")
    for seed in range(3):
        batch = ragged_batch(seed)
        assert narrow.step(batch).loss == wide.step(batch).loss
    assert same(narrow._masters.parts, wide._masters.parts)
    assert same(bits(narrow), bits(wide))
    assert {weight.dtype for weight in narrow._weights.values()} == {torch.bfloat16}
    assert {weight.dtype for weight in wide._weights.values()} == {torch.float32}


def test_a_gradient_in_bf16_is_near_the_one_in_float32_and_only_of_one_micro_batch():
    batch = ragged_batch(0)
    plain = new_step(micro_batch_tokens=2**20)
    narrow = new_step(micro_batch_tokens=2**20, gradient_dtype="bf16")
    assert narrow.step(batch).gradient_norm == pytest.approx(plain.step(batch).gradient_norm, rel=0.01)
    first, second = (step.checkpoint().tensors for step in (plain, narrow))
    moments = [name for name in first if name.startswith("moment1.")]
    assert any(not torch.equal(first[name], second[name]) for name in moments)
    for name in moments:
        torch.testing.assert_close(first[name], second[name], rtol=0.02, atol=1e-6)
    added, summed = new_step(), new_step(gradient_dtype="bf16")
    added.step(batch)
    summed.step(batch)
    assert same(bits(added), bits(summed)), "several micro-batches are added up in float32"


def test_a_head_that_is_upcast_in_parts_gives_the_same_gradient(monkeypatch):
    whole, parts = new_step(), new_step()
    batch = ragged_batch(0)
    found = whole.step(batch)
    monkeypatch.setattr(output_head, "UPCAST", 256)
    assert parts.step(batch).gradient_norm == pytest.approx(found.gradient_norm, rel=1e-5)


def test_a_layer_is_upcast_only_while_it_computes_and_saved_in_bf16():
    linear = torch.nn.Linear(64, 64).bfloat16()
    upcast = layer_upcast.LayerUpcast(linear)
    for weight in linear.parameters():
        weight.grad_dtype = torch.float32
    states = torch.randn(8, 64, requires_grad=True)
    kept = []
    pack = upcast._pack
    upcast._pack = lambda saved: kept.append(pack(saved)) or kept[-1]
    with upcast.saving_bf16():
        found = linear(states)
    assert [each[0] is linear.weight for each in kept if isinstance(each, tuple)] == [True]
    assert not any(each.shape == (64, 64) for each in kept if not isinstance(each, tuple))
    assert linear.weight.dtype == torch.bfloat16
    found.square().sum().backward()
    plain = torch.nn.functional.linear(states.detach(), linear.weight.float(), linear.bias.float())
    assert torch.equal(found, plain)
    torch.testing.assert_close(linear.weight.grad, (2 * plain).t() @ states.detach())
    torch.testing.assert_close(states.grad, 2 * plain @ linear.weight.float())


def test_an_error_inside_a_layer_leaves_its_weights_as_they_were():
    linear = torch.nn.Linear(4, 4).bfloat16()
    held = linear.weight
    layer_upcast.LayerUpcast(linear)
    with pytest.raises(RuntimeError):
        linear(torch.zeros(1, 5))
    assert linear.weight is held
    assert linear(torch.zeros(1, 4)).dtype == torch.float32


def test_an_embedding_upcasts_the_rows_it_is_asked_for_and_passes_over_padding():
    torch.manual_seed(0)
    for padding in (None, 3):
        table = torch.nn.Embedding(10, 4, padding_idx=padding).bfloat16()
        plain = torch.nn.Embedding.from_pretrained(
            table.weight.detach().float(), freeze=False, padding_idx=padding
        )
        table.weight.grad_dtype = torch.float32
        layer_upcast.LayerUpcast(table)
        ids = torch.tensor([[3, 1, 1], [9, 3, 0]])
        slopes = torch.randn(2, 3, 4)
        for module in (table, plain):
            (module(ids) * slopes).sum().backward()
        assert torch.equal(table(ids), plain(ids))
        assert torch.equal(table.weight.grad, plain.weight.grad)
        assert table.padding_idx == padding
