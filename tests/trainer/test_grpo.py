"""The loss against an independent reference: float64, token by token."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from echo_node.runs.algorithm import GrpoSettings
from echo_node.trainer.grpo import GrpoTally, advantages, clamp_mu, grpo_loss, teaches


def reference_loss(settings, case):
    """Return the loss, one token at a time.

    `old` is a constant: the policy before the step.
    """
    terms = []
    for row, advantage in enumerate(case["advantage"]):
        of_row = reference_row(settings, {name: value[row] for name, value in case.items()}, advantage)
        if of_row:
            terms.append(of_row)
    if not terms:
        return 0.0
    if settings.normalise == "sequence":
        return sum(sum(of_row) / len(of_row) for of_row in terms) / len(terms)
    return sum(map(sum, terms)) / sum(map(len, terms))


def reference_row(settings, of, advantage):
    """The terms of one completion's tokens, of those that count."""
    tokens = [t for t in range(len(of["mask"])) if of["mask"][t]]
    weights = {t: math.exp(of["old"][t] - of["mu"][t]) for t in tokens}
    if not tokens or any(weight < settings.veto for weight in weights.values()):
        return []
    if settings.geometric and of["current"]:
        mean = sum(of["old"][t] - of["mu"][t] for t in tokens) / len(tokens)
        bound = settings.geometric_sigmas * of["sigma"] / math.sqrt(len(tokens))
        if abs(mean) > max(settings.geometric_floor, bound):
            return []
    terms = []
    for t in tokens:
        if settings.icepop and not settings.icepop_low <= weights[t] <= settings.icepop_high:
            continue
        decoupled = settings.importance == "decoupled"
        ratio = math.exp(of["log_probs"][t] - (of["old"][t] if decoupled else of["mu"][t]))
        clipped = min(max(ratio, settings.clip_low), settings.clip_high)
        pushed = min(ratio * advantage, clipped * advantage)
        term = -(max(pushed, settings.dual_clip * advantage) if advantage < 0 else pushed)
        if decoupled:
            term *= min(weights[t], settings.tis_cap)
        term -= settings.entropy * of["entropies"][t]
        if settings.kl:
            away = of["reference"][t] - of["log_probs"][t]
            term += settings.kl * (math.exp(away) - away - 1)
        terms.append(term)
    return terms


def reference_gradient(settings, case, name, nudge=1e-6):
    """By central differences of the reference."""
    gradient = np.zeros_like(case[name])
    for place in np.ndindex(*gradient.shape):
        up, down = case[name].copy(), case[name].copy()
        up[place] += nudge
        down[place] -= nudge
        higher, lower = (reference_loss(settings, {**case, name: moved}) for moved in (up, down))
        gradient[place] = (higher - lower) / (2 * nudge)
    return gradient


def on_torch(settings, case, dtype=torch.float64):
    """Our loss, and its gradients by the log-probabilities and the entropies."""
    inputs = {
        name: torch.tensor(value, dtype=torch.bool if value.dtype == bool else dtype)
        for name, value in case.items()
    }
    inputs["log_probs"].requires_grad_()
    inputs["entropies"].requires_grad_()
    result = grpo_loss(settings, **inputs)
    result.loss.backward()
    return result, inputs["log_probs"].grad, inputs["entropies"].grad


def random_case(seed, rows, tokens, *, off_policy=0.5, foul=0.0, gone=0.0):
    """Return random inputs.

    `off_policy` is how far samplers are from the policy, `gone` how far it has moved since the step
    began.
    """
    draws = np.random.default_rng(seed)
    log_probs = -draws.exponential(1.0, (rows, tokens))
    mu = log_probs - draws.normal(0.0, off_policy, (rows, tokens))
    mu = np.where(draws.random((rows, tokens)) < foul, log_probs + 12.0, mu)  # e^-12 is below the veto
    return {
        "log_probs": log_probs,
        "entropies": draws.random((rows, tokens)),
        "mu": mu,
        "mask": np.arange(tokens) < draws.integers(0, tokens + 1, (rows, 1)),
        "advantage": draws.normal(0.0, 1.0, rows),
        "reference": log_probs + draws.normal(0.0, 0.3, (rows, tokens)),
        "old": log_probs + draws.normal(0.0, gone, (rows, tokens)),
        "current": draws.random(rows) < 0.7,
        "sigma": draws.choice([0.0, 0.1, 0.5], rows),
    }


