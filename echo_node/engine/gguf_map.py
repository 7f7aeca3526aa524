"""Mapping of a model folder's config.json to llama.cpp's header and tensor names.

Llama, Qwen2 and Qwen3, dense. Whatever llama.cpp would compute differently from transformers is
refused here, by name.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from echo_node.errors import EngineError

_CLASSES: Final = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_LARGEST: Final = 2**31 - 1  # llama.cpp counts in 32 bits
_ADVICE: Final = "use the torch engine for this model"


@dataclass(frozen=True, slots=True)
class Place:
    """Target of a tensor; with `heads` above 0 the rows of that many heads are interleaved."""

    name: str
    shape: tuple[int, ...]
    heads: int = 0

    def row_order(self) -> NDArray[np.int64]:
        """Return the target row per source row.

        llama.cpp rotates neighbours where transformers rotates the two halves.
        """
        rows = np.arange(self.shape[0])
        if not self.heads:
            return rows
        size = self.shape[0] // self.heads
        head, within = np.divmod(rows, size)
        half, pair = np.divmod(within, size // 2)
        order: NDArray[np.int64] = head * size + 2 * pair + half
        return order


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """One model: its sizes, and per Hugging Face name the place of a tensor."""

    architecture: str
    vocabulary: int
    context: int
    layers: int
    hidden: int
    feed_forward: int
    heads: int
    kv_heads: int
    head_size: int
    epsilon: float
    theta: float
    stretches: tuple[float, ...]
    """RoPE scaling factor of each frequency; empty without scaling."""
    places: Mapping[str, Place]

    @property
    def parameters(self) -> int:
        return sum(math.prod(place.shape) for place in self.places.values())


class _Config:
    """A config.json, read key by key."""

    def __init__(self, path: Path) -> None:
        try:
            content = json.loads(path.read_text("utf-8"))
        except (OSError, ValueError) as cause:
            raise EngineError(
                f"the model's {path} cannot be read: {cause}", advice="take a whole model folder"
            ) from cause
        if not isinstance(content, dict):
            raise EngineError(f"the model's {path} is no JSON object", advice="take a whole model folder")
        self._path = path
        self._content: dict[str, Any] = content

    def get(self, key: str, default: Any = None) -> Any:
        value = self._content.get(key)
        return default if value is None else value

    def whole(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _LARGEST:
            raise self._wrong(key, value)
        return value

    def number(self, key: str, default: float) -> float:
        value = self.get(key, default)
        if not isinstance(value, int | float) or not (math.isfinite(value) and value > 0):
            raise self._wrong(key, value)
        return float(value)

    def _wrong(self, key: str, value: Any) -> EngineError:
        return EngineError(
            f"the model's {self._path} has {key} = {value!r}", advice="take a whole model folder"
        )


def read_plan(folder: Path) -> ModelPlan:
    """Plan how llama.cpp runs the model of a folder; refuse one that it cannot run."""
    config = _Config(folder / "config.json")
    family = str(config.get("model_type", ""))
    _check_family(config, family)
    layers, hidden, heads = (
        config.whole(key) for key in ("num_hidden_layers", "hidden_size", "num_attention_heads")
    )
    context = config.whole("max_position_embeddings")
    kv_heads = config.whole("num_key_value_heads", heads)
    # Qwen3 has a size of its own; the others share out the hidden size unless they say otherwise.
    head_size = config.whole("head_dim", 128 if family == "qwen3" else hidden // heads)
    _check_heads(family, hidden, heads, kv_heads, head_size)
    _check_window(config, layers, context)
    rope = config.get("rope_parameters", config.get("rope_scaling", {}))
    theta = _theta(config, rope)
    plan = ModelPlan(
        architecture=family,
        vocabulary=config.whole("vocab_size"),
        context=context,
        layers=layers,
        hidden=hidden,
        feed_forward=config.whole("intermediate_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_size=head_size,
        epsilon=config.number("rms_norm_eps", 1e-6),
        theta=theta,
        stretches=_stretches(family, rope, theta, head_size),
        places={},
    )
    attention_bias = family == "qwen2" or bool(config.get("attention_bias", False))
    if family == "qwen3" and attention_bias:
        raise _refusal("a qwen3 model with attention biases")
    bias = {
        "qkv": attention_bias,
        "o": family == "llama" and attention_bias,
        "mlp": family == "llama" and bool(config.get("mlp_bias", False)),
    }
    tied = bool(config.get("tie_word_embeddings", False))
    return replace(plan, places=dict(_places(plan, bias=bias, tied=tied)))


def _places(plan: ModelPlan, *, bias: Mapping[str, bool], tied: bool) -> Iterator[tuple[str, Place]]:
    hidden, wide = plan.hidden, plan.feed_forward
    queries, keys = plan.heads * plan.head_size, plan.kv_heads * plan.head_size
    yield "model.embed_tokens.weight", Place("token_embd.weight", (plan.vocabulary, hidden))
    yield "model.norm.weight", Place("output_norm.weight", (hidden,))
    if not tied:
        yield "lm_head.weight", Place("output.weight", (plan.vocabulary, hidden))
    turned = plan.architecture == "llama"
    matrices = (
        ("self_attn.q_proj", "attn_q", (queries, hidden), plan.heads if turned else 0, bias["qkv"]),
        ("self_attn.k_proj", "attn_k", (keys, hidden), plan.kv_heads if turned else 0, bias["qkv"]),
        ("self_attn.v_proj", "attn_v", (keys, hidden), 0, bias["qkv"]),
        ("self_attn.o_proj", "attn_output", (hidden, queries), 0, bias["o"]),
        ("mlp.gate_proj", "ffn_gate", (wide, hidden), 0, bias["mlp"]),
        ("mlp.up_proj", "ffn_up", (wide, hidden), 0, bias["mlp"]),
        ("mlp.down_proj", "ffn_down", (hidden, wide), 0, bias["mlp"]),
    )
    norms = [
        ("input_layernorm", "attn_norm", (hidden,)),
        ("post_attention_layernorm", "ffn_norm", (hidden,)),
    ]
    if plan.architecture == "qwen3":
        norms += [(f"self_attn.{x}_norm", f"attn_{x}_norm", (plan.head_size,)) for x in "qk"]
    for layer in range(plan.layers):
        here, there = f"model.layers.{layer}", f"blk.{layer}"
        for own, name, size in norms:
            yield f"{here}.{own}.weight", Place(f"{there}.{name}.weight", size)
        for own, name, shape, heads, biased in matrices:
            yield f"{here}.{own}.weight", Place(f"{there}.{name}.weight", shape, heads)
            if biased:
                yield f"{here}.{own}.bias", Place(f"{there}.{name}.bias", shape[:1], heads)


def _check_family(config: _Config, family: str) -> None:
    if family not in _CLASSES:
        raise _refusal(f"a model of type {family!r}: only {', '.join(_CLASSES)}")
    classes = config.get("architectures", [_CLASSES[family]])
    if classes != [_CLASSES[family]]:
        raise _refusal(f"a model of class {classes!r}: only {_CLASSES[family]}")
    if config.get("quantization_config") is not None:
        raise EngineError(
            "the llama.cpp engine cannot run a quantised model", advice="take its full-precision form"
        )
    if (activation := config.get("hidden_act", "silu")) != "silu":
        raise _refusal(f"a model with the activation {activation!r}")


def _check_heads(family: str, hidden: int, heads: int, kv_heads: int, head_size: int) -> None:
    if heads % kv_heads:
        raise _refusal(f"{heads} heads that share {kv_heads} heads of keys and values")
    if head_size % 2:
        raise _refusal(f"heads of the odd size {head_size}")
    if family == "qwen2" and heads * head_size != hidden:
        raise _refusal(f"a qwen2 model of {heads} heads of {head_size} with a hidden size of {hidden}")


def _check_window(config: _Config, layers: int, context: int) -> None:
    """Attention reaches back to the first token, in every layer."""
    if config.get("model_type") == "llama" or not config.get("use_sliding_window", False):
        return
    window = config.whole("sliding_window", 4096)
    kinds = config.get("layer_types")
    if kinds is None:
        kinds = ["sliding_attention"] if config.get("max_window_layers", 28) < layers else []
    if window < context and "sliding_attention" in kinds:
        raise _refusal(f"a model whose attention slides over a window of {window} tokens")


def _theta(config: _Config, rope: Any) -> float:
    if not isinstance(rope, dict):
        raise _refusal(f"positions by {rope!r}")
    theta = rope.get("rope_theta", config.get("rope_theta", 10000.0))
    if not isinstance(theta, int | float) or not (math.isfinite(theta) and theta > 0):
        raise _refusal(f"positions with the base {theta!r}")
    if rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) != 1.0:
        raise _refusal("heads that are turned in part")
    return float(theta)


def _stretches(family: str, rope: Mapping[str, Any], theta: float, head_size: int) -> tuple[float, ...]:
    """Compute Llama 3 rope factors: slow frequencies scaled, fast ones kept, a blend between."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind in (None, "default"):
        return ()
    if kind != "llama3" or family != "llama":
        raise _refusal(f"a {family} model whose positions are scaled by {kind!r}")
    keys = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    numbers = [rope.get(key) for key in keys]
    if not all(isinstance(x, int | float) and math.isfinite(x) and x > 0 for x in numbers):
        raise _refusal(f"positions scaled by 'llama3' without all of {', '.join(keys)}")
    factor, low, high, before = map(float, numbers)  # type: ignore[arg-type]  # as just checked
    if not low < high:
        raise _refusal(f"positions scaled by 'llama3' with factors {low} and {high}")
    waves = 2 * np.pi * theta ** (np.arange(0, head_size, 2) / head_size)
    blend = np.clip((before / waves - low) / (high - low), 0.0, 1.0)
    return tuple(float(x) for x in 1 / ((1 - blend) / factor + blend))


def _refusal(what: str) -> EngineError:
    return EngineError(f"the llama.cpp engine cannot run {what}", advice=_ADVICE)
