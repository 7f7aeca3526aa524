"""The numbers of an algorithm: every one reaches the step, and a wrong one is named."""

from __future__ import annotations

import dataclasses

import pytest

from echo_node.errors import ConfigError
from echo_node.runs.algorithm import (
    DEFAULT_BATCH,
    LOSSES,
    RANGES,
    SPREAD,
    GrpoSettings,
    StepSettings,
    check_ranges,
    layout_for,
    training_settings,
)
from protocol.manifest import Algorithm, Manifest
from tests.crafting import changed_run, open_run

RUN = open_run()


def manifest(name: str = "grpo", version: str = "1", **params) -> Manifest:
    """One that has gone over the wire, so that its values are what a node reads."""
    return changed_run(RUN, algorithm=Algorithm(name, params, version)).manifest


def test_without_parameters_the_defaults_hold_and_the_manifest_says_the_rest():
    settings = training_settings(manifest())
    assert settings.batch_groups == DEFAULT_BATCH
    spreads, gap_caps = settings.step.spreads, settings.step.gap_caps
    assert dict(gap_caps) == {each.engine: each.gap_most for each in manifest().engines}
    grpo = GrpoSettings(completion_limit=RUN.manifest.sampling.max_tokens)
    assert settings.step == StepSettings(
        temperature=1.0, vocab_size=16, spreads=spreads, gap_caps=gap_caps, grpo=grpo
    )


def test_every_number_of_the_step_and_of_the_loss_can_be_set():
    told = {
        "learning_rate": 1e-3,
        "warm_up": 3,
        "schedule": "cosine",
        "decay_steps": 500,
        "final_rate": 0.1,
        "ratio": "sequence",
        "clip": "cispo",
        "betas": [0.8, 0.95],
        "epsilon": 1e-6,
        "weight_decay": 0.1,
        "gradient_norm": 2.0,
        "row_tokens": 64,
        "micro_batch_tokens": 128,
        "clip_low": 0.7,
        "clip_high": 1.5,
        "dual_clip": 4.0,
        "entropy": 0.0,
        "advantage": "normalised",
        "normalise": "sequence",
        "veto": 0.0,
        "kl": 0.5,
        "importance": "decoupled",
        "tis_cap": 3.0,
        "icepop": True,
        "icepop_low": 0.4,
        "icepop_high": 4.0,
        "geometric": True,
        "geometric_floor": 0.02,
        "geometric_sigmas": 5.0,
        "zero_advantage": "skip",
        "overlong_buffer": 2,
        "overlong_penalty": 0.5,
        "overlong_filter": True,
        "gradient_checkpointing": True,
        "mixed_precision": "off",
        "compute_copy": "bf16",
        "gradient_dtype": "bf16",
    }
    settings = training_settings(manifest(batch_groups=7, dynamic_sampling=3, **told))
    assert (settings.batch_groups, settings.dynamic_sampling) == (7, 3)
    named = {field.name for field in (*dataclasses.fields(StepSettings), *dataclasses.fields(GrpoSettings))}
    assert named - told.keys() == {
        "temperature",
        "vocab_size",
        "spreads",
        "gap_caps",
        "adapter_norm",
        "grpo",
        "completion_limit",
    }, "a new number belongs in this test"
    for name, value in told.items():
        holder = settings.step if hasattr(settings.step, name) else settings.step.grpo
        assert getattr(holder, name) == (tuple(value) if isinstance(value, list) else value)


def test_every_number_of_the_algorithm_has_a_range_and_its_default_is_within():
    fields = [*dataclasses.fields(StepSettings), *dataclasses.fields(GrpoSettings)]
    elsewhere = {
        "temperature",
        "vocab_size",
        "spreads",
        "gap_caps",
        "grpo",
        "completion_limit",
        "adapter_norm",
    }
    numbers = {
        field.name: field.default
        for field in fields
        if field.name not in elsewhere and type(field.default) in {int, float, tuple}
    }
    assert RANGES.keys() == {"batch_groups", "dynamic_sampling", *numbers}
    check_ranges({"batch_groups": DEFAULT_BATCH, **numbers})
    check_ranges({"clip_high": 9e9, "dual_clip": 9e9, "kl": 10, "learning_rate": 1e-6})


@pytest.mark.parametrize("name", sorted(RANGES))
@pytest.mark.parametrize("value", [1e300, -1e300, float("inf"), float("nan"), 10**30])
def test_a_number_beyond_its_range_is_named_with_what_is_allowed(name, value):
    with pytest.raises(ConfigError, match=rf"algorithm\.{name} is .* must be from .* to "):
        check_ranges({name: [0.5, value] if name == "betas" else value})


def test_a_whole_number_does_where_a_real_one_is_meant():
    settings = training_settings(manifest(gradient_norm=2, betas=[0, 0.5]))
    assert settings.step.gradient_norm == 2.0
    assert isinstance(settings.step.gradient_norm, float)
    assert settings.step.betas == (0.0, 0.5)


