"""The sampler's claims equal the trainer's recomputation within 1e-4."""

import dataclasses

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from echo_node.config import DemoConfig
from echo_node.demo.swarm import Demo
from echo_node.engine.local import LocalEngine
from echo_node.engine.torch_decoder import TorchDecoder
from echo_node.runs.algorithm import training_settings
from echo_node.runs.run import read_model
from echo_node.sampler.rollout import Rollout
from echo_node.telemetry.metrics import Records
from echo_node.trainer.step import TrainStep
from protocol import TrajectoryGroup, open_sealed
from protocol.sampling import probabilities
from tests.crafting import Chain


@pytest.fixture(scope="module")
def groups():
    """Groups of the embedded model, sealed by a sampler and opened again."""
    torch.set_num_threads(1)
    demo = Demo(DemoConfig(), Records())
    run = demo._open_run(jailed=False)
    engine = LocalEngine(TorchDecoder(run.folder))
    engine.load(bytes(32), read_model(run.folder))
    head = dataclasses.replace(Chain(run).next(), id=bytes(32))
    groups = Rollout(run, demo._identity("sampler 0"), engine).fill(head, range(12), lambda: False)
    return run, [open_sealed(group.sealed, TrajectoryGroup, run.id).message for group in groups]


def test_every_importance_weight_is_within_one_ten_thousandth_of_one(groups):
    run, opened = groups
    step = TrainStep(run.folder, training_settings(run.manifest).step, threads=1)
    model = AutoModelForCausalLM.from_pretrained(run.folder, dtype=torch.float32).eval()
    published = {name: tensor.float() for name, tensor in step.published().items()}
    assert not model.load_state_dict(published, strict=False).unexpected_keys
    worst = 0.0
    for group in opened:
        for completion in group.completions():
            ids = torch.tensor([[*group.prompt_ids(), *completion.ids]])
            with torch.no_grad():
                logits = model(input_ids=ids).logits[0].double().numpy()
            start = group.prompt_length - 1
            rows = probabilities(logits[start : start + len(completion.ids)], run.limits.temperature)
            ours = np.log(rows[np.arange(len(completion.ids)), completion.ids])
            worst = max(worst, float(np.abs(np.exp(ours - completion.logprobs) - 1).max()))
    assert worst < 1e-4
    assert worst > 0, "the comparison is between two computations"
