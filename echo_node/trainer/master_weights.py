"""Master weights in 16 extra bits, and AdamW on them, chunk by chunk.

The model's own weights are the published bf16 values; with a 16-bit remainder each is the float32
master, bit for bit (`master_bits`). So the forward pass computes with the weights that the samplers
have, and there is no second copy. A step joins a chunk, moves it with torch's fused AdamW, and
splits it again: the masters become what AdamW on float32 weights would make of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim.adamw import adamw

from echo_node.errors import ConfigError
from echo_node.trainer.master_bits import join, split
from echo_node.trainer.sharding import Unsharded

MASTER, FIRST, SECOND, COUNTS = "master.", "moment1.", "moment2.", "updates"
CHUNK: Final = 2**20
"""Masters that are joined at a time: 4 MB in float32."""


class MasterWeights:
    """Master weights of a model, by sorted Hugging Face names; tied ones once.

    With the copy "bf16" the model's weights become bf16; with "f32" they stay float32 and have the
    same values, for a device that computes in float32 and has the memory.
    """

    def __init__(
        self,
        weights: Mapping[str, nn.Parameter],
        shards: Unsharded,
        *,
        copy: Literal["bf16", "f32"],
        betas: tuple[float, float],
        epsilon: float,
        weight_decay: float,
        longest: float | None = None,
    ) -> None:
        """Take over the weights; `longest` bounds the norm of each of them, as published."""
        self._weights = dict(sorted(weights.items()))
        self._shards = shards
        self._longest = longest
        self._betas, self._epsilon, self._weight_decay = betas, epsilon, weight_decay
        self._remainders: dict[str, Tensor] = {}
        self._moments: dict[str, tuple[Tensor, Tensor]] = {}
        """Both moments of the weights that were updated, flat."""
        self._counts = dict.fromkeys(self._weights, 0.0)
        """Updates of each weight."""
        self._gradients: dict[str, Tensor] = {}
        self._scale = torch.tensor(1.0)
        """Factor of the gradients that were taken."""
        for name, weight in self._weights.items():
            part = shards.part(weight)
            self._remainders[name] = torch.empty(part.numel(), dtype=torch.int16, device=part.device)
            if copy == "bf16":
                weight.data = torch.empty_like(part, dtype=torch.bfloat16)
                weight.grad_dtype = torch.float32
            self._write(name, part)

    @property
    def parts(self) -> dict[str, Tensor]:
        """The part of each master weight that this process has, in float32: a copy."""
        return {name: self._master(name) for name in self._weights}

    def published(self) -> dict[str, Tensor]:
        """Return a copy of the weights as they are published: bf16."""
        return {
            name: self._whole(name, self._value(name).bfloat16()).to("cpu", copy=True)
            for name in self._weights
        }

    def read_published(self, name: str, start: int, end: int) -> NDArray[np.uint8]:
        """Return some bytes of a published weight, without a copy where possible.

        They change with the next update. Only a process that has whole weights has them. Several
        threads may read: on a CPU none of torch's are used, which are the step's.
        """
        flat, first = self._flat(name), start // 2
        piece = flat[first : -(-end // 2)]
        if piece.dtype == torch.float32 and piece.device.type == "cpu":  # exact: bf16 is the upper half
            halves = piece.numpy().view("<u2").reshape(-1, 2)[:, 1]
            data: NDArray[np.uint8] = np.ascontiguousarray(halves).view(np.uint8)
        else:
            data = piece.bfloat16().cpu().view(torch.uint8).numpy()
        return data[start - 2 * first : end - 2 * first]

    def take_gradient(self, divisor: int, longest: float) -> float:
        """Take the model's gradient, divided, to be clipped to the norm `longest`.

        If part of it is in bf16, all of it becomes so. Return the norm before clipping.
        """
        self._gradients.clear()
        narrow = any(
            weight.grad is not None and weight.grad.dtype == torch.bfloat16
            for weight in self._weights.values()
        )
        for name, weight in self._weights.items():
            if weight.grad is None:
                continue
            part = self._shards.part(weight.grad)
            if narrow:
                self._gradients[name] = part.bfloat16()
                weight.grad = None  # that of the output head was float32
            else:
                self._gradients[name] = part.div_(divisor)
        norm = self._shards.norm(list(self._gradients.values()))
        if narrow:
            norm = norm / divisor
        self._scale = (longest / (norm + 1e-6)).clamp(max=1.0)
        if narrow:
            self._scale = self._scale / divisor
        return float(norm)

    def update(self, rate: float) -> None:
        """Move the masters against the gradient that was taken, and let go of it."""
        for name, gradient in self._gradients.items():
            flat, remainders = self._flat(name), self._remainders[name]
            if name not in self._moments:
                zeros = torch.zeros(flat.numel(), dtype=torch.float32, device=flat.device)
                self._moments[name] = zeros, zeros.clone()
            first, second = self._moments[name]
            slope = gradient.reshape(-1)
            for chunk in _chunks(flat):
                master = join(flat[chunk], remainders[chunk])
                adamw(
                    [master],
                    [slope[chunk].float() * self._scale],
                    [first[chunk]],
                    [second[chunk]],
                    [],
                    [torch.tensor(self._counts[name], dtype=torch.float32, device=flat.device)],
                    fused=True,
                    amsgrad=False,
                    beta1=self._betas[0],
                    beta2=self._betas[1],
                    lr=rate,
                    weight_decay=self._weight_decay,
                    eps=self._epsilon,
                    maximize=False,
                )
                self._write_chunk(name, chunk, master)
            self._counts[name] += 1.0
            self._weights[name].grad = None
            self._bound(name)
        self._gradients.clear()

    def _bound(self, name: str) -> None:
        """Shrink a weight that has outgrown the longest norm."""
        if self._longest is None:
            return
        norm = float(self._shards.norm([self._value(name).float()]))
        if norm > self._longest:
            self._write(name, self._master(name) * (_SHRINK * self._longest / norm))

    def tensors(self) -> dict[str, Tensor]:
        """Return copies of the masters, both moments and the number of updates of each."""
        found = {}
        for name in self._weights:
            master = self._master(name)
            found[MASTER + name] = self._whole(name, master).cpu()
            moments = self._moments.get(name) or (torch.zeros_like(master), torch.zeros_like(master))
            for prefix, moment in zip((FIRST, SECOND), moments, strict=True):
                shaped = moment.view(master.shape)
                found[prefix + name] = self._whole(name, shaped).to("cpu", copy=True)
        found[COUNTS] = torch.tensor(list(self._counts.values()), dtype=torch.float32)
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
        self._gradients.clear()
        for number, name in enumerate(self._weights):
            device = self._remainders[name].device
            self._write(name, self._cut(name, tensors[MASTER + name]).to(device))
            self._weights[name].grad = None
            self._counts[name] = float(tensors[COUNTS][number])
            first, second = (
                self._cut(name, tensors[prefix + name]).reshape(-1).to(device, copy=True)
                for prefix in (FIRST, SECOND)
            )
            self._moments[name] = first, second

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
        for name in self._weights:
            value, remainders = self._value(name), self._remainders[name]
            target = self._cut(name, published[name]).to(value.device)
            # Bits are compared, not numbers: 0.0 and −0.0 are two values.
            differs = target.view(torch.int16) != value.bfloat16().view(torch.int16)
            with torch.no_grad():
                value.copy_(target)
            remainders.masked_fill_(differs.reshape(-1), 0)
            changed += int(differs.sum())
        return changed

    def _value(self, name: str) -> Tensor:
        return self._shards.part(self._weights[name])

    def _flat(self, name: str) -> Tensor:
        return self._value(name).view(-1)

    def _master(self, name: str) -> Tensor:
        value = self._value(name)
        return join(value, self._remainders[name].view(value.shape))

    def _whole(self, name: str, part: Tensor) -> Tensor:
        return self._shards.whole(self._weights[name], part)

    def _cut(self, name: str, whole: Tensor) -> Tensor:
        return self._shards.cut(self._weights[name], whole)

    def _write(self, name: str, masters: Tensor) -> None:
        flat = masters.reshape(-1)
        for chunk in _chunks(flat):
            self._write_chunk(name, chunk, flat[chunk])

    @torch.no_grad()
    def _write_chunk(self, name: str, chunk: slice, master: Tensor) -> None:
        values, remainders = split(master)
        self._flat(name)[chunk] = values
        self._remainders[name][chunk] = remainders


def _chunks(flat: Tensor) -> Iterator[slice]:
    return (slice(start, start + CHUNK) for start in range(0, len(flat), CHUNK))


_SHRINK: Final = 1 - 2**-8
"""Factor below a bound on the norm, so that rounding to bf16 does not pass it again."""
_MODEL: Final = "resume with the checkpoints of this run"
