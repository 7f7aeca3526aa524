"""Random-weight models in real shapes for the engine benchmark, kept in build/."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from echo_node.engine.base import Change, TensorBytes
from echo_node.weights.open_store import read_folder

FOLDER = Path(__file__).resolve().parent.parent / "build" / "benchmarks" / "engines"

SHAPES = {
    "29M": {  # Qwen3
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 8192,
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "rope_theta": 1e6,
    },
    "135M": {  # Llama, that of SmolLM2-135M
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "rope_theta": 1e5,
    },
    "494M": {  # Qwen2, that of Qwen2.5-0.5B
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "vocab_size": 151936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "rope_theta": 1e6,
    },
}
COMMON = {
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "attention_dropout": 0.0,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "use_cache": True,
}


def folder(name: str) -> Path:
    """Return a model's folder, made if it is not there."""
    place = FOLDER / name
    config = json.dumps(COMMON | SHAPES[name])
    file = place / "config.json"
    if not (file.exists() and file.read_text() == config):
        import torch  # noqa: PLC0415 - only the first time
        import transformers  # noqa: PLC0415

        place.mkdir(parents=True, exist_ok=True)
        file.write_text(config)
        torch.manual_seed(0)
        built = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(place))
        built.to(torch.bfloat16).save_pretrained(place)
        file.write_text(config)
    return place


def weights(name: str) -> dict[str, TensorBytes]:
    return read_folder(folder(name))


def one_percent(state: dict[str, TensorBytes], seed: int) -> list[Change]:
    """Return a step's changes: one element in a hundred, by one unit in the last place."""
    luck = np.random.default_rng(seed)
    changes = []
    for name, tensor in state.items():
        bits = np.frombuffer(tensor.data, "<u2")
        positions = np.flatnonzero(luck.random(bits.size, np.float32) < 0.01)
        changes.append(Change(name, positions, bits[positions] ^ np.uint16(1)))
    return changes


def in_runs(changes: list[Change], state: dict[str, TensorBytes], granule: int) -> list[Change]:
    """Return the same changes in whole runs, for block-quantised types."""
    if granule == 1:
        return changes
    found = []
    for change in changes:
        bits = np.frombuffer(state[change.tensor].data, "<u2").copy()
        bits[change.positions] = change.values
        runs = np.unique(change.positions // granule)
        within = (runs[:, None] * granule + np.arange(granule)).ravel()
        within = within[within < bits.size]
        found.append(Change(change.tensor, within, bits[within]))
    return found