some_settings = st.builds(
    GrpoSettings,
    clip_low=st.sampled_from([0.0, 0.5, 0.8]),
    clip_high=st.sampled_from([1.0, 1.28, 4.0]),
    dual_clip=st.sampled_from([4.0, 5.0, 100.0]),
    entropy=st.sampled_from([0.0, 0.01, 0.3]),
    normalise=st.sampled_from(["token", "sequence"]),
    veto=st.sampled_from([0.0, 1e-4]),
    kl=st.sampled_from([0.0, 0.1]),
    importance=st.sampled_from(["direct", "decoupled"]),
    tis_cap=st.sampled_from([1.0, 2.0]),
    icepop=st.booleans(),
    icepop_low=st.sampled_from([0.5, 0.9]),
    icepop_high=st.sampled_from([1.1, 5.0]),
    geometric=st.booleans(),
    geometric_floor=st.sampled_from([0.01, 0.2]),
    geometric_sigmas=st.sampled_from([1.0, 4.0]),
)
some_cases = st.builds(
    random_case,
    st.integers(0, 2**32),
    st.integers(1, 5),
    st.integers(1, 6),
    off_policy=st.sampled_from([0.0, 0.2, 1.0]),
    foul=st.sampled_from([0.0, 0.1]),
    gone=st.sampled_from([0.0, 0.3]),
)


def stands_on_an_edge(settings, case):
    """Return whether a ratio is at an edge, where rounding decides between two slopes."""
    ratio = np.exp(case["log_probs"] - case["mu"])
    moved = np.exp(case["log_probs"] - case["old"])
    weight = np.exp(case["old"] - case["mu"])
    edges = (settings.clip_low, settings.clip_high, settings.dual_clip)
    near = [np.abs(values - edge).min() < 1e-5 for values in (ratio, moved) for edge in edges]
    bounds = (settings.icepop_low, settings.icepop_high)
    near += [np.abs(weight - bound).min() < 1e-5 for bound in bounds if settings.icepop]
    for row, (shown, sigma) in enumerate(zip(case["mask"], case["sigma"], strict=True)):
        if settings.geometric and shown.any():
            mean = (case["old"] - case["mu"])[row][shown].mean()
            bound = max(settings.geometric_floor, settings.geometric_sigmas * sigma / math.sqrt(shown.sum()))
            near.append(abs(abs(mean) - bound) < 1e-5)
    return any(near)


@given(some_settings, some_cases)
def test_loss_and_gradient_equal_the_reference(settings, case):
    assume(not stands_on_an_edge(settings, case))
    result, by_log_probs, by_entropies = on_torch(settings, case)
    assert result.loss.item() == pytest.approx(reference_loss(settings, case), rel=1e-9, abs=1e-9)
    np.testing.assert_allclose(
        by_log_probs, reference_gradient(settings, case, "log_probs"), rtol=1e-6, atol=1e-6
    )
    np.testing.assert_allclose(
        by_entropies, reference_gradient(settings, case, "entropies"), rtol=1e-6, atol=1e-6
    )


@given(some_settings, some_cases)
def test_in_float32_the_loss_is_still_the_reference_to_a_millionth(settings, case):
    assume(not stands_on_an_edge(dataclasses.replace(settings, clip_high=9e9, dual_clip=9e9), case))
    case = {name: value.astype(np.float32) if value.dtype == float else value for name, value in case.items()}
    result, _, _ = on_torch(settings, case, torch.float32)
    exact = {name: value.astype(float) if value.dtype != bool else value for name, value in case.items()}
    assert result.loss.item() == pytest.approx(reference_loss(settings, exact), rel=1e-6, abs=1e-6)


@given(some_settings, some_cases, st.integers(0, 5))
def test_micro_batches_add_up_to_the_batch(settings, case, cut):
    whole, _, _ = on_torch(settings, case)
    parts = []
    for rows in (slice(None, cut), slice(cut, None)):
        part = {name: value[rows] for name, value in case.items()}
        if len(part["advantage"]):
            parts.append(on_torch(settings, part)[0])
    total, weight = sum(part.total.item() for part in parts), sum(part.weight for part in parts)
    assert weight == whole.weight
    assert total / max(weight, 1) == pytest.approx(whole.loss.item(), abs=1e-12)
    added = sum((part.tally for part in parts), GrpoTally())
    assert dataclasses.astuple(added) == pytest.approx(dataclasses.astuple(whole.tally))


