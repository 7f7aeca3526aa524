"""One optimiser step: groups of completions in, the next version of the weights out.

The forward pass runs on the published bf16 values, upcast to float32, so that it sees what the samplers saw;
the gradient moves float32 masters, which round to what is published next. On one machine, with one number of
threads, the same batches give the same bits: nothing here is random. It knows nothing of peers, heads or
staleness: what it is given has been admitted.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from echo_node.errors import DefectError
from echo_node.trainer.grpo import GrpoLoss, GrpoSettings, GrpoTally, advantages, grpo_loss
from echo_node.trainer.packing import (
    PackedRows,
    Row,
    SampledCompletion,
    TrainingGroup,
    micro_batches,
    pack,
    rows_of,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import Tensor

__all__ = ["SampledCompletion", "StepFigures", "StepSettings", "TrainStep", "TrainingGroup"]


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
    grpo: GrpoSettings = field(default_factory=GrpoSettings)

    def __post_init__(self) -> None:
        for name in ("learning_rate", "gradient_norm", "temperature", "epsilon"):
            if not (math.isfinite(value := getattr(self, name)) and value > 0.0):
                raise ValueError(f"{name} is {value}, and must be above 0")
        if min(self.warm_up, self.weight_decay, self.vocab_size) < 0:
            raise ValueError("warm_up, weight_decay and vocab_size must not be negative")
        if min(self.row_tokens, self.micro_batch_tokens) < 1:
            raise ValueError("row_tokens and micro_batch_tokens must be at least 1")


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
    """

    def __init__(
        self, model_folder: Path, settings: StepSettings, *, threads: int, device: str = "auto"
    ) -> None:
        torch.set_num_threads(threads)
        disable_progress_bar()  # type: ignore[no-untyped-call]
        self.settings = settings
        self.version = 0
        self._device = torch.device(_best_device() if device == "auto" else device)
        model: Any = AutoModelForCausalLM.from_pretrained(
            model_folder, dtype=torch.float32, attn_implementation="sdpa", local_files_only=True
        )
        model.to(self._device).eval()  # dropout would move π_θ away from μ
        # Tied weights have one name here. The model always holds the rounded masters.
        self._weights: dict[str, nn.Parameter] = dict(sorted(model.named_parameters()))
        self._masters = {name: weight.detach().clone() for name, weight in self._weights.items()}
        self._round_masters()
        vocab_size = settings.vocab_size or model.config.vocab_size
        self._policy = _Policy(
            model.base_model, model.get_output_embeddings(), vocab_size, settings.temperature
        )
        self._reference = copy.deepcopy(self._policy) if settings.grpo.kl else None
        self._optimiser = torch.optim.AdamW(
            list(self._masters.values()),
            lr=settings.learning_rate,
            betas=settings.betas,
            eps=settings.epsilon,
            weight_decay=settings.weight_decay,
            fused=True,
        )

    def published(self) -> dict[str, Tensor]:
        """The weights as the world sees them: bf16, by their Hugging Face names, sorted, tied ones once."""
        return {name: master.bfloat16().cpu() for name, master in self._masters.items()}

    def step(self, batch: Sequence[TrainingGroup]) -> StepFigures:
        """Learn from one batch, once."""
        rewards = [reward for group in batch for _, _, reward in group.completions]
        if not rewards:
            raise DefectError("a step was asked of a batch without a single completion")
        tally, total, weight = self._backward([row for group in batch for row in self._rows(group)])
        rate = self.settings.learning_rate * min(1.0, (self.version + 1) / max(self.settings.warm_up, 1))
        norm = self._scale_gradient(weight)
        updated = weight > 0 and math.isfinite(norm)
        if updated:
            self._optimiser.param_groups[0]["lr"] = rate
            self._optimiser.step()
            self._round_masters()
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

    def _rows(self, group: TrainingGroup) -> list[Row]:
        if not group.completions:
            return []
        worth = advantages([reward for _, _, reward in group.completions], self.settings.grpo.advantage)
        return list(rows_of(group, worth, self.settings.row_tokens))

    def _backward(self, rows: Sequence[Row]) -> tuple[GrpoTally, float, int]:
        """Leave in the model the gradient of the batch's whole loss, not yet divided by its weight."""
        for parameter in self._weights.values():
            parameter.grad = None
        tally, total, weight = GrpoTally(), 0.0, 0
        for together in micro_batches(rows, self.settings.micro_batch_tokens):
            part = self._loss(pack(together, self._device))
            torch.autograd.backward(part.total)
            tally, total, weight = tally + part.tally, total + part.total.item(), weight + part.weight
        return tally, total, weight

    def _loss(self, packed: PackedRows) -> GrpoLoss:
        log_probs, entropies = self._policy.look_back(packed)
        reference = None
        if self._reference is not None:
            with torch.no_grad():
                reference, _ = self._reference.look_back(packed)
        return grpo_loss(
            self.settings.grpo,
            log_probs=log_probs,
            entropies=entropies,
            mu=packed.mu,
            mask=packed.mask,
            advantage=packed.advantage,
            reference=reference,
        )

    def _scale_gradient(self, weight: int) -> float:
        """Hand the mean gradient over to the masters, and return its length before it was shortened."""
        for name, parameter in self._weights.items():
            self._masters[name].grad = None if parameter.grad is None else parameter.grad.div_(max(weight, 1))
        norm = nn.utils.clip_grad_norm_(list(self._masters.values()), self.settings.gradient_norm)
        return float(norm)

    @torch.no_grad()
    def _round_masters(self) -> None:
        for name, master in self._masters.items():
            self._weights[name].copy_(master.bfloat16())


@dataclass(frozen=True, slots=True)
class _Policy:
    """A model as a distribution over the first `vocab_size` ids, at the samplers' temperature."""

    body: nn.Module
    head: nn.Module
    vocab_size: int
    temperature: float

    def look_back(self, packed: PackedRows) -> tuple[Tensor, Tensor]:
        """The log-probability of each sampled token, and the entropy at its place, both [B, T]."""
        states: Tensor = self.body(
            input_ids=packed.ids,
            position_ids=packed.position_ids,
            attention_mask=packed.attention,
            use_cache=False,
        ).last_hidden_state
        # Only what predicts a sampled token goes through the vocabulary.
        predicting = states.flatten(0, 1)[packed.sources[packed.mask]]
        every = torch.log_softmax(self.head(predicting)[:, : self.vocab_size] / self.temperature, dim=-1)
        log_probs, entropies = every.new_zeros(packed.mask.shape), every.new_zeros(packed.mask.shape)
        log_probs[packed.mask] = every.gather(1, packed.targets[packed.mask][:, None]).squeeze(1)
        entropies[packed.mask] = -(every.exp() * every).sum(dim=-1)
        return log_probs, entropies


def _best_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"
