"""Grouped-query attention of one token per row over its row's keys.

transformers repeats keys and values for each head of a group once there is padding, which copies
the whole cache at every token. Here the heads of a group are treated as queries, and nothing is
copied. Prompts use the usual path.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

GROUPED: Final = "echo_grouped"


def _grouped(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    rows, heads, places, size = query.shape
    if places > 1 or rest.get("position_bias") is not None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **rest)
    shared = key.shape[1]
    found = torch.nn.functional.scaled_dot_product_attention(
        query.view(rows, shared, heads // shared, size), key, value, attn_mask=attention_mask, scale=scaling
    )
    return found.reshape(rows, 1, heads, value.shape[-1]), None


AttentionInterface.register(GROUPED, _grouped)
AttentionMaskInterface.register(GROUPED, sdpa_mask)
