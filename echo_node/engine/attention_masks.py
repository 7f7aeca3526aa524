"""Attention masks for rows of token trees, in the form of a family's layers.

A mask that is given to transformers whole replaces the one that it would make, sliding windows
included. So windows are cut here, by the distance between positions, not between places.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar

import torch
from torch import Tensor

from echo_node.models.families import FAMILIES

Mask = TypeVar("Mask")
FULL: Final = "full_attention"
SLIDING: Final = "sliding_attention"


def tree_masks(
    config: Any, seen: Tensor, positions: Tensor, dtype: torch.dtype
) -> Tensor | dict[str, Tensor]:
    """Return what a model of this configuration takes as `attention_mask`.

    `seen` is [rows, places, places] and says which places a place has before it or is; `positions`
    is [rows, places]. Masks are added to attention scores.
    """

    def made(window: int | None) -> Tensor:
        return added_mask(seen if window is None else seen & _near(positions, window), dtype)

    return by_layer_type(config, made)


def by_layer_type(config: Any, made: Callable[[int | None], Mask]) -> Mask | dict[str, Mask]:
    """Return the mask of a window; one per layer type where layers differ."""
    attention = FAMILIES[config.model_type].attention
    window: Any = getattr(config, "sliding_window", None)
    if attention == "full":
        return made(None)
    if attention == "window":
        return made(window)
    masks = {FULL: made(None)}
    if SLIDING in config.layer_types:
        masks[SLIDING] = made(window)
    return masks


def _near(positions: Tensor, window: int) -> Tensor:
    return positions[:, :, None] - positions[:, None, :] < window


def added_mask(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """Return zeros where something is seen, else the least number of the type."""
    mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
    return mask.masked_fill_(~seen, torch.finfo(dtype).min)[:, None]
