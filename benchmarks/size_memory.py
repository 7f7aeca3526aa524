"""Memory of the trainer: bytes a parameter at the optimiser step, and the output head's peak."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.live_tensors import PeakBytes, live_storages
from echo_node.runs.algorithm import StepSettings
from echo_node.trainer.output_head import OutputHead
from echo_node.trainer.step import TrainingGroup, TrainStep

TOKENS = 16_384
"""Tokens that go through the head at once."""
CHECKED = 256
"""Tokens of the check that shapes alone give the bytes of the real arithmetic."""


def random_batch(
    vocabulary: int, groups: int, size: int, prompt: int, completion: int, seed: int = 0
) -> list[TrainingGroup]:
    """Return groups of random tokens with half of the rewards 1."""
    draws = np.random.default_rng(seed)
    return [
        TrainingGroup(
            draws.integers(0, vocabulary, prompt),
            [draws.integers(0, vocabulary, completion) for _ in range(size)],
            [np.full(completion, -np.log(vocabulary)) for _ in range(size)],
            [float(place % 2) for place in range(size)],
        )
        for _ in range(groups)
    ]


@dataclass(frozen=True, slots=True)
class StepMemory:
    """Bytes a parameter: alive at the optimiser step, and what the step itself takes on top."""

    alive: float
    temporary: float

    @property
    def total(self) -> float:
        return self.alive + self.temporary


def step_memory(
    folder: Path, *, micro_batches: int, parameters: int | None = None, **settings: Any
) -> StepMemory:
    """Take two steps; at the second, both moments exist. Measure when the optimiser begins.

    Bytes are per trained parameter, unless `parameters` says how many to divide by.
    """
    before = sum(live_storages().values())
    step = TrainStep(
        folder, StepSettings(gradient_checkpointing=True, row_tokens=16, **settings), threads=1, device="cpu"
    )
    masters = step._masters  # noqa: SLF001 - nobody else sees a step between its passes
    parameters = parameters or sum(weight.numel() for weight in step._weights.values())  # noqa: SLF001
    own: Callable[[float], None] = masters.update
    found: list[StepMemory] = []

    def measured(rate: float) -> None:
        alive = sum(live_storages().values()) - before
        with PeakBytes() as peak:
            own(rate)
        found.append(StepMemory(alive / parameters, peak.most / parameters))

    masters.update = measured  # type: ignore[method-assign]
    try:
        batch = random_batch(100, micro_batches, 2, 8, 8)
        for _ in range(2):
            step.step(batch)
    finally:
        del masters.update
    last = found[-1]
    del step, masters
    gc.collect()
    return last


@dataclass(frozen=True, slots=True)
class HeadPeaks:
    """Peaks of a head over N × V × 4 bytes, the gradient of the weight apart or counted."""

    ours: float
    ours_with_gradient: float
    trl: float


def head_peaks(config_folder: Path, tokens: int, *, shapes_only: bool) -> HeadPeaks:
    """Measure both heads, forward and backward, on the same hidden states.

    The weight and its gradient, which `bytes_per_parameter` counts, are there before, for both
    sides alike; what a side makes besides is counted, its own copies of that gradient included.
    With `shapes_only` the same code runs on tensors without contents: sizes and lifetimes are the
    real ones, and 16k tokens need no hours.
    """
    config = AutoConfig.from_pretrained(config_folder)
    config.num_hidden_layers = 0
    if getattr(config, "layer_types", None):
        config.layer_types = []
    with FakeTensorMode() if shapes_only else nullcontext():
        return _head_peaks(config, tokens)


def _head_peaks(config: Any, tokens: int) -> HeadPeaks:
    from trl.kernels import ChunkedLogProbFunction  # noqa: PLC0415 - an extra of its own
    from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE  # noqa: PLC0415

    make: Any = AutoModelForCausalLM
    model = make.from_config(config, dtype=torch.float32)
    head = OutputHead(model, config.vocab_size, 1.0)
    weight = model.get_output_embeddings().weight
    states = torch.zeros(tokens, config.hidden_size, requires_grad=True)
    targets = torch.zeros(tokens, dtype=torch.long)

    def trl(given: torch.Tensor, wanted: torch.Tensor) -> Any:
        outputs = ("log_probs", "entropy")
        found: Any = ChunkedLogProbFunction.apply(
            given, weight, None, wanted, 1.0, _CHUNKED_LOGPROB_CHUNK_SIZE, None, 1.0, outputs
        )
        return found[:2]

    peaks = []
    for measure in (head, trl):
        weight.grad = torch.zeros_like(weight)
        states.grad = None
        with PeakBytes() as peak:
            log_probs, entropies = measure(states, targets)
            (log_probs + entropies).sum().backward()
        del log_probs, entropies
        peaks.append(peak.most)
    whole = 4 * tokens * config.vocab_size
    return HeadPeaks(peaks[0] / whole, (peaks[0] + weight.nbytes) / whole, peaks[1] / whole)
