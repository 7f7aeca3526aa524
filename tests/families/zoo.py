"""Tiny random models of every family: windows that bite, odd head sizes, saturated soft caps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from echo_node.trainer.dry_run_model import draw_weights

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 6.0, "original_max_position_embeddings": 16}
PARTIAL = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + place / 4 for place in range(8)],
    "long_factor": [2.0 + place for place in range(8)],
    "original_max_position_embeddings": 64,
}
WINDOW = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}
SCALES = {
    "logits_scaling": 0.4,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.2,
}
VOCABULARY = 97
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 96,
    "bos_token_id": None,
    "eos_token_id": 3,
    "pad_token_id": None,
}
GEMMA = {"head_dim": 20, "tie_word_embeddings": True}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"head_dim": 20, "attention_bias": True, "mlp_bias": True}),
    "llama, tied, llama-3 positions": ("Llama", {"tie_word_embeddings": True, "rope_parameters": LLAMA3}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2, untied, yarn": ("Qwen2", {"tie_word_embeddings": False, "rope_parameters": YARN}),
    "qwen2, windows": ("Qwen2", WINDOW),
    "qwen3": ("Qwen3", {"head_dim": 20, "tie_word_embeddings": True}),
    "qwen3, untied, windows": ("Qwen3", {"head_dim": 12, "tie_word_embeddings": False, **WINDOW}),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 10}),
    "mistral, window": ("Mistral", {"sliding_window": 7, "tie_word_embeddings": True}),
    "phi3": ("Phi3", {"sliding_window": None, "tie_word_embeddings": True}),
    "phi3, window": ("Phi3", {"sliding_window": 9}),
    "phi3, longrope": ("Phi3", {"sliding_window": None, "rope_parameters": LONGROPE}),
    "phi3, heads turned in part": ("Phi3", {"sliding_window": None, "rope_parameters": PARTIAL}),
    "gemma": ("Gemma", GEMMA),
    "gemma2": (
        "Gemma2",
        {
            **GEMMA,
            "sliding_window": 7,
            "query_pre_attn_scalar": 20,
            "attn_logit_softcapping": 12.0,
            "final_logit_softcapping": 8.0,
        },
    ),
    "gemma3_text": (
        "Gemma3Text",
        {
            **GEMMA,
            "sliding_window": 7,
            "query_pre_attn_scalar": 20,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "final_logit_softcapping": 8.0,
        },
    ),
    "granite": ("Granite", SCALES),
    "granite, tied": ("Granite", {**SCALES, "tie_word_embeddings": True}),
    "olmo2": ("Olmo2", {}),
    "olmo2, tied": ("Olmo2", {"tie_word_embeddings": True}),
    "smollm3": ("SmolLM3", {"tie_word_embeddings": True}),
    "smollm3, untied": ("SmolLM3", {"tie_word_embeddings": False, "head_dim": 10}),
    "gpt2": ("GPT2", {"n_embd": 64}),
}


REFUSED_BY_LLAMA = {
    "qwen2, windows": "slides over a window of 7 tokens",
    "qwen3, untied, windows": "slides over a window of 7 tokens",
    "phi3, longrope": "scaled by 'longrope'",
    "phi3, heads turned in part": "turned in part",
    "olmo2, tied": "whose output is tied",
    "gpt2": "a model of type 'gpt2'",
}
REFUSED_AS_F32 = dict.fromkeys(("gemma", "gemma2", "gemma3_text"), "rounds the activation")


def make(at: Path, name: str, seed: int = 0, **changes: Any) -> Path:
    """Write the folder of one of the models."""
    kind, settings = MODELS[name]
    config = getattr(transformers, f"{kind}Config")(**{**SHAPE, **settings, **changes})
    model = transformers.AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    draw_weights(model, seed)
    model.to(torch.bfloat16).save_pretrained(at)
    return at
