"""Sequences that begin alike, in one row: who sees whom, and the same numbers as one by one."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_node.engine.llama_decoder import LlamaDecoder
from echo_node.engine.prefix_sharing import shared_prompt, shared_row
from echo_node.engine.torch_decoder import TorchDecoder
from tests.engine import models

SEQUENCES = st.tuples(
    st.lists(st.integers(0, 31), min_size=1, max_size=8),
    st.lists(st.lists(st.integers(0, 31), min_size=1, max_size=8), min_size=2, max_size=5),
)


@given(SEQUENCES)
def test_every_place_sees_the_ids_before_it_in_its_own_sequence_and_nothing_else(told):
    prompt, endings = told
    sequences = [np.array(prompt + ending) for ending in endings]
    row = shared_row(sequences, [len(ending) for ending in endings])
    wanted = iter(row.wanted)
    for sequence, ending in zip(sequences, endings, strict=True):
        for last in range(len(prompt), len(prompt) + len(ending)):
            place = next(wanted)
            seen = np.flatnonzero(row.seen[place])
            assert row.ids[seen].tolist() == sequence[: last + 1].tolist()
            assert row.positions[seen].tolist() == list(range(last + 1))
    assert next(wanted, None) is None


def test_what_has_nothing_in_common_or_is_alone_shares_no_row():
    assert shared_row([np.array([1, 2]), np.array([2, 2])], [1, 1]) is None
    assert shared_row([np.array([1, 2])], [1]) is None
    assert (
        shared_row([np.array([1, 2]), np.array([1, 3])], [2, 1]) is None
    )  # the first id of one is asked about


WINDOW = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}


@pytest.mark.parametrize(
    ("family", "settings"),
    [("Llama", {}), ("Qwen2", {}), ("Qwen3", {}), ("Qwen2", WINDOW), ("Mistral", {"sliding_window": 3})],
)
def test_a_shared_row_gives_the_numbers_of_one_by_one(family, settings, tmp_path, monkeypatch):
    decoder = TorchDecoder(models.folder(tmp_path, family, **settings), device="cpu", threads=1)
    decoder.load(models.weights(tmp_path))
    shared, through = [], decoder._through
    monkeypatch.setattr(
        decoder, "_through", lambda row, cache: shared.append(row) or through(row, cache=cache)
    )
    draws = np.random.default_rng(1)
    prompt = draws.integers(0, 32, 7)
    sequences = [np.concatenate((prompt, draws.integers(0, 32, size))) for size in (9, 1, 5)]
    keep = [10, 1, 3]
    together = decoder.score_many(sequences, keep)
    assert len(shared) == 1
    one_by_one = [decoder.score(ids, last) for ids, last in zip(sequences, keep, strict=True)]
    np.testing.assert_allclose(together, np.concatenate(one_by_one), rtol=0, atol=2e-5)


def test_a_beginning_is_shared_where_it_saves_enough_and_leaves_each_prompt_an_id():
    assert shared_prompt([np.arange(9), np.arange(9)]) == 8
    assert shared_prompt([np.arange(9), np.arange(5), np.arange(9)]) == 4
    assert shared_prompt([np.arange(9)]) == 0
    assert shared_prompt([np.array([1, *range(40)]), np.array([1, *range(40, 80)])]) == 0, "it saves one id"


@pytest.mark.parametrize(
    ("make", "family", "settings"),
    [
        (partial(LlamaDecoder, kind="f32"), "Llama", {}),
        (partial(LlamaDecoder, kind="f32"), "Qwen3", {}),
        (TorchDecoder, "Llama", {}),
        (TorchDecoder, "Qwen2", WINDOW),
        (TorchDecoder, "Mistral", {"sliding_window": 3}),
    ],
)
def test_prompts_that_begin_alike_are_filled_in_once_and_go_on_as_one_by_one(
    make, family, settings, tmp_path
):
    decoder = make(models.folder(tmp_path, family, **settings), device="cpu", threads=1)
    decoder.load(models.weights(tmp_path))
    draws = np.random.default_rng(2)
    start = draws.integers(0, 32, 12)
    prompts = [np.concatenate((start, draws.integers(0, 32, size))) for size in (3, 1, 6, 1)]
    rows, steps = [2, 0, 3, 1], draws.integers(0, 32, (3, 4))
    assert shared_prompt(prompts) >= 12
    decoder.make_room(6, 40)
    decoder.prefill([4], [prompts[0]])  # another row runs already
    found = [decoder.prefill(rows, prompts).copy()]
    decoder.copy(2, 4, prompts[0].size)
    found += [decoder.decode(np.append(step, step[2])).copy() for step in steps]
    for place, (row, prompt) in enumerate(zip(rows, prompts, strict=True)):
        ids = np.concatenate((prompt, steps[:, row]))
        alone = decoder.score(ids, len(steps) + 1).copy()
        together = [found[0][place], *(after[row] for after in found[1:])]
        np.testing.assert_allclose(np.stack(together), alone, rtol=0, atol=2e-5)
    for after in found[1:]:
        np.testing.assert_allclose(
            after[4], after[2], rtol=0, atol=2e-5, err_msg="a copied row goes on alike"
        )
    decoder.close()
