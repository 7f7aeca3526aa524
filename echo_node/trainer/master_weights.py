"""Float32 master weights and their optimiser; they round to the published bf16.

The model in use always holds the rounded values, so that its forward pass computes with the weights
that the samplers have.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor, nn

from echo_node.errors import ConfigError
from echo_node.trainer.sharding import Unsharded

MASTER, FIRST, SECOND, COUNTS = "master.", "moment1.", "moment2.", "updates"
_MOMENTS: Final = ((FIRST, "exp_avg"), (SECOND, "exp_avg_sq"))


class MasterWeights:
    """Master weights of a model, by sorted Hugging Face names; tied ones once."""

    def __init__(
        self,
        weights: Mapping[str, nn.Parameter],
        shards: Unsharded,
        *,
        betas: tuple[float, float],
        epsilon: float,
        weight_decay: float,
    ) -> None:
        self._weights = dict(sorted(weights.items()))
        self._shards = shards
        self.parts = {name: shards.part(weight).clone() for name, weight in self._weights.items()}
        """The part of each master weight that this process has."""
        self._optimiser = torch.optim.AdamW(
            list(self.parts.values()), betas=betas, eps=epsilon, weight_decay=weight_decay, fused=True
        )
        self._round()

    def published(self) -> dict[str, Tensor]:
        """Return the weights as they are published: bf16."""
        return {name: self._whole(name, part.bfloat16()).cpu() for name, part in self.parts.items()}

    def take_gradient(self, divisor: int, longest: float) -> float:
        """Take the model's gradient, divided, and clip it to the norm `longest`.

        Return the norm before clipping.
        """
        gradients = []
        for name, weight in self._weights.items():
            if weight.grad is None:
                self.parts[name].grad = None
            else:
                self.parts[name].grad = gradient = self._shards.part(weight.grad).div_(divisor)
                gradients.append(gradient)
        norm = self._shards.norm(gradients)
        nn.utils.clip_grads_with_norm_(list(self.parts.values()), longest, norm)
        return float(norm)

    def update(self, rate: float) -> None:
        self._optimiser.param_groups[0]["lr"] = rate
        self._optimiser.step()
        self._round()

    def tensors(self) -> dict[str, Tensor]:
        """Return copies of the masters, both moments and the number of updates of each."""
        found, counts = {}, []
        for name, part in self.parts.items():
            state = self._optimiser.state.get(part, {})
            found[MASTER + name] = self._whole(name, part).to("cpu", copy=True)
            for prefix, moment in _MOMENTS:
                kept = state.get(moment)
                found[prefix + name] = self._whole(name, torch.zeros_like(part) if kept is None else kept).to(
                    "cpu", copy=True
                )
            counts.append(float(state.get("step", 0.0)))
        found[COUNTS] = torch.tensor(counts, dtype=torch.float32)
        return found

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """Refuse tensors that `load` could not take whole."""
        shapes = {COUNTS: torch.Size([len(self._weights)])}
        for name, weight in self._weights.items():
            shapes |= {prefix + name: weight.shape for prefix in (MASTER, FIRST, SECOND)}
        ours = {name for name in tensors if name == COUNTS or name.startswith((MASTER, FIRST, SECOND))}
        if extra := sorted(ours ^ shapes.keys()):
            raise ConfigError(
                f"the checkpoint is of another model: {extra[0]} is in only one of the two", advice=_MODEL
            )
        for name, shape in shapes.items():
            tensor = tensors[name]
            if tensor.shape != shape or tensor.dtype != torch.float32:
                difference = f"{name} is {tensor.dtype} {list(tensor.shape)}, not float32 {list(shape)}"
                raise ConfigError(f"the checkpoint is of another model: {difference}", advice=_MODEL)
            if not tensor.isfinite().all() or (name.startswith((SECOND, COUNTS)) and (tensor < 0).any()):
                raise ConfigError(f"{name} of the checkpoint has values that training cannot have left there")

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Continue from tensors that `tensors` returned and `check` has passed."""
        for number, (name, part) in enumerate(self.parts.items()):
            part.copy_(self._cut(name, tensors[MASTER + name]))
            part.grad = None
            self._optimiser.state[part] = {
                "step": tensors[COUNTS][number].clone().to(part.device),
                **{
                    moment: self._cut(name, tensors[prefix + name]).to(part.device, copy=True)
                    for prefix, moment in _MOMENTS
                },
            }
        self._round()

    def adopt(self, published: Mapping[str, Tensor]) -> int:
        """Adopt published bf16 weights; a master that rounds to its value already stays.

        Return how many were changed, of this process's part.
        """
        if published.keys() != self._weights.keys():
            extra = min(published.keys() ^ self._weights.keys())
            raise ConfigError(
                f"what was published is of another model: {extra} is in only one of the two", advice=_MODEL
            )
        for name, weight in self._weights.items():
            if published[name].shape != weight.shape or published[name].dtype != torch.bfloat16:
                raise ConfigError(
                    f"what was published is of another model: {name} is of another kind", advice=_MODEL
                )
        changed = 0
        for name, part in self.parts.items():
            target = self._cut(name, published[name]).to(part.device)
            # Bits are compared, not numbers: 0.0 and −0.0 are two values.
            differs = target.view(torch.int16) != part.bfloat16().view(torch.int16)
            part.copy_(torch.where(differs, target.float(), part))
            changed += int(differs.sum())
        self._round()
        return changed

    def _whole(self, name: str, part: Tensor) -> Tensor:
        return self._shards.whole(self._weights[name], part)

    def _cut(self, name: str, whole: Tensor) -> Tensor:
        return self._shards.cut(self._weights[name], whole)

    @torch.no_grad()
    def _round(self) -> None:
        for name, part in self.parts.items():
            self._shards.part(self._weights[name]).copy_(part.bfloat16())


_MODEL: Final = "resume with the checkpoints of this run"
