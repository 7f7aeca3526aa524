"""Learning-rate schedules beside those of transformers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import get_scheduler

from echo_node.runs.algorithm import StepSettings
from echo_node.trainer.lr_schedule import learning_rate_at


@pytest.mark.parametrize("name", ["linear", "cosine"])
def test_after_the_warm_up_the_learning_rate_is_that_of_transformers(name):
    weight = torch.nn.Parameter(torch.zeros(1))
    optimiser = torch.optim.SGD([weight], lr=3e-4)
    theirs = get_scheduler(name, optimiser, num_warmup_steps=7, num_training_steps=40)
    settings = StepSettings(learning_rate=3e-4, warm_up=7, schedule=name, decay_steps=40)
    for step in range(50):
        if 7 <= step <= 40:  # theirs begins the warm-up at 0, and a cosine of theirs rises again
            assert learning_rate_at(settings, step) == pytest.approx(
                optimiser.param_groups[0]["lr"], abs=1e-12
            )
        optimiser.step()
        theirs.step()
    assert learning_rate_at(settings, 10**6) == 0.0


@given(
    st.sampled_from(["constant", "linear", "cosine"]),
    st.integers(0, 30),
    st.integers(1, 100),
    st.floats(0.0, 1.0),
)
def test_the_rate_rises_to_its_height_and_never_falls_below_its_end(schedule, warm_up, decay, final):
    settings = StepSettings(warm_up=warm_up, schedule=schedule, decay_steps=warm_up + decay, final_rate=final)
    rates = [learning_rate_at(settings, step) / settings.learning_rate for step in range(warm_up + decay + 3)]
    assert rates[max(warm_up - 1, 0)] == pytest.approx(1.0)
    assert rates[:warm_up] == sorted(rates[:warm_up])
    assert rates[warm_up:] == sorted(rates[warm_up:], reverse=True)
    assert rates[-1] == pytest.approx(1.0 if schedule == "constant" else final)
