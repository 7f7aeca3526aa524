"""One optimiser step: groups of completions in, the next version of the weights out.

The forward pass runs on the published bf16 values, upcast to float32, so that it sees what the samplers saw;
the gradient moves float32 masters, which round to what is published next. On one machine, with one number of
threads, the same batches give the same bits: nothing here is random. It knows nothing of peers, heads or
staleness: what it is given has been admitted.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import torch
from blake3 import blake3
from torch import Tensor, nn

from echo_node.errors import ConfigError, DefectError, boundary
from echo_node.trainer.checkpoint import Checkpoint
from echo_node.trainer.grpo import GrpoLoss, GrpoSettings, GrpoTally, advantages, grpo_loss, teaches
from echo_node.trainer.masters import Masters
from echo_node.trainer.packing import (
    PackedRows,
    Row,
    SampledCompletion,
    TrainingGroup,
    micro_batches,
    pack,
    rows_of,
)
from echo_node.trainer.policy import Policy, best_device, open_model
from echo_node.trainer.shards import Whole

__all__ = ["SampledCompletion", "StepFigures", "StepSettings", "TrainStep", "TrainingGroup"]

SETTINGS, RANDOM, REFERENCE = "settings", "random", "reference"
NOTHING_RANDOM: Final = "nothing"
"""What a checkpoint's note says of the state of random numbers."""


@dataclass(frozen=True, slots=True)
class StepSettings:
    """The numbers of the optimiser, and of how a batch is cut.

    learning_rate       after the warm-up, which climbs to it in a straight line
    warm_up             steps
    betas, epsilon      of AdamW
    weight_decay        of AdamW
    gradient_norm       the longest gradient; a longer one is scaled down to it
    temperature         at which the samplers drew: log-probabilities are of the distribution at it
    vocab_size          the softmax is over this many first ids; 0: over all that the model has
    row_tokens          completions of a group share a row, and the prompt in it, up to this length
    micro_batch_tokens  rows are run together up to this many tokens, padding included
    gradient_checkpointing  keep only what enters each block of the model, and compute the rest again going backward
    mixed_precision     "auto": multiply in bf16 where the device is made for it; "off": float32 everywhere
    spreads             by engine class, how far its log-probabilities spread from the trainer's; see `GrpoSettings`
    """

    learning_rate: float = 2e-4
    warm_up: int = 20
    betas: tuple[float, float] = (0.9, 0.99)
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    gradient_norm: float = 1.0
    temperature: float = 1.0
    vocab_size: int = 0
    row_tokens: int = 256
    micro_batch_tokens: int = 1024
    gradient_checkpointing: bool = False
    mixed_precision: Literal["auto", "off"] = "auto"
    spreads: tuple[tuple[str, float], ...] = ()
    grpo: GrpoSettings = field(default_factory=GrpoSettings)

    def __post_init__(self) -> None:
        for name in ("learning_rate", "gradient_norm", "temperature", "epsilon"):
            if not (math.isfinite(value := getattr(self, name)) and value > 0.0):
                raise ValueError(f"{name} is {value}, and must be above 0")
        if min(self.warm_up, self.weight_decay, self.vocab_size) < 0:
            raise ValueError("warm_up, weight_decay and vocab_size must not be negative")
        if min(self.row_tokens, self.micro_batch_tokens) < 1:
            raise ValueError("row_tokens and micro_batch_tokens must be at least 1")
        if not all(0.0 <= beta < 1.0 for beta in self.betas):
            raise ValueError(f"betas are {self.betas}, and must be from 0 to below 1")
        if self.mixed_precision not in {"auto", "off"}:
            raise ValueError(f"mixed_precision is 'auto' or 'off', not {self.mixed_precision!r}")

    def spread_of(self, engine: str) -> float:
        return dict(self.spreads).get(engine, 0.0)


@dataclass(frozen=True, slots=True)
class StepFigures:
    """What one step was made of. `updated` is false when there was nothing to learn from."""

    version: int
    updated: bool
    loss: float
    reward: float
    gradient_norm: float
    learning_rate: float
    tally: GrpoTally


