"""One optimiser step: groups of completions in, the next weights out.

The forward pass runs on the published bf16 values, upcast to float32, so that it computes what the
samplers computed; the gradient moves float32 masters, which round to what is published next. On one
machine, with one number of threads, the same batches give the same bits: nothing here is random.
Groups have been admitted before they come here.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
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
from echo_node.trainer.grpo import GrpoLoss, GrpoTally, advantages, grpo_loss, teaches
from echo_node.trainer.journal import Batch
from echo_node.trainer.master_weights import MasterWeights
from echo_node.trainer.policy_model import Policy, best_device, open_model
from echo_node.trainer.sharding import Unsharded
from echo_node.trainer.tree_packing import (
    PackedRows,
    Row,
    TrainingGroup,
    micro_batches,
    pack,
    rows_of,
)
from echo_node.weights.tensors import State

__all__ = ["StepFigures", "TrainStep", "TrainingGroup", "learn", "state_of"]

SETTINGS, RANDOM, REFERENCE = "settings", "random", "reference"
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
        self._policy = Policy(
            model,
            settings.vocab_size,
            settings.temperature,
            narrow=settings.mixed_precision == "auto" and self._device.type == "cuda",
        )
        self._reference, self._reference_hash = None, ""
        if settings.grpo.kl:
            _round(model)
            self._reference_hash = _hash_of(model)
            self._reference = copy.deepcopy(self._policy).requires_grad_(requires_grad=False)
            self._shards.spread(self._reference, self._reference.layers())
        self._shards.spread(self._policy, self._policy.layers())
        # Tied weights have one name here. The model always holds the rounded masters.
        self._weights: dict[str, nn.Parameter] = dict(sorted(model.named_parameters()))
        self._masters = MasterWeights(
            self._weights,
            self._shards,
            betas=settings.betas,
            epsilon=settings.epsilon,
            weight_decay=settings.weight_decay,
        )

    def published(self) -> dict[str, Tensor]:
        """Return the published weights: bf16, sorted by Hugging Face name, tied ones once."""
        return self._masters.published()

    def checkpoint(self) -> Checkpoint:
        """Return a copy of all state that decides the next bits; training may go on."""
        notes = {
            SETTINGS: json.dumps(_settings_by_name(self.settings), sort_keys=True),
            RANDOM: NOTHING_RANDOM,
        }
        if self._reference is not None:
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
        rewards = [reward for group in batch for reward in group.rewards]
        if not rewards:
            raise DefectError("a step was asked of a batch without a single completion")
        skipped = sum(len(group.rewards) for group in batch if not self._teaches(group))
        tally, total, weight = self._backward([row for group in batch for row in self._rows(group)])
        tally += GrpoTally(completions=skipped, skipped=skipped)
        rate = self.settings.rate_at(self.version)
        norm = self._masters.take_gradient(max(weight, 1), self.settings.gradient_norm)
        updated = weight > 0 and math.isfinite(norm)
        if updated:
            self._masters.update(rate)
            self.version += 1
        return StepFigures(
            version=self.version,
            updated=updated,
            loss=total / max(weight, 1),
            reward=sum(rewards) / len(rewards),
            gradient_norm=norm,
            learning_rate=rate,
            tally=tally,
        )

    @torch.no_grad()
    def log_probs(self, group: TrainingGroup) -> list[NDArray[np.float32]]:
        """Return the policy's log-probability of each token of each completion, without a step."""
        found: list[NDArray[np.float32]] = []
        for row in rows_of(group, [0.0] * len(group.rewards), self.settings.row_tokens):
            values, _ = self._policy(pack([row], self._device))
            own = values.cpu().numpy()
            found += [own[place, : len(branch.targets)] for place, branch in enumerate(row.branches)]
        return found

    def _teaches(self, group: TrainingGroup) -> bool:
        return bool(group.rewards) and teaches(group.rewards, self.settings.grpo)

    def _rows(self, group: TrainingGroup) -> list[Row]:
        if not self._teaches(group):
            return []
        group_advantages = advantages(group.rewards, self.settings.grpo.advantage)
        return list(rows_of(group, group_advantages, self.settings.row_tokens))

    def _backward(self, rows: Sequence[Row]) -> tuple[GrpoTally, float, int]:
        """Leave the gradient of the batch's loss in the model, not divided by its weight."""
        for parameter in self._weights.values():
            parameter.grad = None
        tally, total, weight = GrpoTally(), 0.0, 0
        pieces = list(micro_batches(rows, self.settings.micro_batch_tokens))
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
        if self._reference is not None:
            with torch.no_grad():
                reference, _ = self._reference(packed)
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
    return step.step([_training_group(group, batch.policy_step, step.settings) for group in batch.groups])


def state_of(step: TrainStep) -> State:
    """Return the weights as they would be published now."""
    return {
        name: TensorBytes(
            "bf16", tuple(tensor.shape), tensor.contiguous().view(torch.uint8).numpy().tobytes()
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
        current=record.step == policy_step,
        sigma=settings.spread_of(group.engine),
        gap_cap=settings.gap_cap_of(group.engine),
    )


def _settings_by_name(settings: StepSettings) -> dict[str, Any]:
    """Return every setting of the step and its loss by name, but those that follow from the run.

    Spreads, gap caps and the longest completion are no choice.
    """
    values = dataclasses.asdict(settings)
    values |= values.pop("grpo")
    for name in ("spreads", "gap_caps", "completion_limit"):
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
