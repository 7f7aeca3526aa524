"""Tiny Llama models as GGUF files with a tokenizer, and broken variants of such files."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

WIDTH, LAYERS, HEADS = 32, 2, 4
LETTERS = [*"abcdefghijklmnopqrstuvwxyz", "Ġ", "ab", "<|end|>"]


def tensors(seed: int = 0) -> dict[str, np.ndarray]:
    """The weights by GGUF's names."""
    draws = np.random.default_rng(seed)
    shapes = {"token_embd.weight": (len(LETTERS), WIDTH), "output_norm.weight": (WIDTH,)}
    for layer in range(LAYERS):
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            shapes[f"blk.{layer}.{name}.weight"] = (WIDTH, WIDTH)
        shapes |= {f"blk.{layer}.{name}.weight": (2 * WIDTH, WIDTH) for name in ("ffn_gate", "ffn_up")}
        shapes[f"blk.{layer}.ffn_down.weight"] = (WIDTH, 2 * WIDTH)
        shapes |= {f"blk.{layer}.{name}.weight": (WIDTH,) for name in ("attn_norm", "ffn_norm")}
    return {
        name: draws.normal(0, 0.3, shape).astype(np.float32 if len(shape) == 1 else np.float16)
        for name, shape in shapes.items()
    }


def write(at: Path, weights: dict[str, np.ndarray]) -> Path:
    writer = gguf.GGUFWriter(at, "llama")
    writer.add_name("tiny")
    writer.add_block_count(LAYERS)
    writer.add_context_length(64)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(2 * WIDTH)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(LETTERS))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(LETTERS)
    writer.add_token_types([gguf.TokenType.NORMAL] * (len(LETTERS) - 1) + [gguf.TokenType.CONTROL])
    writer.add_token_merges(["a b"])
    for add in (writer.add_bos_token_id, writer.add_eos_token_id, writer.add_pad_token_id):
        add(len(LETTERS) - 1)
    writer.add_unk_token_id(len(LETTERS) - 1)
    for name, value in weights.items():
        bf16 = value.dtype == np.uint16  # bit patterns
        raw = gguf.GGMLQuantizationType.BF16 if bf16 else None
        writer.add_tensor(name, value.view(np.uint8) if bf16 else value, raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return at


def bf16_twins(seed: int = 0) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The same weights by GGUF's names and by Hugging Face's, as bf16 bit patterns.

    One-dimensional ones are float32 in a GGUF file; q and k have their rows permuted there.
    """
    names = {
        "token_embd": "model.embed_tokens",
        "output_norm": "model.norm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
    }
    packed, plain = {}, {}
    for name, value in tensors(seed).items():
        bits = (value.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        *block, part, _ = name.split(".")
        layer = f"model.layers.{block[1]}." if block else ""
        plain[f"{layer}{names[part]}.weight"] = bits
        stored = bits
        if part in {"attn_q", "attn_k"}:
            rows = bits.reshape(HEADS, 2, WIDTH // HEADS // 2, WIDTH)
            stored = np.ascontiguousarray(rows.swapaxes(1, 2)).reshape(bits.shape)
        one_row = bits.ndim == 1
        packed[name] = (stored.astype(np.uint32) << 16).view(np.float32) if one_row else stored
    return packed, plain
