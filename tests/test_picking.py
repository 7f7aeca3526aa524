"""What a sampler works with: the best that fits into the memory that there is, and no more groups than fit beside it."""

from __future__ import annotations

import pytest

from echo_node.allowance import Allowance
from echo_node.picking import MOST_SLOTS, Needs, pick, pick_within
from tests.crafting import open_run

RUN = open_run()
CLASSES = ["torch/f32", "llama/f16", "llama/q4_0"]
BILLION = Needs(parameters=1_000_000_000, group_values=100_000_000)


@pytest.mark.parametrize(
    ("gigabytes", "engine_class", "slots"),
    [
        (64, "torch/f32", MOST_SLOTS),
        (6.5, "torch/f32", 5),
        (4.7, "llama/f16", 13),
        (2.3, "llama/f16", 1),
        (2.2, "llama/q4_0", 7),
        (0.1, "llama/q4_0", 1),
    ],
)
def test_the_first_class_that_fits_is_picked_with_as_many_groups_as_fit_beside_it(
    gigabytes, engine_class, slots
):
    picked = pick_within(gigabytes * 1e9, "are free", CLASSES, BILLION)
    assert (picked.engine_class, picked.slots) == (engine_class, slots)
    larger = CLASSES[: CLASSES.index(engine_class)]
    assert all(each in picked.why for each in larger), "what was passed over is named"
    assert f"{gigabytes:.2f} GB that are free" in picked.why


def test_what_the_person_says_is_done_and_what_it_takes_is_said():
    picked = pick_within(64e9, "are free", ["torch/f32"], BILLION, slots=40)
    assert (picked.engine_class, picked.slots) == ("torch/f32", 40)
    assert "about 20.50 GB of the 64.00 GB" in picked.why


def test_a_model_is_measured_by_its_own_files_and_by_what_the_run_asks_for():
    needs, sampling = Needs.of(RUN), RUN.told.sampling
    assert 300_000 < needs.parameters < 400_000
    each_token = 2 * 3 * 2 * 32
    tokens = sampling.group_size * (sampling.max_prompt + sampling.max_tokens)
    assert needs.group_values == each_token * tokens


def test_a_bound_on_memory_is_kept_where_another_class_keeps_it():
    tight = pick(RUN, Allowance(memory=300_000_000, device="cpu"))
    assert tight.engine_class.startswith("llama/")
    assert "--max-memory allows" in tight.why
    assert tight.slots == MOST_SLOTS
    one = pick(RUN, Allowance(memory=300_000_000, device="cpu"), "torch/f32", 3)
    assert (one.engine_class, one.slots) == ("torch/f32", 3), "a person's word is above that"
