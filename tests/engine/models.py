"""Tiny models with random weights, as folders, and their weights as bytes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.torch import load_file

from echo_node.engine.base import SamplingLimits, SlotRequest, TensorBytes

VOCABULARY = 40  # of which the last eight are padding
LIMITS = SamplingLimits(max_tokens=9, temperature=1.0, end_tokens=frozenset({3, 7}), vocab_size=32)
HEAD = b"h" * 32
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "max_position_embeddings": 48,
    "bos_token_id": None,
    "eos_token_id": 3,
    "pad_token_id": None,
}


def folder(at: Path, family: str = "Qwen3", seed: int = 0, **settings) -> Path:
    """A model's folder. The weights are large enough for a distribution with an opinion."""
    config = getattr(transformers, f"{family}Config")(**{**SHAPE, **settings})
    model = transformers.AutoModelForCausalLM.from_config(config)
    draws = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randn(weight.shape, generator=draws) * 0.3 + (weight.ndim == 1))
    model.to(torch.bfloat16).save_pretrained(at)
    return at


def weights(at: Path) -> dict[str, TensorBytes]:
    return {name: tensor(value) for name, value in load_file(at / "model.safetensors").items()}


def tensor(value: torch.Tensor) -> TensorBytes:
    names = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}
    return TensorBytes(
        names[value.dtype], tuple(value.shape), value.contiguous().view(torch.uint8).numpy().tobytes()
    )


def requests(
    count: int, *, group_size: int = 5, seed: int = 0, lengths=(4,), limits: SamplingLimits = LIMITS
) -> list[SlotRequest]:
    draws = np.random.default_rng(seed)
    return [
        SlotRequest(
            draws.integers(0, limits.vocab_size, lengths[place % len(lengths)]),
            draws.bytes(32),
            group_size,
            limits,
        )
        for place in range(count)
    ]
