"""One optimiser step: groups of completions in, the next weights out.

The forward pass runs on the published bf16 values, upcast to float32, so that it computes what the
samplers computed; the gradient moves float32 masters, which round to what is published next. On one
machine, with one number of threads, the same batches give the same bits: nothing here is random.
Groups have been admitted before they come here.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from blake3 import blake3
from numpy.typing import NDArray
from torch import Tensor, nn

from echo_node.engine.base import TensorBytes
from echo_node.errors import ConfigError, DefectError, boundary
from echo_node.rollouts.record import RolloutRecord
from echo_node.runs.algorithm import StepSettings
from echo_node.trainer.checkpoint import Checkpoint
from echo_node.trainer.grpo import GrpoLoss, GrpoTally, advantages, grpo_loss, shaped_rewards, teaches
from echo_node.trainer.journal import Batch
from echo_node.trainer.lr_schedule import learning_rate_at
from echo_node.trainer.master_weights import MasterWeights
from echo_node.trainer.policy_model import Policy, best_device, open_adapter, open_model
from echo_node.trainer.sharding import Unsharded
from echo_node.trainer.tree_packing import (
    PackedRows,
    Row,
    TrainingGroup,
    micro_batches,
    pack,
    rows_of,
    share_prompts,
)
from echo_node.weights.flat_view import ReadableState, TensorReader
from echo_node.weights.tensors import State

__all__ = ["StepFigures", "TrainStep", "TrainingGroup", "accumulate", "learn", "state_of"]

SETTINGS, RANDOM, REFERENCE = "settings", "random", "reference"
BASE_REFERENCE: Final = "base"
"""A checkpoint's note on the reference of an adapter: the base without it, at no memory."""
NOTHING_RANDOM: Final = "nothing"
"""Value of a checkpoint's note on random state: there is none."""


@dataclass(frozen=True, slots=True)
class StepFigures:
    """Figures of one step. `updated` is false when there was nothing to learn from."""

    version: int
    updated: bool
    loss: float
    reward: float
    gradient_norm: float
    learning_rate: float
    tally: GrpoTally