def single_token(ratio, advantage, settings):
    case = {
        "log_probs": np.array([[-1.0]]),
        "entropies": np.array([[0.0]]),
        "mu": np.array([[-1.0 - math.log(ratio)]]),
        "mask": np.array([[True]]),
        "advantage": np.array([advantage]),
    }
    result, gradient, _ = on_torch(settings, case)
    return result.loss.item(), gradient.item(), result.tally.clip_share


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope", "cut"),
    [
        (1.0, 1.0, -1.0, -1.0, 0.0),
        (1.5, 1.0, -1.28, 0.0, 1.0),  # already likelier than the clip: pushed no further
        (0.5, 1.0, -0.5, -0.5, 0.0),
        (0.5, -1.0, 0.8, 0.0, 1.0),  # already unlikelier than the clip: pushed no further
        (1.5, -1.0, 1.5, 1.5, 0.0),
        (1e6, -1.0, 3.0, 0.0, 1.0),  # a claim that cannot be: it does not own the gradient
        (1.5, 0.0, 0.0, 0.0, 0.0),
    ],
)
def test_the_clip_stops_what_has_gone_far_enough_and_nothing_else(ratio, advantage, loss, slope, cut):
    assert single_token(ratio, advantage, GrpoSettings()) == pytest.approx((loss, slope, cut))


def test_a_batch_of_padding_has_no_loss_and_no_gradient():
    case = random_case(1, 3, 4)
    case["mask"][:] = False
    result, by_log_probs, by_entropies = on_torch(GrpoSettings(kl=0.1), case)
    assert (result.loss.item(), result.weight, result.tally) == (0.0, 0, GrpoTally())
    assert not by_log_probs.any()
    assert not by_entropies.any()


@pytest.mark.parametrize("rubbish", [math.nan, math.inf, -math.inf])
def test_whatever_stands_in_the_padding_is_ignored(rubbish):
    settings, case = GrpoSettings(kl=0.1), random_case(2, 4, 5)
    case["mask"][0, 3:] = False
    clean, slope, _ = on_torch(settings, case)
    for name in ("log_probs", "entropies", "mu", "reference", "old"):
        case[name] = np.where(case["mask"], case[name], rubbish)
    soiled, soiled_slope, _ = on_torch(settings, case)
    assert soiled.loss.item() == clean.loss.item()
    assert soiled.tally == clean.tally
    assert torch.equal(slope, soiled_slope)


def on_start(settings, case):
    """The loss where the policy itself is that of the start, so that none need be given."""
    return on_torch(settings, {name: value for name, value in case.items() if name != "old"})


@given(some_settings, some_cases)
def test_where_a_batch_is_stepped_on_once_the_policy_is_its_own_start(settings, case):
    case["old"] = case["log_probs"].copy()
    (left, *slopes), (right, *others) = on_torch(settings, case), on_start(settings, case)
    assert left.loss.item() == right.loss.item()
    assert left.tally == right.tally
    assert all(map(torch.equal, slopes, others))


@pytest.mark.parametrize(
    ("weight", "advantage", "slope", "truncated"),
    [(1.0, 1.0, -1.0, 0), (1.9, 1.0, -1.9, 0), (7.0, 1.0, -2.0, 1), (0.1, -1.0, 0.1, 0), (7.0, -1.0, 2.0, 1)],
)
def test_decoupled_the_gradient_is_that_of_the_truncated_weight(weight, advantage, slope, truncated):
    settings = GrpoSettings(importance="decoupled")
    assert single_token(weight, advantage, settings) == pytest.approx((slope, slope, 0.0))
    case = random_case(1, 1, 1)
    case["mask"][:] = True
    case["mu"] = case["log_probs"] - math.log(weight)
    assert on_start(settings, case)[0].tally.truncated == truncated


def test_decoupled_the_clip_is_on_what_the_step_itself_has_moved():
    settings, case = GrpoSettings(importance="decoupled", entropy=0.0), random_case(9, 1, 1)
    case["mask"][:], case["advantage"][:], case["mu"] = True, 1.0, case["log_probs"] - 0.1
    case["old"] = case["log_probs"] - math.log(1.5)  # the step has gone far enough already
    result, slope, _ = on_torch(settings, case)
    assert result.loss.item() == pytest.approx(-1.28 * math.exp(0.1) / 1.5)
    assert (slope.item(), result.tally.clip_share) == (0.0, 1.0)


