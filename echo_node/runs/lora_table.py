"""The `[lora]` table of a run's file."""

from __future__ import annotations

import math
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from echo_node.models.adapter import AdapterSettings, all_linear, base_shapes
from echo_node.models.progress import Progress
from echo_node.runs.adapter_folder import make_adapter_folder
from protocol import limits


class LoraTable(BaseModel):
    """LoRA: train an adapter on a frozen base, in place of the whole model."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, strict=True)

    rank: int = Field(ge=1, le=limits.ADAPTER_RANK)
    alpha: float | None = Field(default=None, gt=0.0)
    """Scaling, as PEFT's `lora_alpha`; twice the rank if left out."""
    targets: list[str] = Field(default_factory=list, max_length=limits.ADAPTER_TARGETS)
    """Last names of the linear modules that get an adapter; all but the output head if empty."""
    norm: float | None = Field(default=None, gt=0.0)
    """Longest norm of each matrix of the adapter; four times that of the first A if left out."""

    @property
    def longest(self) -> float:
        """Longest norm of each matrix; √(rank / 3) is that of the first A."""
        return self.norm or 4 * math.sqrt(self.rank / 3)

    def make_folder(self, base: Path, to: Path, seed: bytes, progress: Progress) -> Path:
        """Write the run's model folder: the base, and the first adapter."""
        targets = tuple(sorted(set(self.targets))) or all_linear(base_shapes(base))
        settings = AdapterSettings(self.rank, self.alpha or 2.0 * self.rank, targets)
        return make_adapter_folder(base, to, settings, seed, progress)
