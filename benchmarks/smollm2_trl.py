"""TRL's side of the SmolLM2 benchmark, co-located, and the bare arithmetic of a batch.

The settings are those of `benchmarks.convergence_trl`; the newline ends a completion, as the run's
stop text does.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
import warnings
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from benchmarks.convergence_task import identity, luck
from benchmarks.convergence_trl import Weights, trl_trainer
from benchmarks.smollm2_task import (
    BATCH,
    CURVE_PROMPTS,
    ENGINE,
    EVERY,
    GROUP,
    LIMIT_SECONDS,
    PROMPTS,
    Trained,
    accuracy,
    settings,
)
from echo_node.engine.base import TensorBytes
from echo_node.engine.engine_classes import EngineSpec
from echo_node.engine.worker.client import WorkerEngine
from echo_node.runs.run import Run
from echo_node.runs.spec import RunSpec, model_folder, new_run

TURNS = 3
"""Measurements of the bare arithmetic."""
ROWS = 16
"""Rows of a bare pass: all 64 would keep 6 GB for the way back."""


def open_task(task: str, seed: int) -> Run:
    """Open the task's run in this process."""
    author = identity(seed, "trainer")
    spec = RunSpec.model_validate({**settings(task, "sequential"), "trainers": [author.peer_id]})
    made = new_run(spec, author, nonce=luck(seed, "nonce"))
    return Run.open(made.sealed, model_folder(spec.model), jailed=False)


def train_trl(task: str, seed: int, steps: int, prompts: int = PROMPTS) -> Trained:
    """Train by TRL with both cores, and measure by our engine."""
    curve: list[tuple[int, float]] = []
    measuring, ends = 0.0, [0.0]
    with (
        closing(open_task(task, seed)) as run,
        tempfile.TemporaryDirectory() as folder,
        closing(WorkerEngine(EngineSpec(ENGINE, run.folder, rows=32))) as engine,
    ):
        engine.start()

        def measure(step: int, weights: Weights, count: int) -> None:
            engine.load(step.to_bytes(32), _published(weights))
            curve.append((step, accuracy(run, engine, count)))

        def after_step(step: int, weights: Weights) -> None:
            nonlocal measuring
            now = time.monotonic()
            ends.append(now - began - measuring)
            over = ends[-1] > LIMIT_SECONDS
            if step % EVERY == 0 or step == steps or over:
                last = step == steps or over
                measure(step, weights, prompts if last else min(prompts, CURVE_PROMPTS))
            measuring += time.monotonic() - now
            if over:
                raise TimeoutError

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of others' packages
            trainer = trl_trainer(
                run, seed, steps, folder, after_step, batch=BATCH, group=GROUP, end_token=_newline(run)
            )
            measure(0, dict(trainer.model.named_parameters()), prompts)
            began = time.monotonic()
            with suppress(TimeoutError):
                trainer.train()
    gaps = [later - now for now, later in itertools.pairwise(ends)]
    return Trained("TRL", task, seed, curve[-1][0], curve, ends[-1], statistics.median(gaps))


def arithmetic(task: str) -> dict[str, float]:
    """Return seconds of the bare forward and backward pass of a batch, and CPU seconds.

    `whole`: a row per completion, on all cores, 16 rows at a time. `shared`: a row per group, its
    prompt once.
    """
    with closing(open_task(task, 0)) as run:
        prompt = len(run.prompts([luck(0, "prompt")])[0][1])
        answer = run.limits.max_tokens
        model: Any = AutoModelForCausalLM.from_pretrained(
            run.folder, dtype=torch.float32, attn_implementation="sdpa", local_files_only=True
        )
        whole = _passes(model, BATCH * GROUP, prompt + answer)
        shared = _passes(model, BATCH, prompt + GROUP * answer)
    return {
        "whole": whole[0],
        "shared": shared[0],
        "whole_cpu": whole[1],
        "shared_cpu": shared[1],
    }


def _passes(model: Any, rows: int, length: int) -> tuple[float, float]:
    """Return the medians of wall and of CPU seconds."""
    ids = torch.from_numpy(np.random.default_rng(0).integers(0, 1000, (rows, length)))
    found = []
    for _ in range(TURNS):
        model.zero_grad(set_to_none=True)
        began, cpu = time.monotonic(), time.process_time()
        for some in torch.split(ids, ROWS):
            logits = model(some).logits[:, :-1]
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), some[:, 1:].flatten())
            torch.autograd.backward(loss)
        found.append((time.monotonic() - began, time.process_time() - cpu))
    wall, busy = zip(*found, strict=True)
    return statistics.median(wall), statistics.median(busy)


def _published(weights: Weights) -> dict[str, TensorBytes]:
    """Return weights as a version would publish them: bf16."""
    return {
        name: TensorBytes(
            "bf16",
            tuple(weight.shape),
            weight.detach().bfloat16().contiguous().view(torch.uint8).numpy().tobytes(),
        )
        for name, weight in weights.items()
    }


def _newline(run: Run) -> str:
    """Return the token of the newline, by its name in the tokenizer's files."""
    from transformers import AutoTokenizer  # noqa: PLC0415 - with its tokenizer alone

    tokenizer = AutoTokenizer.from_pretrained(Path(run.folder), local_files_only=True)
    (number,) = run.tokenizer.encode("\n")
    return str(tokenizer.convert_ids_to_tokens(int(number)))
