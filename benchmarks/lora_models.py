"""LoRA folders of the benchmark's shapes, and the sizes of adapters for larger models."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks import engine_models
from echo_node.models.adapter import AdapterSettings, adapter_tensors, all_linear, base_shapes, read_adapter
from echo_node.runs.adapter_folder import make_adapter_folder

RANK: Final = 16
PAPER: Final[dict[str, dict[str, Any]]] = {
    "4B": {  # Qwen3-4B
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": True,
    },
    "7B": {  # Qwen2.5-7B
        "model_type": "qwen2",
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
    },
    "32B": {  # Qwen3-32B
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 5120,
        "intermediate_size": 25600,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": False,
    },
}
"""Shapes whose figures are computed: nothing of them but shapes is made."""


def lora_folder(shape: str, rank: int = RANK) -> Path:
    """Return a shape's folder with an adapter on all linear modules, made if it is not there."""
    base = engine_models.folder(shape)
    settings = AdapterSettings(rank, 2.0 * rank, all_linear(base_shapes(base)))
    place = base.with_name(f"{base.name}-lora{rank}")
    if not (place / "lora.json").exists() or read_adapter(place) != settings:
        make_adapter_folder(base, place, settings, b"benchmark")
    return place


def sizes_of(shape: str, rank: int = RANK) -> tuple[int, int]:
    """Return the bf16 bytes of a paper's model and of its adapter on all linear modules."""
    given = dict(PAPER[shape])
    config = AutoConfig.for_model(given.pop("model_type"), **given)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    shapes = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
    settings = AdapterSettings(rank, 2.0 * rank, all_linear(shapes))
    adapter = sum(math.prod(each.shape) for each in adapter_tensors(shapes, settings))
    return 2 * sum(map(math.prod, shapes.values())), 2 * adapter
