"""Attention in blocks: the numbers of a dense mask, without a mask as large as a row's square."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from echo_node.runs.algorithm import StepSettings
from echo_node.trainer import tree_attention
from echo_node.trainer.step import TrainStep
from echo_node.trainer.tree_attention import EVERYWHERE, BlockAttention, blocks_of, flex_mask, seen
from echo_node.trainer.tree_packing import Row, TrainingGroup, micro_batches, pack, rows_of
from tests.engine import models
from tests.trainer.test_output_head import Alive

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def one_thread():
    """Small operations on several threads wait for each other more than they compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def random_row(seed, *, trunk=20, completions=6, longest=60):
    """A tree whose completions branch off from earlier ones, in no order."""
    draws = np.random.default_rng(seed)
    row, earlier = Row(draws.integers(0, 50, trunk).tolist()), [[]]
    for _ in range(completions):
        stem = earlier[draws.integers(len(earlier))]
        ids = (
            stem[: draws.integers(len(stem) + 1)] + draws.integers(0, 50, draws.integers(1, longest)).tolist()
        )
        row.grow(ids, np.zeros(len(ids)), 0.0)
        earlier.append(ids)
    return row


def ancestors(row):
    """[places, places], in order of insertion: true at the ancestors of a place and at itself."""
    found = np.eye(len(row), dtype=np.bool_)
    for place, parent in enumerate(row.parents[1:], start=1):
        found[place] |= found[parent]
    return found


def whole(packed, window=EVERYWHERE):
    every = slice(0, packed.ends.shape[1])
    return seen(packed.ends, packed.position_ids, window, every, every)


@pytest.mark.parametrize("seed", range(8))
def test_ends_in_preorder_say_who_sees_whom(seed):
    row = random_row(seed)
    places, _ = row.preorder()
    assert sorted(places) == list(range(len(row)))
    found = whole(pack([row], CPU))[0].numpy()
    assert (found[np.ix_(places, places)] == ancestors(row)).all()


def test_rows_on_one_line_do_not_see_each_other():
    rows = [random_row(seed, completions=1 + 2 * seed) for seed in range(6)]
    (together,) = micro_batches(rows, 100_000)
    packed = pack(together, CPU)
    assert len(packed.ids) < len(rows)
    assert packed.ids.shape[1] == max(map(len, rows))
    alone = sum(int(ancestors(row).sum()) for row in rows)
    padding = packed.ids.numel() - sum(map(len, rows))
    assert int(whole(packed).sum()) == alone + padding


@pytest.mark.parametrize("tokens", [1, 300, 1000, 10**6])
def test_micro_batches_hold_each_row_once_on_at_most_so_many_places(tokens):
    rows = [random_row(seed, completions=1 + seed % 7) for seed in range(30)]
    found = list(micro_batches(rows, tokens))
    assert sorted(map(id, rows)) == sorted(id(row) for each in found for row in each)
    for each in found:
        assert pack(each, CPU).ids.numel() <= tokens or len(each) == 1
    if tokens == 1000:
        places = sum(pack(each, CPU).ids.numel() for each in found)
        assert places < 1.15 * sum(map(len, rows))


@pytest.mark.parametrize("window", [EVERYWHERE, 25, 1])
@pytest.mark.parametrize("size", [16, 50])
def test_blocks_are_left_out_only_if_nothing_in_them_is_seen(window, size):
    packed = pack([random_row(seed, completions=5) for seed in range(3)], CPU)
    blocks = blocks_of(packed.ends, packed.position_ids, window, size)
    exact = whole(packed, window)
    left_out = 0
    for row, own, other in np.ndindex(*blocks.some.shape):
        part = exact[row, own * size : (own + 1) * size, other * size : (other + 1) * size]
        assert blocks.some[row, own, other] or not part.any()
        assert part.all() or not blocks.all[row, own, other]
        left_out += own > other and not blocks.some[row, own, other]
    assert left_out
    assert blocks.all.any() or window < 2 * size or size == 50