class TrainStep:
    """The policy in training: masters, optimiser, and step count as `version`.

    It sets torch's number of threads, which is the whole process's: a trainer has a process of its
    own. Where `shards` spreads the weights over processes, each has one of these and all are called
    alike.
    """

    def __init__(
        self,
        model_folder: Path,
        settings: StepSettings,
        *,
        threads: int,
        device: str = "auto",
        shards: Unsharded | None = None,
    ) -> None:
        torch.set_num_threads(threads)
        self.settings = settings
        self.version = 0
        self._device = torch.device(best_device() if device == "auto" else device)
        self._shards = shards or Unsharded()
        model = open_model(model_folder, self._device, recompute=settings.gradient_checkpointing)
        self._adapter = open_adapter(model, model_folder)
        self._policy = Policy(
            model,
            settings.vocab_size,
            settings.temperature,
            narrow=settings.mixed_precision == "auto" and self._device.type == "cuda",
        )
        in_bf16 = settings.compute_copy == "bf16" and not self._shards.only_f32
        if self._adapter is not None and not in_bf16:
            model.float()  # its base was opened in bf16
        self._bf16_gradient = in_bf16 and settings.gradient_dtype == "bf16"
        self._reference, self._reference_hash = None, ""
        if settings.grpo.kl and self._adapter is not None:
            self._reference_hash = BASE_REFERENCE
        elif settings.grpo.kl:
            _round(model)
            self._reference_hash = _hash_of(model)
            self._reference = copy.deepcopy(self._policy).requires_grad_(requires_grad=False)
            if in_bf16:
                for frozen in self._reference.parameters():  # no buffers: positions need float32
                    frozen.data = frozen.data.bfloat16()
                self._reference.upcast_layers()
            self._shards.spread(self._reference, self._reference.layers())
        self._shards.spread(self._policy, self._policy.layers())
        # Tied weights have one name here. The model's weights are the rounded masters.
        own = model.named_parameters() if self._adapter is None else self._adapter.weights.items()
        self._weights: dict[str, nn.Parameter] = dict(sorted(own))
        self._masters = MasterWeights(
            self._weights,
            self._shards,
            copy="bf16" if in_bf16 else "f32",
            betas=settings.betas,
            epsilon=settings.epsilon,
            weight_decay=settings.weight_decay,
            longest=settings.adapter_norm,
        )
        self._accumulated: StepFigures | None = None
        """Figures of the step whose gradient is there, until it is updated with."""
        self._head: nn.Parameter = model.get_output_embeddings().weight
        """Weight of the output head, whose gradient is a sum over pieces of a micro-batch."""
        if in_bf16:
            self._policy.upcast_layers()

    def published(self) -> dict[str, Tensor]:
        """Return the published weights: bf16, sorted by Hugging Face name, tied ones once."""
        return self._masters.published()

    def published_state(self) -> ReadableState:
        """Return the published weights, to be read before the next update.

        Weights that are spread over processes are gathered now; others are read where they are.
        """
        if not self._shards.is_whole:
            return state_of(self)
        return {
            name: TensorReader(
                "bf16",
                tuple(weight.shape),
                2 * weight.numel(),
                functools.partial(self._masters.read_published, name),
            )
            for name, weight in self._weights.items()
        }

    def checkpoint(self) -> Checkpoint:
        """Return a copy of all state that decides the next bits; training may go on."""
        notes = {
            SETTINGS: json.dumps(_settings_by_name(self.settings), sort_keys=True),
            RANDOM: NOTHING_RANDOM,
        }
        if self._reference_hash:
            notes[REFERENCE] = self._reference_hash
        return Checkpoint(self.version, self._masters.tensors(), notes)

    def restore(self, checkpoint: Checkpoint) -> None:
        """Continue from a checkpoint, bit for bit; refuse one that does not fit.

        A refusal changes nothing. Tensors and notes of other writers are ignored.
        """
        _check_settings(checkpoint.notes.get(SETTINGS, ""), self.settings)
        if checkpoint.notes.get(RANDOM) != NOTHING_RANDOM:
            raise ConfigError("the checkpoint has random numbers under way, of which this node knows nothing")
        if checkpoint.notes.get(REFERENCE, "") != self._reference_hash:
            raise ConfigError(
                "the checkpoint measures its divergence from another model than this run begins with"
            )
        self._masters.check(checkpoint.tensors)
        self._masters.load(checkpoint.tensors)
        self._accumulated = None
        self.version = checkpoint.step

    def adopt(self, published: Mapping[str, Tensor], *, version: int | None = None) -> int:
        """Continue from published weights; masters that round to them stay.

        The optimiser's moments stay as they are. Return how many weights were changed.
        """
        changed = int(self._shards.sum([float(self._masters.adopt(published))])[0])
        if version is not None:
            self.version = version
        return changed

    def step(self, batch: Sequence[TrainingGroup]) -> StepFigures:
        """Learn from one batch, once."""
        self.accumulate(batch)
        return self.update()

    def accumulate(self, batch: Sequence[TrainingGroup]) -> None:
        """Compute the gradient of a batch, for `update`. No weight changes."""
        rewards = [reward for group in batch for reward in group.rewards]
        if not rewards:
            raise DefectError("a step was asked of a batch without a single completion")
        skipped = sum(len(group.rewards) for group in batch if not self._teaches(group))
        tally, total, weight = self._backward([row for group in batch for row in self._rows(group)])
        overlong = sum(sum(self._overlong(group)) for group in batch if self._teaches(group))
        tally += GrpoTally(completions=skipped + overlong, skipped=skipped, overlong=overlong)
        norm = self._masters.take_gradient(max(weight, 1), self.settings.gradient_norm)
        self._accumulated = StepFigures(
            version=self.version,
            updated=weight > 0 and math.isfinite(norm),
            loss=total / max(weight, 1),
            reward=sum(rewards) / len(rewards),
            gradient_norm=norm,
            learning_rate=learning_rate_at(self.settings, self.version),
            tally=tally,
        )

    def update(self) -> StepFigures:
        """Move the weights against the gradient that was accumulated, once."""
        figures, self._accumulated = self._accumulated, None
        if figures is None:
            raise DefectError("an update was asked for, and no gradient was accumulated")
        if figures.updated:
            self._masters.update(figures.learning_rate)
            self.version += 1
        return dataclasses.replace(figures, version=self.version)

    @torch.no_grad()
    def log_probs(self, group: TrainingGroup) -> list[NDArray[np.float32]]:
        """Return the policy's log-probability of each completion token; no step."""
        found: list[NDArray[np.float32]] = []
        for row in rows_of(group, [0.0] * len(group.rewards), self.settings.row_tokens):
            values, _ = self._policy(pack([row], self._device))
            own = values.cpu().numpy()
            found += [own[place, : len(branch.targets)] for place, branch in enumerate(row.branches)]
        return found

    def _teaches(self, group: TrainingGroup) -> bool:
        return bool(group.rewards) and teaches(self._shaped(group), self.settings.grpo)

    def _shaped(self, group: TrainingGroup) -> Sequence[float]:
        return shaped_rewards(group.rewards, [len(ids) for ids in group.ids], self.settings.grpo)

    def _overlong(self, group: TrainingGroup) -> Sequence[bool]:
        """Return which completions the length limit cut, to leave out of the loss."""
        return group.truncated if self.settings.grpo.overlong_filter else ()

    def _rows(self, group: TrainingGroup) -> list[Row]:
        if not self._teaches(group):
            return []
        group_advantages = advantages(self._shaped(group), self.settings.grpo.advantage)
        if any(overlong := self._overlong(group)):
            kept = [place for place, cut in enumerate(overlong) if not cut]
            group_advantages = [group_advantages[place] for place in kept]
            group = dataclasses.replace(
                group,
                ids=[group.ids[place] for place in kept],
                mu=[group.mu[place] for place in kept],
                rewards=[group.rewards[place] for place in kept],
                truncated=(),
                drawn=group.drawn and [group.drawn[place] for place in kept],
            )
        return list(rows_of(group, group_advantages, self.settings.row_tokens))

    def _backward(self, rows: Sequence[Row]) -> tuple[GrpoTally, float, int]:
        """Leave the gradient of the batch's loss in the model, not divided by its weight."""
        shared = share_prompts(rows, self.settings.row_tokens)
        pieces = list(micro_batches(shared, self.settings.micro_batch_tokens))
        for parameter in self._weights.values():
            parameter.grad = None
            if self._bf16_gradient:  # sums are in float32: over micro-batches, and over the head's pieces
                is_sum = len(pieces) > 1 or parameter is self._head
                parameter.grad_dtype = torch.float32 if is_sum else torch.bfloat16
        tally, total, weight = GrpoTally(), 0.0, 0
        for micro_batch, counts in self._shards.share(pieces):
            part = self._loss(pack(micro_batch, self._device))
            torch.autograd.backward(part.total if counts else 0.0 * part.total)
            if counts:
                tally, total, weight = tally + part.tally, total + part.total.item(), weight + part.weight
        total, divisor, *sums = self._shards.sum([total, weight, *dataclasses.astuple(tally)])
        return GrpoTally.of(sums), total, int(divisor)

    def _loss(self, packed: PackedRows) -> GrpoLoss:
        log_probs, entropies = self._policy(packed)
        reference = None
        if self._reference_hash:
            with torch.no_grad(), nullcontext() if self._adapter is None else self._adapter.off():
                reference, _ = (self._reference or self._policy)(packed)
        return grpo_loss(
            self.settings.grpo,
            log_probs=log_probs,
            entropies=entropies,
            mu=packed.mu,
            mask=packed.mask,
            advantage=packed.advantage,
            current=packed.current,
            sigma=packed.sigma,
            gap_cap=packed.gap_cap,
            reference=reference,
        )


