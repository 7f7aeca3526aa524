"""bf16 weights, upcast to float32 layer by layer while a layer computes.

A module's weights are float32 from the hook before its `forward` to the hook after it. What
autograd would save of them is the bf16 weight, which is upcast again going backward; so there is
never more than one layer's copy. Gradients arrive in float32 and are added up in each weight's
`grad_dtype`. Of an embedding only the rows of the given ids are upcast.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from echo_node.errors import DefectError

_Saved = Tensor | tuple[Tensor, torch.Size, tuple[int, ...], int]
"""A saved tensor; or a weight, and the shape, strides and offset of a view of its upcast."""


class LayerUpcast:
    """Upcasts the bf16 weights of every module inside `policy`, whenever it is called.

    Modules of the types `but` compute in bf16.
    """

    def __init__(self, policy: nn.Module, but: tuple[type[nn.Module], ...] = ()) -> None:
        self._held: dict[nn.Module, dict[str, nn.Parameter]] = {}
        """Weights of the modules that are computing."""
        self._padding: dict[nn.Module, int | None] = {}
        """Padding ids of the embeddings that are computing."""
        self._upcasts: dict[int, nn.Parameter] = {}
        """Weights by the address of their upcast, which exists for as long as the entry."""
        for module in policy.modules():
            weights = module._parameters.values()  # noqa: SLF001 - torch.func swaps the same dict
            if any(weight is not None for weight in weights) and not isinstance(module, but):
                module.register_forward_pre_hook(self._before)
                module.register_forward_hook(self._after, always_call=True)

    @contextmanager
    def saving_bf16(self) -> Iterator[None]:
        """Save weights for the backward pass in bf16; upcasts are not kept."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack):
            yield

    def _before(self, module: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...] | None:
        weights = module._parameters  # noqa: SLF001
        held = {name: weight for name, weight in weights.items() if weight is not None}
        if module in self._held:
            raise DefectError(f"a {type(module).__name__} was called while it computes")
        self._held[module] = held
        if isinstance(module, nn.Embedding) and len(given) == 1 and isinstance(given[0], Tensor):
            ids, places = torch.unique(given[0], return_inverse=True)
            rows: Tensor = _Rows.apply(module.weight, ids, module.padding_idx)  # type: ignore[no-untyped-call]
            self._padding[module], module.padding_idx = module.padding_idx, None
            weights["weight"] = rows  # type: ignore[assignment]
            return (places,)
        for name, weight in held.items():
            upcast: Tensor = _Upcast.apply(weight)  # type: ignore[no-untyped-call]
            weights[name] = upcast  # type: ignore[assignment]
            self._upcasts[upcast.untyped_storage().data_ptr()] = weight
        return None

    def _after(self, module: nn.Module, _given: Any, _found: Any) -> None:
        for name, weight in self._held.pop(module, {}).items():
            upcast = module._parameters[name]  # noqa: SLF001
            if upcast is not None:
                self._upcasts.pop(upcast.untyped_storage().data_ptr(), None)
            module._parameters[name] = weight  # noqa: SLF001
        if module in self._padding:
            module.padding_idx = self._padding.pop(module)  # type: ignore[assignment]

    def _pack(self, saved: Tensor) -> _Saved:
        weight = self._upcasts.get(saved.untyped_storage().data_ptr())
        if weight is None:
            return saved
        return weight, saved.shape, saved.stride(), int(saved.storage_offset())


def _unpack(saved: _Saved) -> Tensor:
    if isinstance(saved, Tensor):
        return saved
    weight, shape, strides, offset = saved
    return weight.detach().float().as_strided(shape, strides, offset)


class _Upcast(torch.autograd.Function):
    """A weight in float32, whose gradient is not rounded on its way back."""

    @staticmethod
    def forward(_ctx: Any, weight: Tensor) -> Tensor:
        return weight.float()

    @staticmethod
    def backward(_ctx: Any, slope: Tensor) -> Tensor:
        return slope


class _Rows(torch.autograd.Function):
    """Rows of an embedding in float32; their gradient is added up in place.

    Automatic differentiation would make a gradient as large as the whole embedding first.
    """

    @staticmethod
    def forward(ctx: Any, weight: nn.Parameter, ids: Tensor, padding: int | None) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.parameter, ctx.padding = weight, padding
        return weight.detach()[ids].float()

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[None, None, None]:
        (ids,) = ctx.saved_tensors
        if ctx.padding is not None:
            slope = slope.masked_fill((ids == ctx.padding)[:, None], 0.0)
        gradient = gradient_of(ctx.parameter)
        gradient.index_add_(0, ids, slope.to(gradient.dtype))
        return None, None, None


def gradient_of(weight: nn.Parameter) -> Tensor:
    """Return a weight's gradient for in-place addition; zeros if there is none."""
    if weight.grad is None:
        weight.grad = torch.zeros_like(weight, dtype=weight.grad_dtype or weight.dtype)
    return weight.grad
