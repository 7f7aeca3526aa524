"""LoRA training: PEFT's numbers, a frozen base, a bound on norms, resuming bit for bit."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from echo_node.errors import ConfigError
from echo_node.models.adapter import WEIGHTS, AdapterSettings, adapter_tensors, base_shapes, settings_file
from echo_node.runs.algorithm import GrpoSettings, StepSettings
from echo_node.trainer.step import TrainStep, state_of
from tests.adapters import log_probs, lora_folder, moved_folder, peft_model
from tests.trainer.test_step import ragged_batch, sampled_batch

pytest.importorskip("peft", reason="the extra `trl` is not installed")


def lora_step(folder, **settings):
    return TrainStep(folder, StepSettings(**{"warm_up": 0, **settings}), threads=1, device="cpu")


def written(step, to):
    """A PEFT folder of what a step would publish."""
    lora_folder(to)
    found = {
        name: torch.frombuffer(bytearray(tensor.data), dtype=torch.bfloat16).view(tensor.shape)
        for name, tensor in state_of(step).items()
    }
    save_file(found, to / WEIGHTS)
    return to


def test_log_probabilities_after_steps_are_those_of_peft(tmp_path):
    step = lora_step(lora_folder(tmp_path / "model"), learning_rate=1e-2)
    batch = sampled_batch(4, 4)
    for _ in range(3):
        step.step(batch)
    peft = peft_model(written(step, tmp_path / "export"))
    moved = 0.0
    for group in ragged_batch():
        for ids, own in zip(group.ids, step.log_probs(group), strict=True):
            expected = log_probs(peft, group.prompt_ids, ids)
            assert own == pytest.approx(expected, abs=1e-5)
            with peft.disable_adapter():
                moved = max(moved, np.abs(expected - log_probs(peft, group.prompt_ids, ids)).max())
    assert moved > 0.01, "the adapter has learnt something"


@pytest.mark.parametrize("copy", ["bf16", "f32"])
def test_the_gradient_is_that_of_peft(copy):
    """With claims that are the policy's own, so that every ratio is 1."""
    folder = moved_folder()
    step = lora_step(folder, compute_copy=copy, grpo=GrpoSettings(entropy=0.0))
    batch = [
        dataclasses.replace(group, mu=step.log_probs(group), rewards=[1.0, 0.0, 0.0, 1.0])
        for group in sampled_batch(2, 4)
    ]
    step._backward([row for group in batch for row in step._rows(group)])
    peft = peft_model(folder)
    trained = {name: weight for name, weight in peft.named_parameters() if "lora_" in name}
    for weight in trained.values():
        weight.requires_grad_(requires_grad=True)
    total = torch.zeros(())
    for group in batch:
        rewards = np.array(group.rewards)
        for ids, advantage in zip(group.ids, rewards - rewards.mean(), strict=True):
            whole = torch.tensor([[*group.prompt_ids, *ids.tolist()]])
            logits = peft(whole).logits[0, len(group.prompt_ids) - 1 : -1]
            chosen = torch.log_softmax(logits, dim=-1)[range(len(ids)), ids]
            total = total - advantage * (chosen - chosen.detach()).exp().sum()
    total.backward()
    assert len(trained) == len(step._weights)
    for name, weight in trained.items():
        own = step._weights[name.replace(".default.weight", ".weight")].grad
        assert torch.allclose(own, weight.grad, rtol=1e-3, atol=1e-5 * float(weight.grad.abs().max())), name


def test_the_base_is_frozen_and_only_the_adapter_is_published(tmp_path):
    folder = lora_folder(tmp_path / "model")
    base = (folder / "model.safetensors").read_bytes()
    step = lora_step(folder, learning_rate=1e-2)
    step.step(sampled_batch(4, 4))
    tensors = adapter_tensors(base_shapes(folder), AdapterSettings(4, 8.0, ("q_proj",)))
    assert {each.name for each in tensors} <= step.published().keys()
    assert all("lora_" in name for name in step.published())
    assert (folder / "model.safetensors").read_bytes() == base


def test_no_tensor_of_an_adapter_outgrows_the_norm(tmp_path):
    bound = 1.5
    step = lora_step(lora_folder(tmp_path / "model"), learning_rate=0.3, adapter_norm=bound)
    batch = sampled_batch(4, 4)
    longest = 0.0
    for _ in range(4):
        step.step(batch)
        norms = [float(each.float().norm()) for each in step.published().values()]
        assert max(norms) <= bound
        longest = max(longest, *norms)
    assert longest > 0.9 * bound, "the bound was reached"


def test_the_divergence_is_from_the_base_without_the_adapter():
    folder = moved_folder()
    step = lora_step(folder, grpo=GrpoSettings(kl=0.1))
    figures = step.step(sampled_batch(3, 4))
    plain = lora_step(folder).step(sampled_batch(3, 4))
    assert figures.loss > plain.loss
    assert figures.tally != plain.tally or figures.loss != plain.loss


def test_a_resumed_step_gives_the_same_bits(tmp_path):
    folder = lora_folder(tmp_path / "model")
    batches = [sampled_batch(4, 4, seed=seed) for seed in range(4)]
    whole = lora_step(folder, learning_rate=1e-3)
    for batch in batches[:2]:
        whole.step(batch)
    checkpoint = whole.checkpoint()
    resumed = lora_step(folder, learning_rate=1e-3)
    resumed.restore(checkpoint)
    for batch in batches[2:]:
        whole.step(batch)
        resumed.step(batch)
    assert {name: bytes(each.data) for name, each in state_of(whole).items()} == {
        name: bytes(each.data) for name, each in state_of(resumed).items()
    }


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_an_adapter_that_is_not_finite_is_refused_by_name(tmp_path, value):
    folder = lora_folder(tmp_path / "model")
    tensors = load_file(folder / WEIGHTS)
    name = sorted(tensors)[3]
    tensors[name].view(-1)[7] = value
    save_file(tensors, folder / WEIGHTS)
    with pytest.raises(ConfigError, match=name.replace(".", r"\.")):
        lora_step(folder)


def test_an_adapter_of_other_targets_is_refused(tmp_path):
    folder = lora_folder(tmp_path / "model")
    (folder / "lora.json").write_bytes(settings_file(AdapterSettings(4, 8.0, ("q_proj",))))
    with pytest.raises(ConfigError, match="other targets"):
        lora_step(folder)