@pytest.mark.parametrize("window", [EVERYWHERE, 25])
def test_the_block_mask_of_flex_attention_is_the_same(window):
    packed = pack([random_row(seed) for seed in range(3)], CPU)
    ours, exact = flex_mask(packed.ends, packed.position_ids, window), whole(packed, window)

    def visible(row, _head, query, key):
        return exact[row, query, key]

    rows, places = packed.ids.shape
    theirs = create_block_mask(visible, rows, None, places, places, device="cpu", BLOCK_SIZE=128)
    assert (ours.to_dense() >= theirs.to_dense()).all()
    at = torch.meshgrid(*(torch.arange(size) for size in exact.shape), indexing="ij")
    assert torch.equal(ours.mask_mod(at[0], None, at[1], at[2]), exact)


@pytest.mark.parametrize("cap", [0.0, 1.5])
@pytest.mark.parametrize("window", [EVERYWHERE, 25])
@pytest.mark.parametrize("groups", [1, 3])
def test_values_and_gradients_are_those_of_a_dense_mask(monkeypatch, cap, window, groups):
    monkeypatch.setattr(tree_attention, "BLOCK", 16)
    packed = pack([random_row(seed) for seed in range(3)], CPU)
    rows, places = packed.ids.shape
    draws = torch.Generator().manual_seed(0)

    def drawn(heads, size):
        shape = (rows, heads, places, size)
        return torch.randn(shape, generator=draws, dtype=torch.float64, requires_grad=True)

    query, key, value = drawn(2 * groups, 8), drawn(2, 8), drawn(2, 5)
    slope = torch.randn((rows, 2 * groups, places, 5), generator=draws, dtype=torch.float64)

    def dense():
        scores = query @ key.repeat_interleave(groups, dim=1).mT * 0.7
        if cap:
            scores = cap * torch.tanh(scores / cap)
        scores = scores.masked_fill(~whole(packed, window)[:, None], -torch.inf)
        return scores.softmax(dim=-1) @ value.repeat_interleave(groups, dim=1)

    given = packed.ends, packed.position_ids, window, 0.7, cap
    found = [
        (out, *torch.autograd.grad(out, (query, key, value), slope))
        for out in (dense(), BlockAttention.apply(query, key, value, *given))
    ]
    for theirs, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


def alive_bytes(tokens, row):
    """Most bytes of tensors at a time in a forward and a backward pass over one row."""
    packed = pack([row], CPU)
    places = packed.ids.shape[1]
    assert places >= tokens
    query, key, value = (torch.randn(1, heads, places, 4, requires_grad=True) for heads in (2, 1, 1))
    with Alive(query, key, value, packed.ends, packed.position_ids) as alive:
        given = packed.ends, packed.position_ids, EVERYWHERE, 0.5, 0.0
        BlockAttention.apply(query, key, value, *given).sum().backward()
    return alive.most, places


def test_memory_grows_with_the_places_of_a_row_and_not_with_their_square(monkeypatch):
    monkeypatch.setattr(tree_attention, "LONG", 10**9)
    few, places = alive_bytes(1000, random_row(0, trunk=1000))
    many, more = alive_bytes(3000, random_row(0, trunk=3000))
    assert many - few < 200 * (more - places)
    assert many < 0.2 * more**2 * 4 * 2


@pytest.mark.timeout(600)
def test_a_step_on_a_row_of_32768_tokens_takes_memory_in_proportion(tmp_path):
    shape = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    folder = models.folder(tmp_path / "model", "Llama", max_position_embeddings=40_000, **shape)
    settings = StepSettings(vocab_size=32, gradient_checkpointing=True)
    step = TrainStep(folder, settings, threads=1, device="cpu")
    draws = np.random.default_rng(0)
    peaks = []
    for tokens in (4096, 32_768):
        ids = [draws.integers(0, 32, length) for length in (tokens, 5)]
        mu = [np.full(len(each), -3.5) for each in ids]
        group = TrainingGroup(draws.integers(0, 32, 16), ids, mu, [1.0, 0.0])
        with Alive(*step._policy.parameters()) as alive:
            figures = step.step([group])
        assert figures.updated
        assert figures.tally.tokens == tokens + 5
        peaks.append(alive.most)
    assert peaks[1] < 10 * peaks[0]
    assert peaks[1] < 0.02 * 4 * 32_768**2  # a dense mask alone


def test_a_group_without_completions_has_no_row():
    assert list(rows_of(TrainingGroup([1], [], [], []), [], 10)) == []
