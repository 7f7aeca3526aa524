"""Run, start, held-out prompts and curve shared by the sides of the benchmark.

The embedded model learns to reverse five digits. Its held-out reward is exact: only one answer to a
prompt scores, so the chance of drawing it at temperature 1 is the expected reward, and one forward
pass tells it without any luck. Held-out prompts have keys of their own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from echo_node.config import DemoConfig
from echo_node.contract import load, prompt_of
from echo_node.models import embedded
from echo_node.runs.run import ENGINES, Run, draft
from protocol import Identity, derive
from protocol.manifest import Sampling, Sync

CONTRACT = ("digits-reverse", "1")
PROMPT_TOKENS, ANSWER_TOKENS = 7, 6
BATCH, GROUP = 32, 8
HELD_OUT = 500
EVALUATE_EVERY = 10
ENGINE = "torch/f32"
"""Engine class of our samplers, unless speed is measured."""
Curve = list[tuple[int, float]]
"""Held-out rewards by the number of steps that were taken."""


@dataclasses.dataclass(frozen=True)
class Trained:
    """One run of one side."""

    side: str
    seed: int
    steps: int
    curve: Curve
    ages: dict[int, int]
    """Trained groups by staleness in steps; empty where nothing can be stale."""
    seconds: float


def identity(seed: int, name: str) -> Identity:
    return Identity(luck(seed, f"identity of {name}"))


def luck(seed: int, name: str) -> bytes:
    """Bytes that only the seed and the name decide."""
    return derive("convergence", seed.to_bytes(8), name.encode())


def open_run(seed: int, *, staleness: int | None = None, engine: str = ENGINE) -> Run:
    """Return the run of a seed, with the demo's numbers; async with a staleness bound.

    The contract is the project's own and is not jailed: both sides score in their own process.
    """
    trainer = identity(seed, "trainer")
    sealed = draft(
        name="convergence",
        folder=embedded.folder(),
        contract=load(*CONTRACT),
        params={},
        pure=True,
        algorithm={"batch_groups": BATCH, **DemoConfig().algorithm},
        sampling_=Sampling(
            group_size=GROUP, max_prompt=PROMPT_TOKENS, max_tokens=ANSWER_TOKENS, temperature=1.0
        ),
        sync=Sync(
            async_from=None if staleness is None else 0,
            head_every=1,
            in_flight=False,
            staleness=staleness or 0,
        ),
        author=trainer,
        trainers=[trainer.public],
        engines=[each for each in ENGINES if each.engine == engine],
        nonce=luck(seed, "nonce"),
    )
    return Run.open(sealed, embedded.folder(), jailed=False)


class HeldOut:
    """The held-out prompts with their answers, and a model of its own to measure weights with."""

    def __init__(self, run: Run, prompts: int = HELD_OUT) -> None:
        disable_progress_bar()  # type: ignore[no-untyped-call]
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            run.folder, dtype=torch.float32, attn_implementation="sdpa", local_files_only=True
        )
        self._model.eval()  # type: ignore[no-untyped-call]
        self._weights = dict(self._model.named_parameters())
        (end,) = run.limits.end_tokens
        rows = []
        for number in range(prompts):
            prompt = prompt_of(run.contract, derive("held out", number.to_bytes(8)))
            answer = run.tokenizer.encode(run.contract.answer(prompt))
            rows.append(np.concatenate([run.tokenizer.encode(prompt.text), answer, [end]]))
        self.prompts = prompts
        self._ids = torch.from_numpy(np.stack(rows).astype(np.int64))

    @torch.inference_mode()
    def reward(self, weights: Mapping[str, torch.Tensor]) -> float:
        """Return the expected reward of a completion at temperature 1."""
        for name, weight in self._weights.items():
            weight.copy_(weights[name])
        logits = self._model(self._ids[:, :-1]).logits[:, PROMPT_TOKENS - 1 :]
        answers = self._ids[:, PROMPT_TOKENS:, None]
        chances = torch.log_softmax(logits.double(), dim=-1).gather(2, answers).squeeze(2)
        return float(chances.sum(dim=1).exp().mean())
