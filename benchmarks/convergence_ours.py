"""Training step and engine in one process: generate, score, learn, update.

The training step and the engine are those of a trainer and a sampler; nothing is signed, sent or
checked in between.
"""

from __future__ import annotations

import time

import torch

from benchmarks.convergence_task import (
    BATCH,
    EVALUATE_EVERY,
    GROUP,
    Curve,
    HeldOut,
    Trained,
    luck,
    open_run,
)
from echo_node.engine.base import SlotRequest, TensorBytes, generate_groups
from echo_node.engine.local import LocalEngine
from echo_node.engine.torch_decoder import TorchDecoder
from echo_node.models import embedded
from echo_node.runs.algorithm import training_settings
from echo_node.trainer.step import TrainingGroup, TrainStep


class CoLocated:
    """A trainer with its own engine."""

    def __init__(self, seed: int) -> None:
        self.run = open_run(seed)
        self._seed = seed
        self._step = TrainStep(embedded.folder(), training_settings(self.run.manifest).step, threads=1)
        decoder = TorchDecoder(embedded.folder(), device="cpu", dtype="f32", threads=1)
        self.engine = LocalEngine(decoder, rows=BATCH * GROUP)

    def weights(self) -> dict[str, torch.Tensor]:
        return self._step.published()

    def load(self) -> None:
        """Put the newest weights into the engine."""
        weights = {name: _plain(weight) for name, weight in self.weights().items()}
        self.engine.load(self._step.version.to_bytes(32), weights)

    def step(self) -> float:
        """Train on one batch of fresh prompts, and return its mean reward."""
        self.load()
        number = self._step.version
        keys = [luck(self._seed, f"slot {slot} of step {number}") for slot in range(BATCH)]
        prompts = self.run.prompts(keys)
        requests = [
            SlotRequest(ids, key, GROUP, self.run.limits) for key, (_, ids) in zip(keys, prompts, strict=True)
        ]
        batch = []
        for (prompt, ids), draws in zip(prompts, generate_groups(self.engine, requests), strict=True):
            scores = self.run.scores(prompt, [draw.ids for draw in draws])
            batch.append(
                TrainingGroup(
                    ids,
                    [draw.ids for draw in draws],
                    [draw.logprobs for draw in draws],
                    [score.value for score in scores],
                )
            )
        figures = self._step.step(batch)
        assert figures.updated
        return figures.reward


def _plain(weight: torch.Tensor) -> TensorBytes:
    data = weight.contiguous().view(torch.uint8).numpy().tobytes()
    return TensorBytes("bf16", tuple(weight.shape), data)


def train_co_located(seed: int, steps: int) -> Trained:
    torch.set_num_threads(1)
    ours = CoLocated(seed)
    held_out = HeldOut(ours.run)
    start = time.monotonic()
    curve: Curve = [(0, held_out.reward(ours.weights()))]
    for step in range(1, steps + 1):
        ours.step()
        if step % EVALUATE_EVERY == 0 or step == steps:
            curve.append((step, held_out.reward(ours.weights())))
    return Trained("co-located", seed, steps, curve, {}, time.monotonic() - start)
