"""Engine selection: the best class that fits into memory, and only as many groups as fit."""

from __future__ import annotations

import pytest

from echo_node.runs.engine_selection import MOST_SLOTS, Needs, select_engine, select_within
from echo_node.runtime.resource_limits import ResourceLimits
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
    choice = select_within(gigabytes * 1e9, "are free", CLASSES, BILLION)
    assert (choice.engine_class, choice.slots) == (engine_class, slots)
    larger = CLASSES[: CLASSES.index(engine_class)]
    assert all(each in choice.why for each in larger), "what was passed over is named"
    assert f"{gigabytes:.2f} GB that are free" in choice.why


def test_what_the_person_says_is_done_and_what_it_takes_is_said():
    choice = select_within(64e9, "are free", ["torch/f32"], BILLION, slots=40)
    assert (choice.engine_class, choice.slots) == ("torch/f32", 40)
    assert "about 20.50 GB of the 64.00 GB" in choice.why


def test_a_model_is_measured_by_its_own_files_and_by_what_the_run_asks_for():
    needs, sampling = Needs.of(RUN), RUN.manifest.sampling
    assert 300_000 < needs.parameters < 400_000
    each_token = 2 * 3 * 2 * 32
    tokens = sampling.group_size * (sampling.max_prompt + sampling.max_tokens)
    assert needs.group_values == each_token * tokens


def test_a_bound_on_memory_is_kept_where_another_class_keeps_it():
    tight = select_engine(RUN, ResourceLimits(memory=300_000_000, device="cpu"))
    assert tight.engine_class.startswith("llama/")
    assert "--max-memory allows" in tight.why
    assert tight.slots == MOST_SLOTS
    one = select_engine(RUN, ResourceLimits(memory=300_000_000, device="cpu"), "torch/f32", 3)
    assert (one.engine_class, one.slots) == ("torch/f32", 3), "a person's word is above that"
