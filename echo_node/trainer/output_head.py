"""Log-probability and entropy through a model's own output head, in pieces.

The head is the model's own `forward`, with its body replaced by one that returns the hidden states
it is given: whatever a family does after its last layer (scaling, soft caps) is done here too.
Logits of a few tokens exist at a time; going backward they are computed again, so that memory grows
with tokens × hidden size, not with tokens × vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

from echo_node.errors import DefectError
from echo_node.trainer.layer_upcast import gradient_of

PIECE: Final = 2**24
"""Logits that exist at a time: 64 MB in float32, several times that with what follows from them."""

UPCAST: Final = 2**21
"""Weights of a bf16 head that are upcast at a time: 8 MB in float32."""


class OutputHead(nn.Module):
    """A model's computation after its last layer, over the first `vocab_size` ids."""

    def __init__(self, model: Any, vocab_size: int, temperature: float) -> None:
        super().__init__()
        self.own: Any = _without_body(model)
        self._vocab_size = vocab_size or model.config.vocab_size
        self._temperature = temperature
        self.piece = max(1, PIECE // int(model.config.vocab_size))
        """Tokens whose logits exist at a time."""

    def forward(self, states: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return log-probability and entropy, [N], of targets [N] after states [N, H]."""
        if len(states) <= self.piece:
            return self._measure(states, targets)
        parts = [
            checkpoint(self._measure, *part, use_reentrant=False)
            for part in zip(torch.split(states, self.piece), torch.split(targets, self.piece), strict=True)
        ]
        log_probs, entropies = zip(*parts, strict=True)
        return torch.cat(log_probs), torch.cat(entropies)

    def _measure(self, states: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits: Tensor = self.own(inputs_embeds=states[None], use_cache=False).logits[0]
        if logits.shape[1] > self._vocab_size:
            logits = logits[:, : self._vocab_size]
        measured: tuple[Tensor, Tensor] = _Measure.apply(logits, targets, self._temperature)  # type: ignore[no-untyped-call]
        return measured


class _Measure(torch.autograd.Function):
    """Log-probability and entropy of logits [N, V] at targets [N], in float32.

    The gradient is written out: automatic differentiation would keep twice as many copies.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        every = torch.log_softmax(logits.float() / temperature, dim=-1)
        log_probs = every.gather(1, targets[:, None]).squeeze(1)
        entropies = every.exp().mul_(every).sum(dim=-1).neg_()
        ctx.save_for_backward(every, targets, entropies)
        ctx.temperature, ctx.dtype = temperature, logits.dtype
        return log_probs, entropies

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor, None, None]:
        """Return the slope of z: g·(onehot − p) − h·p·(log p + H), over the temperature."""
        every, targets, entropies = ctx.saved_tensors
        of_log_prob, of_entropy = (slope[:, None] for slope in slopes)
        slope = (every + entropies[:, None]).mul_(of_entropy).add_(of_log_prob)
        slope.mul_(every.exp()).neg_().scatter_add_(1, targets[:, None], of_log_prob.contiguous())
        return slope.div_(ctx.temperature).to(ctx.dtype), None, None


class _GivenStates(nn.Module):
    """Stands for a model's body; returns its inputs as the last hidden states."""

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> Any:
        return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=inputs_embeds)  # type: ignore[arg-type]


class _Projection(nn.Module):
    """A linear layer that adds its weight's gradient up in place, piece by piece.

    Automatic differentiation would make a gradient as large as the weight for each piece, and hold
    several of them at a time.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, states: Tensor) -> Tensor:
        weight = self.linear.weight
        if not (torch.is_grad_enabled() and (weight.requires_grad or states.requires_grad)):
            return _product(states, weight)
        logits: Tensor = _Project.apply(states, weight)  # type: ignore[no-untyped-call]
        return logits


class _Project(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(states, weight)
        ctx.parameter = weight  # whose gradient is written to
        return _product(states, weight)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None]:
        states, weight = ctx.saved_tensors
        rows = slope.flatten(0, -2)
        if ctx.parameter.requires_grad:  # the base of an adapter is frozen
            gradient = gradient_of(ctx.parameter)
            gradient.addmm_(rows.t().to(gradient.dtype), states.flatten(0, -2).to(gradient.dtype))
        if weight.dtype == rows.dtype or rows.dtype != torch.float32:
            back = rows @ weight.to(rows.dtype)
        else:
            back = torch.zeros(len(rows), weight.shape[1], device=rows.device)
            for part in _parts(weight):
                back.addmm_(rows[:, part], weight[part].float())
        return back.view(states.shape).to(states.dtype), None


def _product(states: Tensor, weight: Tensor) -> Tensor:
    """Return states · weightᵀ; upcast a bf16 weight in cache-sized parts."""
    if weight.dtype == states.dtype or torch.is_autocast_enabled(states.device.type):
        return nn.functional.linear(states, weight)
    rows = states.flatten(0, -2)
    logits = torch.empty(len(rows), len(weight), device=states.device)
    for part in _parts(weight):
        logits[:, part] = rows @ weight[part].float().t()
    return logits.view(*states.shape[:-1], len(weight))


def _parts(weight: Tensor) -> Iterator[slice]:
    step = max(1, UPCAST // weight.shape[1])
    return (slice(start, start + step) for start in range(0, len(weight), step))


def _without_body(model: Any) -> Any:
    """Return a copy of a model that shares all but the body and last product."""
    if model.base_model is model:
        raise DefectError(f"a {model.config.model_type} model has no body apart from its output head")
    head = copy.copy(model)
    modules: dict[str, Any] = {**head.__dict__["_modules"], model.base_model_prefix: _GivenStates()}
    last = model.get_output_embeddings()
    for name, module in modules.items():
        if module is last and type(module) is nn.Linear and getattr(module, "bias", None) is None:
            modules[name] = _Projection(module)
    head.__dict__["_modules"] = modules  # of the copy: the model keeps its own
    return head
