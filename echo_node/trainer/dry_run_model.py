"""A small random model with the structure of a large one, for a dry run.

Kept are the family, its settings and the turn of its layers; cut are sizes, the number of layers
and the window. Weights are scaled so that soft caps saturate.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

VOCABULARY: Final = 128
CONTEXT: Final = 160
WINDOW: Final = 12
"""Of the cut model, in tokens: sequences of a dry run are longer."""
_LONGEST_PERIOD: Final = 8
"""Layers. Where no turn of so few is found, the first and the last two layers are taken."""
_PER_LAYER: Final = ("layer_types", "no_rope_layers")


def write_cut_model(folder: Path, target: Path) -> None:
    """Write a random model that is built as the one of `folder` is."""
    config: Any = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    _cut_layers(config)
    _cut_sizes(config)
    make: Any = AutoModelForCausalLM
    model = make.from_config(config, trust_remote_code=False)
    draw_weights(model)
    model.to(torch.bfloat16).save_pretrained(target)


@torch.no_grad()
def draw_weights(model: nn.Module, seed: int = 0) -> None:
    """Draw weights with a peaked distribution that reaches the soft caps.

    Both attention scores and logits reach theirs.
    """
    config: Any = model.config
    draws = torch.Generator().manual_seed(seed)
    norm = 0.0 if config.model_type.startswith("gemma") else 1.0  # the gemmas add 1 themselves
    for name, weight in model.named_parameters():
        scale = 0.3 if weight.ndim == 1 else 1.5 / weight.shape[-1] ** 0.5
        if "q_proj" in name and (cap := getattr(config, "attn_logit_softcapping", None)):
            scale *= cap / 2
        if weight.shape[0] == config.vocab_size and (cap := getattr(config, "final_logit_softcapping", None)):
            scale *= cap / 1.5
        weight.copy_(torch.randn(weight.shape, generator=draws) * scale)
        if weight.ndim == 1 and "bias" not in name:
            weight.add_(norm)


def kept_layers(patterns: Sequence[Any]) -> list[int]:
    """Return one full period of layers and the next, or the first and last ones."""
    layers = len(patterns)
    for period in range(1, min(layers, _LONGEST_PERIOD) + 1):
        if all(patterns[place] == patterns[place % period] for place in range(layers)):
            return list(range(min(layers, period + 1)))
    return sorted({0, 1, layers - 2, layers - 1})


def _cut_layers(config: Any) -> None:
    per_layer = {
        key: value for key in _PER_LAYER if isinstance(value := getattr(config, key, None), list) and value
    }
    patterns = list(zip(*per_layer.values(), strict=True)) or [()] * config.num_hidden_layers
    kept = kept_layers(patterns)
    for key, value in per_layer.items():
        setattr(config, key, [value[place] for place in kept])
    config.num_hidden_layers = len(kept)


def _cut_sizes(config: Any) -> None:
    heads = config.num_attention_heads
    own_kv = getattr(config, "num_key_value_heads", None) or heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    fills = heads * size == config.hidden_size
    kv = min(own_kv, 2)
    config.num_attention_heads = kv * min(heads // own_kv, 2)
    if hasattr(config, "num_key_value_heads"):
        config.num_key_value_heads = kv
    config.hidden_size = config.num_attention_heads * size if fills else 128
    if hasattr(config, "intermediate_size"):
        config.intermediate_size = 128
    if getattr(config, "query_pre_attn_scalar", None):
        config.query_pre_attn_scalar = size
    if getattr(config, "sliding_window", None):
        config.sliding_window = min(config.sliding_window, WINDOW)
    config.vocab_size = VOCABULARY
    config.max_position_embeddings = CONTEXT
    config.bos_token_id = config.pad_token_id = None
    config.eos_token_id = 1