@pytest.mark.parametrize("importance", ["direct", "decoupled"])
@pytest.mark.parametrize("normalise", ["token", "sequence"])
def test_a_token_outside_of_the_band_is_as_if_it_were_padding(importance, normalise):
    settings = GrpoSettings(importance=importance, normalise=normalise, icepop=True, kl=0.1)
    case = random_case(10, 3, 4, off_policy=0.1)
    case["mask"][:] = True
    case["mu"][0, 1] = case["log_probs"][0, 1] - math.log(5.1)
    case["mu"][2, 3] = case["log_probs"][2, 3] - math.log(0.49)
    result, slope, entropy_slope = on_start(settings, case)
    assert (result.tally.masked, result.tally.tokens, result.tally.vetoed) == (2, 10, 0)
    assert result.tally.mask_share == pytest.approx(2 / 12)
    case["mask"][0, 1] = case["mask"][2, 3] = False
    padded, other_slope, other_entropy_slope = on_start(settings, case)
    assert result.loss.item() == padded.loss.item()
    assert torch.equal(slope, other_slope)
    assert torch.equal(entropy_slope, other_entropy_slope)


@pytest.mark.parametrize(
    ("off", "tokens", "sigma", "current", "dropped"),
    [
        (0.009, 4, 0.0, True, 0),
        (0.011, 4, 0.0, True, 1),
        (-0.011, 4, 0.0, True, 1),
        (0.011, 4, 0.0, False, 0),  # of an older version: its policy lags, and no engine is at fault
        (0.19, 4, 0.1, True, 0),
        (0.21, 4, 0.1, True, 1),
        (0.19, 16, 0.1, True, 1),  # the mean of more tokens is surer
    ],
)
def test_a_completion_of_this_version_that_is_off_as_a_whole_is_dropped(off, tokens, sigma, current, dropped):
    settings, case = GrpoSettings(geometric=True), random_case(11, 2, tokens, off_policy=0.0)
    case["mask"][:], case["current"][:], case["sigma"][:] = True, current, sigma
    case["mu"][0] -= off
    result, slope, entropy_slope = on_start(settings, case)
    assert (result.tally.mistrusted, result.tally.tokens) == (dropped, (2 - dropped) * tokens)
    assert bool(slope[0].any()) == (not dropped)
    assert bool(entropy_slope[0].any()) == (not dropped)


def test_the_geometric_mask_needs_to_know_what_is_current():
    case = random_case(12, 1, 1)
    del case["current"]
    with pytest.raises(ValueError, match="current"):
        on_torch(GrpoSettings(geometric=True), case)


def test_a_group_of_equal_rewards_is_skipped_only_where_that_is_asked():
    keep, skip = GrpoSettings(), GrpoSettings(zero_advantage="skip")
    tenths = [0.1] * 10  # their mean is not one of them, and the differences from it are not 0
    assert any(advantages(tenths, "mean"))
    assert teaches(tenths, keep)
    assert not teaches(tenths, skip)
    assert teaches([0.1, 0.1, 0.2], skip)


def test_equal_rewards_teach_nothing():
    case = random_case(3, 3, 4)
    case["advantage"] = np.array(advantages([1.0, 1.0, 1.0], "normalised"))
    result, by_log_probs, _ = on_torch(GrpoSettings(entropy=0.0), case)
    assert result.loss.item() == 0.0
    assert not by_log_probs.any()


def test_a_vetoed_completion_is_as_if_it_had_never_come():
    for normalise in ("token", "sequence"):
        settings, case = GrpoSettings(normalise=normalise), random_case(4, 4, 5)
        case["mask"][:] = True
        case["mu"][1, 2] = case["log_probs"][1, 2] - math.log(0.99e-4)
        result, slope, entropy_slope = on_torch(settings, case)
        others, _, _ = on_torch(settings, {name: np.delete(value, 1, axis=0) for name, value in case.items()})
        assert (result.tally.vetoed, result.tally.completions, result.tally.tokens) == (1, 4, 15)
        assert result.loss.item() == pytest.approx(others.loss.item(), abs=1e-12)
        assert not slope[1].any()
        assert not entropy_slope[1].any()


def test_an_absurd_claim_cannot_make_the_loss_infinite():
    case = random_case(5, 2, 3)
    case["mask"][:] = True
    case["mu"][0, 0] = -1e30
    for advantage in (-1.0, 1.0):
        case["advantage"][:] = advantage
        result, slope, _ = on_torch(GrpoSettings(), case, torch.float32)
        assert result.loss.isfinite()
        assert slope.isfinite().all()


