"""The loss and its gradient against TRL's code, on the embedded model."""

from __future__ import annotations

import dataclasses
import math
import warnings

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from echo_node.models import embedded
from echo_node.runs.algorithm import GrpoSettings
from echo_node.trainer.grpo import shaped_rewards
from echo_node.trainer.tree_packing import TrainingGroup
from tests.records import columns
from tests.trainer.test_step import new_step

pytest.importorskip("trl", reason="the extra `trl` is not installed")

TEMPERATURE = 0.8
PROMPTS = 3
SIZE = 4
LIMIT = 7


def random_groups(seed):
    """Return groups of ragged completions, some with claims beyond the clip."""
    draws, groups = np.random.default_rng(seed), []
    model = plain_model()
    for _ in range(PROMPTS):
        prompt = draws.integers(0, 16, draws.integers(2, 8))
        completions = []
        for _ in range(SIZE):
            ids = draws.integers(0, 16, draws.integers(1, LIMIT + 1))
            with torch.no_grad():
                logits = model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1] / TEMPERATURE
            exact = torch.log_softmax(logits, dim=-1)[range(len(ids)), ids].numpy()
            mu = exact + draws.normal(0.0, 0.6, len(ids))
            completions.append((ids, mu, float(draws.integers(0, 3))))
        groups.append(TrainingGroup(prompt, *columns(completions)))
    return groups


def transcripts(seed):
    """Return the same groups with some tokens of each completion an environment's."""
    draws, groups = np.random.default_rng(seed), []
    for group in random_groups(seed):
        drawn = [draws.random(len(ids)) < 0.6 for ids in group.ids]
        for mask in drawn:
            mask[[0, -1]] = True
        mu = [np.where(mask, each, 0.0) for mask, each in zip(drawn, group.mu, strict=True)]
        groups.append(dataclasses.replace(group, mu=mu, drawn=drawn))
    return groups


def plain_model():
    return AutoModelForCausalLM.from_pretrained(embedded.folder(), dtype=torch.float32).eval()


def moved_weights():
    """Some way from the start, so that there is a divergence from it."""
    draws = torch.Generator().manual_seed(3)
    return {
        name: (weight + 0.02 * torch.randn(weight.shape, generator=draws)).bfloat16()
        for name, weight in plain_model().named_parameters()
    }


def trl_inputs(groups, advantages):
    """Prompts padded on the left, completions on the right."""
    rows = [
        (group.prompt_ids, ids, mu) for group in groups for ids, mu in zip(group.ids, group.mu, strict=True)
    ]
    widest = max(len(prompt) for prompt, *_ in rows)

    def padded(arrays, width, *, left=False, dtype=torch.long):
        found = torch.zeros((len(arrays), width), dtype=dtype)
        for row, array in enumerate(arrays):
            place = slice(width - len(array), None) if left else slice(len(array))
            found[row, place] = torch.as_tensor(np.asarray(array), dtype=dtype)
        return found

    prompts, answers, mus = ([row[at] for row in rows] for at in range(3))
    mask = padded([np.ones(len(ids)) for ids in answers], LIMIT)
    masks = [mask for group in groups for mask in group.drawn or [np.ones(len(ids)) for ids in group.ids]]
    tools = padded(masks, LIMIT)
    return {
        "tool_mask": tools,
        "prompt_ids": padded(prompts, widest, left=True),
        "prompt_mask": padded([np.ones(len(ids)) for ids in prompts], widest, left=True),
        "completion_ids": padded(answers, LIMIT),
        "completion_mask": mask,
        "advantages": torch.tensor(advantages, dtype=torch.float32),
        "mu": padded(mus, LIMIT, dtype=torch.float32),
        "num_items_in_batch": (mask * tools).sum(),
    }