class TrainStep:
    """The policy in training: masters, optimiser and, as `version`, the number of steps taken.

    It sets torch's number of threads, which is the whole process's: a trainer has a process of its own.
    Where `shards` spreads the weights over processes, each has one of these and all are called alike.
    """

    def __init__(
        self,
        model_folder: Path,
        settings: StepSettings,
        *,
        threads: int,
        device: str = "auto",
        shards: Whole | None = None,
    ) -> None:
        torch.set_num_threads(threads)
        self.settings = settings
        self.version = 0
        self._device = torch.device(best_device() if device == "auto" else device)
        self._shards = shards or Whole()
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
        self._masters = Masters(
            self._weights,
            self._shards,
            betas=settings.betas,
            epsilon=settings.epsilon,
            weight_decay=settings.weight_decay,
        )

    def published(self) -> dict[str, Tensor]:
        """The weights as the world sees them: bf16, by their Hugging Face names, sorted, tied ones once."""
        return self._masters.published()

    def checkpoint(self) -> Checkpoint:
        """All that decides the next bits. It is a copy: training may go on while it is written."""
        notes = {SETTINGS: json.dumps(_told(self.settings), sort_keys=True), RANDOM: NOTHING_RANDOM}
        if self._reference is not None:
            notes[REFERENCE] = self._reference_hash
        return Checkpoint(self.version, self._masters.tensors(), notes)

    def restore(self, checkpoint: Checkpoint) -> None:
        """Go on from a checkpoint, bit for bit as it would have. What does not fit is refused, and changes nothing.

        Tensors and notes that somebody else has added are passed over.
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
        """Go on from what was published, at that version: masters that round to it stay, others become it.

        The optimiser's moments stay as they are. Returns how many weights were changed.
        """
        changed = int(self._shards.sum([float(self._masters.adopt(published))])[0])
        if version is not None:
            self.version = version
        return changed

    def step(self, batch: Sequence[TrainingGroup]) -> StepFigures:
        """Learn from one batch, once."""
        rewards = [reward for group in batch for _, _, reward in group.completions]
        if not rewards:
            raise DefectError("a step was asked of a batch without a single completion")
        skipped = sum(len(group.completions) for group in batch if not self._teaches(group))
        tally, total, weight = self._backward([row for group in batch for row in self._rows(group)])
        tally += GrpoTally(completions=skipped, skipped=skipped)
        rate = self.settings.learning_rate * min(1.0, (self.version + 1) / max(self.settings.warm_up, 1))
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

    def _teaches(self, group: TrainingGroup) -> bool:
        rewards = [reward for _, _, reward in group.completions]
        return bool(rewards) and teaches(rewards, self.settings.grpo)

    def _rows(self, group: TrainingGroup) -> list[Row]:
        if not self._teaches(group):
            return []
        worth = advantages([reward for _, _, reward in group.completions], self.settings.grpo.advantage)
        return list(rows_of(group, worth, self.settings.row_tokens))

    def _backward(self, rows: Sequence[Row]) -> tuple[GrpoTally, float, int]:
        """Leave in the model the gradient of the batch's whole loss, not yet divided by its weight."""
        for parameter in self._weights.values():
            parameter.grad = None
        tally, total, weight = GrpoTally(), 0.0, 0
        pieces = list(micro_batches(rows, self.settings.micro_batch_tokens))
        for together, counts in self._shards.share(pieces):
            part = self._loss(pack(together, self._device))
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
            reference=reference,
        )


def _told(settings: StepSettings) -> dict[str, Any]:
    """Every number of the step by its name, those of the loss beside those of the optimiser. Spreads are no choice, but
    follow from the run.
    """
    told = dataclasses.asdict(settings)
    del told["spreads"]
    return json.loads(json.dumps(told | told.pop("grpo")))  # type: ignore[no-any-return]


def _check_settings(written: str, settings: StepSettings) -> None:
    """A number that the checkpoint does not name had its default: the node that wrote it did not have it yet."""
    with boundary(ConfigError, "reading the settings of a checkpoint"):
        before = _told(StepSettings()) | dict(json.loads(written))
    now = _told(settings)
    apart = [name for name in sorted(before.keys() | now.keys()) if before.get(name) != now.get(name)]
    if apart:
        told = ", ".join(f"{name} {before.get(name)!r} (now {now.get(name)!r})" for name in apart)
        raise ConfigError(
            f"the checkpoint was made with other settings: {told}",
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