def test_on_policy_the_figures_say_so():
    case = random_case(6, 4, 5, off_policy=0.0)
    case["mask"][0] = True
    tally = on_torch(GrpoSettings(), case)[0].tally
    assert (tally.mean_ratio, tally.effective_sample_share) == pytest.approx((1.0, 1.0))
    assert (tally.mismatch_kl, tally.clip_share, tally.vetoed) == (0.0, 0.0, 0)
    assert tally.mean_entropy == pytest.approx(case["entropies"][case["mask"]].mean())


def test_off_policy_the_figures_equal_their_formulas():
    case = random_case(7, 4, 5, off_policy=0.5)
    case["mask"][0] = True
    tally = on_torch(GrpoSettings(), case)[0].tally
    log_ratio = (case["log_probs"] - case["mu"])[case["mask"]]
    ratio = np.exp(log_ratio)
    assert tally.mean_ratio == pytest.approx(ratio.mean())
    assert tally.effective_sample_share == pytest.approx(ratio.sum() ** 2 / (len(ratio) * (ratio**2).sum()))
    assert tally.mismatch_kl == pytest.approx((ratio - 1 - log_ratio).mean())


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=16))
def test_advantages_are_centred_and_those_of_the_normalised_kind_have_spread_one(rewards):
    centred, normalised = advantages(rewards, "mean"), advantages(rewards, "normalised")
    assert centred == pytest.approx([reward - np.mean(rewards) for reward in rewards], abs=1e-9)
    assert sum(normalised) == pytest.approx(0.0, abs=1e-6)
    if np.std(rewards) > 1e-2:
        assert np.std(normalised) == pytest.approx(1.0, rel=1e-3)


@pytest.mark.parametrize(
    "wrong",
    [
        {"clip_low": 1.1},
        {"clip_high": 0.9},
        {"dual_clip": 1.0},
        {"advantage": "max"},
        {"normalise": "group"},
        {"veto": -1},
        {"veto": math.nan},
        {"kl": math.inf},
        {"entropy": math.nan},
        {"clip_high": math.inf},
        {"dual_clip": math.nan},
        {"importance": "truncated"},
        {"tis_cap": 0.5},
        {"tis_cap": math.nan},
        {"icepop_low": 0.0},
        {"icepop_low": 1.5},
        {"icepop_high": 0.9},
        {"geometric_floor": -0.1},
        {"geometric_sigmas": -1.0},
        {"zero_advantage": "drop"},
    ],
)
def test_settings_without_sense_are_refused(wrong):
    with pytest.raises(ValueError):
        GrpoSettings(**wrong)


def test_a_divergence_without_a_reference_is_refused():
    case = random_case(8, 1, 1)
    del case["reference"]
    with pytest.raises(ValueError, match="reference"):
        on_torch(GrpoSettings(kl=0.1), case)


def clamped(mu, *, cap, current):
    own = torch.tensor([[-1.0, -2.0, -3.0]])
    return clamp_mu(torch.tensor([mu]), own, torch.tensor([current]), torch.tensor([cap]))[0].tolist()


def test_a_claim_far_from_the_policy_that_drew_it_is_clamped_to_what_its_class_may_be_off():
    assert clamped([-1.1, -9.0, -0.5], cap=0.25, current=True) == pytest.approx([-1.1, -2.25, -2.75])
    assert clamped([-1.1, -9.0, -0.5], cap=math.inf, current=True) == pytest.approx([-1.1, -9.0, -0.5])


def test_a_stale_groups_claim_is_never_clamped_to_newer_weights():
    assert clamped([-1.1, -9.0, -0.5], cap=0.25, current=False) == pytest.approx([-1.1, -9.0, -0.5])


def test_a_lie_on_one_token_moves_the_loss_no_further_than_the_cap():
    """Claimed as less likely than it was, a token would weigh more than one."""
    settings = GrpoSettings(entropy=0.0)

    def gradient(mu, *, current):
        policy = torch.tensor([[-1.0, -2.0]], requires_grad=True)
        grpo_loss(
            settings,
            log_probs=policy,
            entropies=torch.zeros(1, 2),
            mu=torch.tensor([mu]),
            mask=torch.ones(1, 2),
            advantage=torch.tensor([-1.0]),
            current=torch.tensor([current]),
            sigma=torch.tensor([0.0]),
            gap_cap=torch.tensor([0.01]),
        ).total.backward()
        return policy.grad[0].tolist()

    honest = gradient([-1.0, -2.0], current=True)
    assert gradient([-1.0, -3.0], current=True) == pytest.approx(honest, rel=0.011)
    assert gradient([-1.0, -3.0], current=False)[1] == pytest.approx(math.e * honest[1])