def trl_loss(tmp_path, groups, settings, **config):
    """Return loss and gradient of TRL's trainer, on the published weights."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of others' packages
        from datasets import Dataset
        from trl import GRPOConfig, GRPOTrainer

        model = plain_model()
        model.load_state_dict(
            {name: weight.float() for name, weight in moved_weights().items()}, strict=False
        )
        arguments = GRPOConfig(
            output_dir=str(tmp_path),
            use_cpu=True,
            bf16=False,
            report_to=[],
            per_device_train_batch_size=SIZE,
            num_generations=SIZE,
            max_completion_length=LIMIT,
            temperature=TEMPERATURE,
            epsilon=1 - settings.clip_low,
            epsilon_high=settings.clip_high - (settings.clip == "ppo"),
            delta=settings.dual_clip,
            importance_sampling_level=settings.ratio,
            beta=settings.kl,
            use_bias_correction_kl=False,  # ours is the plain estimate, weighted by no ratio
            entropy_coef=settings.entropy,
            disable_dropout=True,
            gradient_checkpointing=False,
            **config,
        )
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=arguments,
            train_dataset=Dataset.from_dict({"prompt": ["r12345="] * SIZE}),
            processing_class=AutoTokenizer.from_pretrained(embedded.folder()),
        )
    advantages = []
    for group in groups:
        rewards = np.array(group.rewards)
        advantages += list(rewards - rewards.mean())
    inputs = trl_inputs(groups, advantages)
    mu = inputs.pop("mu")
    if settings.overlong_filter:  # as its `mask_truncated_completions`
        kept = torch.tensor([not cut for group in groups for cut in group.truncated])
        inputs["completion_mask"] = inputs["completion_mask"] * kept[:, None]
        inputs["num_items_in_batch"] = inputs["completion_mask"].sum()

    def look(at):
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        shown = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        return trainer._get_per_token_logps_and_entropies(at, ids, shown, LIMIT)[0].detach()

    if settings.importance == "decoupled":
        inputs["old_per_token_logps"] = look(model)
        inputs["importance_sampling_ratio"] = (look(model) - mu).exp().clamp(max=settings.tis_cap)
        trainer.use_vllm = trainer.vllm_importance_sampling_correction = (
            True  # it corrects nobody else's samples
        )
    else:
        inputs["old_per_token_logps"] = mu
    if settings.kl:
        inputs["ref_per_token_logps"] = look(trainer.ref_model)
    trainer.current_gradient_accumulation_steps = 1
    model.train()
    loss = trainer._compute_loss(model, inputs)
    loss.backward()
    return loss.item(), {name: weight.grad for name, weight in model.named_parameters()}


def our_loss(groups, settings):
    step = new_step(temperature=TEMPERATURE, grpo=settings, micro_batch_tokens=60, row_tokens=30)
    step.adopt(moved_weights())
    tally, total, weight = step._backward([row for group in groups for row in step._rows(group)])
    gradient = {name: parameter.grad / weight for name, parameter in step._weights.items()}
    return total / weight, gradient, tally


PLAIN = GrpoSettings(entropy=0.0, veto=0.0)


@pytest.mark.parametrize(
    ("loss_type", "settings"),
    [
        ("bnpo", PLAIN),
        ("dapo", PLAIN),
        ("grpo", dataclasses.replace(PLAIN, normalise="sequence")),
        ("bnpo", dataclasses.replace(PLAIN, entropy=0.05)),
        ("dapo", dataclasses.replace(PLAIN, kl=0.2, clip_low=0.5, clip_high=1.5, dual_clip=1.6)),
        ("bnpo", dataclasses.replace(PLAIN, importance="decoupled")),
        ("grpo", dataclasses.replace(PLAIN, importance="decoupled", normalise="sequence", tis_cap=1.2)),
        ("dr_grpo", dataclasses.replace(PLAIN, normalise="limit", completion_limit=LIMIT)),
        (
            "grpo",
            dataclasses.replace(PLAIN, normalise="sequence", ratio="sequence", clip_low=0.99, clip_high=1.02),
        ),
        ("cispo", dataclasses.replace(PLAIN, clip="cispo", clip_high=1.5)),
        ("cispo", dataclasses.replace(PLAIN, clip="cispo", clip_high=2.0, kl=0.1)),
    ],
)
def test_loss_and_gradient_are_those_of_trl(tmp_path, loss_type, settings):
    compare(tmp_path, random_groups(seed=5 if settings.ratio == "token" else 6), loss_type, settings)


@pytest.mark.parametrize(
    ("loss_type", "settings"),
    [
        ("bnpo", PLAIN),
        ("dapo", dataclasses.replace(PLAIN, entropy=0.05)),
        ("grpo", dataclasses.replace(PLAIN, normalise="sequence")),
    ],
)
def test_the_loss_on_a_transcript_is_trls_on_the_same_tokens_and_mask(tmp_path, loss_type, settings):
    groups = transcripts(seed=5)
    assert sum(int((~mask).sum()) for group in groups for mask in group.drawn) > 5
    compare(tmp_path, groups, loss_type, settings)
    unmasked = [dataclasses.replace(group, drawn=None) for group in groups]
    assert our_loss(unmasked, settings)[0] != pytest.approx(our_loss(groups, settings)[0], abs=1e-3)


def compare(tmp_path, groups, loss_type, settings):
    loss, gradient, tally = our_loss(groups, settings)
    theirs, their_gradient = trl_loss(tmp_path, groups, settings, loss_type=loss_type)
    assert loss == pytest.approx(theirs, abs=1e-6)
    assert gradient.keys() == their_gradient.keys()
    apart = math.sqrt(sum(float((gradient[name] - their_gradient[name]).square().sum()) for name in gradient))
    length = math.sqrt(sum(float(each.square().sum()) for each in gradient.values()))
    assert length > 0.01
    assert apart < 1e-5 * length
    cut = tally.truncated if settings.importance == "decoupled" else tally.clipped
    assert 0 < cut < tally.tokens, "both sides of every bend are tried"


def cut_by_limit(groups):
    """Return the groups with the completions of the longest length marked as cut."""
    return [
        dataclasses.replace(group, truncated=[len(ids) == LIMIT for ids in group.ids]) for group in groups
    ]


@pytest.mark.parametrize(("loss_type", "normalise"), [("bnpo", "token"), ("dapo", "token")])
def test_without_overlong_completions_loss_and_gradient_are_those_of_trl(tmp_path, loss_type, normalise):
    settings = dataclasses.replace(PLAIN, overlong_filter=True, normalise=normalise)
    groups = cut_by_limit(random_groups(seed=5))
    overlong = sum(cut for group in groups for cut in group.truncated)
    assert 0 < overlong < PROMPTS * SIZE
    loss, gradient, tally = our_loss(groups, settings)
    theirs, their_gradient = trl_loss(
        tmp_path, groups, settings, loss_type=loss_type, mask_truncated_completions=True
    )
    assert loss == pytest.approx(theirs, abs=1e-6)
    apart = math.sqrt(sum(float((gradient[name] - their_gradient[name]).square().sum()) for name in gradient))
    length = math.sqrt(sum(float(each.square().sum()) for each in gradient.values()))
    assert length > 0.01
    assert apart < 1e-5 * length
    assert tally.completions == PROMPTS * SIZE - overlong
    everything, *_ = our_loss(groups, PLAIN)
    assert everything != pytest.approx(loss, abs=1e-4)


def test_the_soft_penalty_of_overlong_completions_is_that_of_trl():
    from trl.rewards import get_soft_overlong_punishment

    limit, buffer = 20, 8
    punish = get_soft_overlong_punishment(max_completion_len=limit, soft_punish_cache=buffer)
    lengths = list(range(1, limit + 1))
    theirs = punish(completion_ids=[[0] * length for length in lengths])
    settings = GrpoSettings(overlong_buffer=buffer, completion_limit=limit)
    assert shaped_rewards([0.0] * limit, lengths, settings) == pytest.approx(theirs, abs=1e-12)
    half = dataclasses.replace(settings, overlong_penalty=0.5)
    assert shaped_rewards([1.0] * limit, lengths, half) == pytest.approx([1 + 0.5 * each for each in theirs])
    off = dataclasses.replace(settings, overlong_buffer=0)
    assert shaped_rewards([1.0] * limit, lengths, off) == [1.0] * limit