def learn(step: TrainStep, batch: Batch) -> StepFigures:
    """Take one optimiser step on a scored batch. Blocks: call it in a thread."""
    accumulate(step, batch)
    return step.update()


def accumulate(step: TrainStep, batch: Batch) -> None:
    """Compute the gradient of a scored batch. Blocks: call it in a thread."""
    step.accumulate([_training_group(group, batch.policy_step, step.settings) for group in batch.groups])


def state_of(step: TrainStep) -> State:
    """Return a copy of the weights as they would be published now."""
    return {
        name: TensorBytes(
            "bf16", tuple(tensor.shape), tensor.contiguous().view(-1).view(torch.uint8).numpy().data
        )
        for name, tensor in step.published().items()
    }


def _training_group(record: RolloutRecord, policy_step: int, settings: StepSettings) -> TrainingGroup:
    if record.rewards is None:
        raise DefectError(f"group {record.id.hex()[:16]} came to training without rewards")
    group = record.message
    completions = group.completions()
    return TrainingGroup(
        group.prompt_ids(),
        [each.ids for each in completions],
        [each.logprobs for each in completions],
        record.rewards,
        drawn=None if group.ends is None else [each.drawn for each in completions],
        current=record.step == policy_step,
        sigma=settings.spread_of(group.engine),
        gap_cap=settings.gap_cap_of(group.engine),
        truncated=[finish == "length" for finish in group.finish],
    )


def _settings_by_name(settings: StepSettings) -> dict[str, Any]:
    """Return every chosen setting of the step and its loss by name.

    Those that follow from the run are left out. Spreads, gap caps, the longest completion and the
    adapter's norm are no choice.
    """
    values = dataclasses.asdict(settings)
    values |= values.pop("grpo")
    for name in ("spreads", "gap_caps", "completion_limit", "adapter_norm"):
        del values[name]
    return json.loads(json.dumps(values))  # type: ignore[no-any-return]


def _check_settings(written: str, settings: StepSettings) -> None:
    """Refuse a checkpoint that was made with other settings.

    A setting that it does not name had its default: the node that wrote it did not have it yet.
    """
    with boundary(ConfigError, "reading the settings of a checkpoint"):
        before = _settings_by_name(StepSettings()) | dict(json.loads(written))
    now = _settings_by_name(settings)
    changed = [name for name in sorted(before.keys() | now.keys()) if before.get(name) != now.get(name)]
    if changed:
        changes = ", ".join(f"{name} {before.get(name)!r} (now {now.get(name)!r})" for name in changed)
        raise ConfigError(
            f"the checkpoint was made with other settings: {changes}",
            advice="resume it with those it was made with",
        )


@torch.no_grad()
def _round(model: nn.Module) -> None:
    for weight in model.parameters():
        weight.copy_(weight.bfloat16())


def _hash_of(model: nn.Module) -> str:
    hashed = blake3()
    for name, weight in sorted(model.named_parameters()):
        hashed.update(name.encode()).update(
            weight.detach().bfloat16().view(torch.int16).cpu().numpy().tobytes()
        )
    return hashed.hexdigest()
