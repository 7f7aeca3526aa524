"""TRL's `GRPOTrainer`, co-located, set to the same algorithm: what ours is measured against.

The same: start, batch, prompts' distribution, scorer, learning rate with its warm-up, AdamW,
clipping of the gradient, advantages without the spread, the clip, the entropy bonus, one update a
batch, every token the same weight, float32. TRL generates with transformers, as it does by itself.
What differs: its forward pass and its generation see the float32 weights, ours the bf16 ones that
are published. Gradient checkpointing, which would only slow it down, is off.
"""

from __future__ import annotations

import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback

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
from echo_node.contract import prompt_of
from echo_node.runs.algorithm import training_settings
from echo_node.runs.run import Run

Weights = Mapping[str, torch.Tensor]


class _AfterEachStep(TrainerCallback):
    def __init__(self, after_step: Callable[[int, Weights], None]) -> None:
        self._after_step = after_step

    def on_step_end(self, args: object, state: Any, control: object, **kwargs: Any) -> None:  # noqa: ARG002
        self._after_step(state.global_step, dict(kwargs["model"].named_parameters()))


def trl_trainer(
    run: Run,
    seed: int,
    steps: int,
    folder: str,
    after_step: Callable[[int, Weights], None],
    *,
    batch: int = BATCH,
    group: int = GROUP,
    end_token: str | None = None,
) -> Any:
    """Return a trainer ready to `train()`; `after_step` is called after every step.

    `end_token` ends a completion instead of the tokenizer's own.
    """
    from datasets import Dataset  # type: ignore[import-untyped] # noqa: PLC0415 - with trl, an extra of its own
    from trl.trainer.grpo_config import GRPOConfig  # noqa: PLC0415
    from trl.trainer.grpo_trainer import GRPOTrainer  # noqa: PLC0415

    settings = training_settings(run.manifest).step
    grpo = settings.grpo
    # TRL's settings below are the same as these; any other choice would need another line there.
    assert (grpo.advantage, grpo.normalise, grpo.kl) == ("mean", "token", 0.0)
    drawn = [prompt_of(run.contract, luck(seed, f"TRL's prompt {n}")) for n in range(batch * steps)]
    by_text = {prompt.text: prompt for prompt in drawn}

    def reward(
        prompts: Sequence[str], completion_ids: Sequence[Sequence[int]], **_rest: object
    ) -> list[float | None]:
        # By ids, as ours: TRL's text leaves out drawn padding, and would score wrong text.
        return [
            run.score(by_text[text], np.array(ids, dtype=np.int64)).value
            for text, ids in zip(prompts, completion_ids, strict=True)
        ]

    model: Any = AutoModelForCausalLM.from_pretrained(
        run.folder, dtype=torch.float32, attn_implementation="sdpa", local_files_only=True
    )
    optimiser = torch.optim.AdamW(
        model.parameters(),
        lr=settings.learning_rate,
        betas=settings.betas,
        eps=settings.epsilon,
        weight_decay=settings.weight_decay,
        fused=True,
    )
    # TRL's own warm-up begins at 0, and wastes the first step.
    warm_up = torch.optim.lr_scheduler.LambdaLR(
        optimiser, lambda step: min(1.0, (step + 1) / max(settings.warm_up, 1))
    )
    config = GRPOConfig(
        output_dir=folder,
        seed=seed,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        max_steps=steps,
        per_device_train_batch_size=batch * group,
        gradient_accumulation_steps=1,
        steps_per_generation=1,
        num_iterations=1,
        num_generations=group,
        max_completion_length=run.limits.max_tokens,
        shuffle_dataset=False,
        temperature=settings.temperature,
        top_p=1.0,
        top_k=0,
        learning_rate=settings.learning_rate,
        max_grad_norm=settings.gradient_norm,
        scale_rewards="none",
        loss_type="dapo",
        epsilon=1.0 - grpo.clip_low,
        epsilon_high=grpo.clip_high - 1.0,
        beta=0.0,
        entropy_coef=grpo.entropy,
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    tokenizer = AutoTokenizer.from_pretrained(run.folder, local_files_only=True)
    if end_token is not None:
        tokenizer.pad_token, tokenizer.eos_token = tokenizer.eos_token, end_token
    trainer: Any = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": prompt.text} for prompt in drawn]),
        processing_class=tokenizer,
        callbacks=[_AfterEachStep(after_step)],
        optimizers=(optimiser, warm_up),
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def train_trl(seed: int, steps: int) -> Trained:
    torch.set_num_threads(1)
    run = open_run(seed)
    held_out = HeldOut(run)
    curve: Curve = []

    def after_step(step: int, weights: Weights) -> None:
        if step % EVALUATE_EVERY == 0 or step == steps:
            curve.append((step, held_out.reward(weights)))

    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of others' packages
        trainer = trl_trainer(run, seed, steps, folder, after_step)
        curve.append((0, held_out.reward(dict(trainer.model.named_parameters()))))
        start = time.monotonic()
        trainer.train()
    return Trained("TRL", seed, steps, curve, {}, time.monotonic() - start)