@pytest.mark.parametrize(
    ("params", "named"),
    [
        ({"learning_rat": 1e-3}, "learning_rat"),
        ({"dynamic_sampling": 1}, "dynamic_sampling is 1, not a whole number from 2 to 64, nor 0"),
        ({"dynamic_sampling": True}, "dynamic_sampling is True"),
        ({"dynamic_sampling": 65}, "dynamic_sampling is 65"),
        ({"overlong_buffer": 4000}, "overlong_buffer is 4000, and the run's longest completion has"),
        ({"overlong_penalty": -1.0}, "overlong_penalty"),
        ({"overlong_filter": 1}, "overlong_filter is 1"),
        ({"temperature": 0.5}, "temperature"),
        ({"vocab_size": 8}, "vocab_size"),
        ({"grpo": {"kl": 0.1}}, "grpo"),
        ({"learning_rate": "fast"}, "learning_rate"),
        ({"learning_rate": True}, "learning_rate"),
        ({"learning_rate": None}, "learning_rate"),
        ({"learning_rate": 0.0}, "learning_rate"),
        ({"learning_rate": -1}, "learning_rate"),
        ({"warm_up": 1.5}, "warm_up"),
        ({"warm_up": -1}, "warm_up"),
        ({"warm_up": True}, "warm_up"),
        ({"betas": 0.9}, "betas"),
        ({"betas": [0.9]}, "betas"),
        ({"betas": [0.9, 0.99, 0.999]}, "betas"),
        ({"betas": ["a", "b"]}, "betas"),
        ({"betas": [True, False]}, "betas"),
        ({"clip_low": 1.1}, "clip"),
        ({"advantage": "median"}, "advantage"),
        ({"normalise": 1}, "normalise"),
        ({"veto": -0.1}, "veto"),
        ({"row_tokens": 0}, "row_tokens"),
        ({"betas": [0.9, 1.0]}, "betas"),
        ({"importance": "off"}, "importance"),
        ({"tis_cap": 0.0}, "tis_cap"),
        ({"icepop": 1}, "icepop"),
        ({"icepop_low": 2.0}, "icepop"),
        ({"geometric": "yes"}, "geometric"),
        ({"geometric_floor": -1}, "geometric_floor"),
        ({"zero_advantage": False}, "zero_advantage"),
        ({"gradient_checkpointing": 0}, "gradient_checkpointing"),
        ({"mixed_precision": "on"}, "mixed_precision"),
        ({"compute_copy": "f16"}, "compute_copy"),
        ({"compute_copy": "f32", "gradient_dtype": "bf16"}, "gradient_dtype"),
        ({"schedule": "square"}, "schedule"),
        ({"schedule": "linear"}, "decay_steps"),
        ({"schedule": "cosine", "warm_up": 10, "decay_steps": 10}, "decay_steps"),
        ({"final_rate": 1.5}, "final_rate"),
        ({"ratio": "word"}, "ratio"),
        ({"clip": "none"}, "clip"),
        ({"completion_limit": 3}, "completion_limit"),
        ({"loss": "ppo"}, "loss"),
        ({"loss": 1}, "loss"),
        ({"batch_groups": 0}, "batch_groups"),
        ({"batch_groups": 4097}, "batch_groups"),
        ({"batch_groups": 2.0}, "batch_groups"),
        ({"batch_groups": "many"}, "batch_groups"),
        ({"batch_groups": True}, "batch_groups"),
    ],
)
def test_a_wrong_number_is_one_error_that_names_it(params, named):
    with pytest.raises(ConfigError) as caught:
        training_settings(manifest(**params))
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("loss", LOSSES)
def test_a_named_loss_sets_its_numbers_and_what_the_run_sets_stands_above_them(loss):
    step = training_settings(manifest(loss=loss)).step
    assert {name: getattr(step.grpo, name) for name in LOSSES[loss]} == dict(LOSSES[loss])
    untouched = GrpoSettings(completion_limit=RUN.manifest.sampling.max_tokens)
    assert dataclasses.replace(untouched, **LOSSES[loss]) == step.grpo
    own = training_settings(manifest(loss=loss, entropy=0.25, normalise="token")).step.grpo
    assert (own.entropy, own.normalise) == (0.25, "token")


def test_the_published_losses_differ_from_each_other():
    assert len({repr(training_settings(manifest(loss=loss)).step.grpo) for loss in LOSSES}) == len(LOSSES)


@pytest.mark.parametrize(("name", "version"), [("ppo", "1"), ("grpo", "2")])
def test_an_algorithm_that_this_node_does_not_have_is_refused_with_advice(name, version):
    with pytest.raises(ConfigError, match="upgrade"):
        training_settings(manifest(name, version))


def test_how_far_a_class_may_spread_follows_from_the_distance_that_the_manifest_allows_it():
    told = manifest()
    step = training_settings(told).step
    for each in told.engines:
        assert step.spread_of(each.engine) == SPREAD * each.d_mean
    assert step.spread_of("of no manifest") == 0.0
    coarse = dataclasses.replace(told.engines[0], d_mean=0.0064)
    wide = training_settings(dataclasses.replace(told, engines=(coarse,))).step
    measured = 0.067  # the mean gap of q8_0's log-probabilities, at that distance
    assert 1.25 * measured < wide.spread_of(coarse.engine) < 3 * measured


def test_large_models_have_whole_groups_in_a_row_and_recompute_their_blocks():
    assert layout_for(10_000_000) == {}
    mid, large = (StepSettings(**layout_for(size)) for size in (135_000_000, 494_000_000))
    assert mid.row_tokens >= 128 + 8 * 128
    assert not mid.gradient_checkpointing
    assert large.gradient_checkpointing
    assert large.row_tokens <= large.micro_batch_tokens
