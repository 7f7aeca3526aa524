"""Model families of llama.cpp: tensor names, header keys and limits.

These are the families that it runs as transformers does. Each row follows llama.cpp's own reader of
that architecture. What the reader fixes by itself (a pattern of windows, a scale of attention
scores) is compared with config.json and refused if it differs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple

from echo_node.engine.gguf_config import (
    GgufConfig,
    check_no_window,
    check_unscaled,
    llama3_stretches,
    refusal,
    theta_of,
    yarn_settings,
)

HeaderValue = int | float | str | list[bool]


class Matrix(NamedTuple):
    """A matrix of a layer: its names there and here, its sizes, its group of biases."""

    own: str
    name: str
    rows: str
    columns: str
    group: str
    rotated: bool = False
    """Whether positions turn its rows, head by head."""


class Norm(NamedTuple):
    """A norm of a layer: its names there and here, and its size."""

    own: str
    name: str
    size: str = "hidden"


@dataclass(frozen=True, slots=True)
class Checked:
    """Findings of a family's check: positions, context, further keys of the header."""

    theta: float
    context: int
    settings: Mapping[str, HeaderValue] = field(default_factory=dict)
    constants: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Tensors of the file that the model does not have, and their values."""
    architecture: str = ""
    """Of the file, where it is another than the family's."""


@dataclass(frozen=True, slots=True)
class GgufFamily:
    """A family: how config.json is checked, and how its tensors are named."""

    architecture: str
    model_class: str
    check: Callable[[GgufConfig, int, int], Checked]
    norms: tuple[Norm, ...]
    matrices: tuple[Matrix, ...]
    turned: bool = False
    """Whether llama.cpp rotates neighbours of a head, where transformers rotates its halves."""
    activation: str = "silu"
    norm_shift: float = 0.0
    head_size: int = 0
    """The default of `head_dim`; 0: the hidden size is shared out."""
    heads_fill_hidden: bool = False
    output: Literal["either", "tied", "untied"] = "either"
    tied: bool = False
    """The default of `tie_word_embeddings`."""
    biased: Callable[[GgufConfig], frozenset[str]] = lambda _: frozenset()


_SPLIT: Final = (
    Matrix("self_attn.q_proj", "attn_q", "queries", "hidden", "qkv", rotated=True),
    Matrix("self_attn.k_proj", "attn_k", "keys", "hidden", "qkv", rotated=True),
    Matrix("self_attn.v_proj", "attn_v", "keys", "hidden", "qkv"),
    Matrix("self_attn.o_proj", "attn_output", "hidden", "queries", "o"),
    Matrix("mlp.gate_proj", "ffn_gate", "wide", "hidden", "mlp"),
    Matrix("mlp.up_proj", "ffn_up", "wide", "hidden", "mlp"),
    Matrix("mlp.down_proj", "ffn_down", "hidden", "wide", "mlp"),
)
_FUSED: Final = (
    Matrix("self_attn.qkv_proj", "attn_qkv", "fused", "hidden", "qkv"),
    Matrix("self_attn.o_proj", "attn_output", "hidden", "queries", "o"),
    Matrix("mlp.gate_up_proj", "ffn_up", "two wide", "hidden", "mlp"),
    Matrix("mlp.down_proj", "ffn_down", "hidden", "wide", "mlp"),
)
_BEFORE: Final = (Norm("input_layernorm", "attn_norm"), Norm("post_attention_layernorm", "ffn_norm"))
_AFTER: Final = (
    Norm("post_attention_layernorm", "post_attention_norm"),
    Norm("post_feedforward_layernorm", "post_ffw_norm"),
)
_AROUND: Final = (
    Norm("input_layernorm", "attn_norm"),
    *_AFTER,
    Norm("pre_feedforward_layernorm", "ffn_norm"),
)
_HEAD_NORMS: Final = (
    Norm("self_attn.q_norm", "attn_q_norm", "head"),
    Norm("self_attn.k_norm", "attn_k_norm", "head"),
)
_WINDOW: Final = "attention.sliding_window"
_PATTERN: Final = "attention.sliding_window_pattern"
_NO_SINK: Final = -1e30
"""Score of a sink that no attention goes to: its exponential is 0."""


def _context(config: GgufConfig) -> int:
    return config.whole("max_position_embeddings")


def _llama_biases(config: GgufConfig) -> frozenset[str]:
    attention = {"qkv", "o"} if config.get("attention_bias", False) else set()
    return frozenset(attention | ({"mlp"} if config.get("mlp_bias", False) else set()))


def _without(config: GgufConfig, family: str, *keys: str) -> None:
    for key in keys:
        if config.get(key, False):
            raise refusal(f"a {family} model with {key.replace('_', ' ')}es")


def _llama(config: GgufConfig, _: int, head_size: int) -> Checked:
    rope = config.rope()
    theta = theta_of(config, rope)
    stretches = llama3_stretches("llama", rope, theta, head_size)
    return Checked(theta, _context(config), constants={"rope_freqs.weight": stretches} if stretches else {})


def _mistral(config: GgufConfig, layers: int, _: int) -> Checked:
    rope = config.rope()
    theta, context = theta_of(config, rope), _context(config)
    check_unscaled("mistral", rope)
    window = config.get("sliding_window")
    if window is None or config.whole("sliding_window") >= context:
        return Checked(theta, context)
    # llama.cpp's llama has no windows. This architecture is the same with windows, scales and
    # sinks, which take part of the attention, and here none of it.
    settings: dict[str, HeaderValue] = {_PATTERN: [True] * layers, "logit_scale": 1.0}
    settings[_WINDOW] = config.whole("sliding_window")
    nothing = (_NO_SINK,) * config.whole("num_attention_heads")
    sinks = {f"blk.{layer}.attn_sinks.weight": nothing for layer in range(layers)}
    return Checked(theta, context, settings, sinks, architecture="granite_swa")


def _qwen2(config: GgufConfig, layers: int, _: int) -> Checked:
    rope = config.rope()
    theta, context = theta_of(config, rope), _context(config)
    check_no_window(config, layers, context)
    return Checked(theta, context, settings=yarn_settings("qwen2", rope))


def _qwen3(config: GgufConfig, layers: int, _: int) -> Checked:
    rope = config.rope()
    theta, context = theta_of(config, rope), _context(config)
    check_no_window(config, layers, context)
    _without(config, "qwen3", "attention_bias")
    return Checked(theta, context, settings=yarn_settings("qwen3", rope))


def _phi3(config: GgufConfig, _: int, __: int) -> Checked:
    rope = config.rope()
    theta, context = theta_of(config, rope), _context(config)
    check_unscaled("phi3", rope)
    window = config.get("sliding_window")
    # llama.cpp has no window for phi3: it is right for sequences that are no longer than it.
    return Checked(theta, context if window is None else min(context, config.whole("sliding_window")))


def _gemma(config: GgufConfig, _: int, __: int) -> Checked:
    rope = config.rope()
    check_unscaled("gemma", rope)
    _without(config, "gemma", "attention_bias")
    return Checked(theta_of(config, rope), _context(config))


def _gemma2(config: GgufConfig, layers: int, head_size: int) -> Checked:
    rope = config.rope()
    check_unscaled("gemma2", rope)
    _without(config, "gemma2", "attention_bias")
    _check_scale(config, "gemma2", layers, head_size, large=46)
    _check_pattern(config, "gemma2", layers, period=2)
    settings = {
        _WINDOW: config.whole("sliding_window", 4096),
        "attn_logit_softcapping": config.number("attn_logit_softcapping"),
        "final_logit_softcapping": config.number("final_logit_softcapping"),
    }
    return Checked(theta_of(config, rope), _context(config), settings=settings)


def _gemma3(config: GgufConfig, layers: int, head_size: int) -> Checked:
    rope = config.rope()
    if not isinstance(rope, dict):
        raise refusal(f"positions by {rope!r}")
    own, local = rope.get("full_attention", rope), rope.get("sliding_attention", {})
    theta = theta_of(config, own, 1_000_000.0)
    near = theta_of(config, local or {"rope_theta": config.get("rope_local_base_freq", 10_000.0)})
    check_unscaled("gemma3_text", own)
    check_unscaled("gemma3_text", local)
    _without(config, "gemma3_text", "attention_bias")
    if config.get("attn_logit_softcapping") is not None:
        raise refusal("a gemma3_text model whose attention scores have a soft cap")
    _check_scale(config, "gemma3_text", layers, head_size, large=62)
    period = _check_pattern(config, "gemma3_text", layers, period=None)
    settings: dict[str, HeaderValue] = {"rope.freq_base_swa": near, _PATTERN: period}
    settings[_WINDOW] = config.whole("sliding_window", 4096)
    if config.get("final_logit_softcapping") is not None:
        settings["final_logit_softcapping"] = config.number("final_logit_softcapping")
    return Checked(theta, _context(config), settings=settings)


def _granite(config: GgufConfig, _: int, __: int) -> Checked:
    rope = config.rope()
    check_unscaled("granite", rope)
    _without(config, "granite", "attention_bias", "mlp_bias")
    scales = {
        "logit_scale": config.number("logits_scaling", 1.0),
        "residual_scale": config.number("residual_multiplier", 1.0),
        "embedding_scale": config.number("embedding_multiplier", 1.0),
        "attention.scale": config.number("attention_multiplier", 1.0),
    }
    return Checked(theta_of(config, rope), _context(config), settings=scales)


def _olmo2(config: GgufConfig, _: int, __: int) -> Checked:
    rope = config.rope()
    check_unscaled("olmo2", rope)
    _without(config, "olmo2", "attention_bias")
    return Checked(theta_of(config, rope), _context(config))


def _smollm3(config: GgufConfig, layers: int, _: int) -> Checked:
    rope = config.rope()
    context = _context(config)
    check_unscaled("smollm3", rope)
    check_no_window(config, layers, context)
    _without(config, "smollm3", "attention_bias", "mlp_bias")
    period = config.whole("no_rope_layer_interval", 4)
    without = config.get("no_rope_layers", [int((layer + 1) % period != 0) for layer in range(layers)])
    if without != [int((layer + 1) % 4 != 0) for layer in range(layers)]:
        raise refusal("a smollm3 model whose layers without positions are not every fourth one")
    return Checked(theta_of(config, rope, 2_000_000.0), context)


def _check_scale(config: GgufConfig, family: str, layers: int, head_size: int, *, large: int) -> None:
    """Check the scale of attention scores against llama.cpp's.

    llama.cpp derives its own from the number of layers.
    """
    fixed = config.whole("hidden_size") // config.whole("num_attention_heads")
    taken = fixed if layers == large else head_size
    if (given := config.number("query_pre_attn_scalar", 256)) != taken:
        raise refusal(
            f"a {family} model of {layers} layers with query_pre_attn_scalar {given:g}, not {taken}"
        )


def _check_pattern(config: GgufConfig, family: str, layers: int, *, period: int | None) -> int:
    """Return the period of layers with full attention; others have the window."""
    types: Any = config.get("layer_types")
    if types is None:
        return period or config.whole("sliding_window_pattern", 6)
    found = period or (types.index("full_attention") + 1 if "full_attention" in types else layers + 1)
    wanted = [
        "full_attention" if (layer + 1) % found == 0 else "sliding_attention" for layer in range(layers)
    ]
    if types != wanted:
        raise refusal(f"a {family} model whose layers do not have their windows in turn")
    return found


GELU: Final = "gelu_pytorch_tanh"
GGUF_FAMILIES: Final[Mapping[str, GgufFamily]] = {
    "llama": GgufFamily(
        "llama", "LlamaForCausalLM", _llama, _BEFORE, _SPLIT, turned=True, biased=_llama_biases
    ),
    "qwen2": GgufFamily(
        "qwen2",
        "Qwen2ForCausalLM",
        _qwen2,
        _BEFORE,
        _SPLIT,
        heads_fill_hidden=True,
        biased=lambda _: frozenset({"qkv"}),
    ),
    "qwen3": GgufFamily("qwen3", "Qwen3ForCausalLM", _qwen3, (*_BEFORE, *_HEAD_NORMS), _SPLIT, head_size=128),
    "mistral": GgufFamily("llama", "MistralForCausalLM", _mistral, _BEFORE, _SPLIT, turned=True),
    "phi3": GgufFamily("phi3", "Phi3ForCausalLM", _phi3, _BEFORE, _FUSED, heads_fill_hidden=True),
    "gemma": GgufFamily(
        "gemma",
        "GemmaForCausalLM",
        _gemma,
        _BEFORE,
        _SPLIT,
        activation=GELU,
        norm_shift=1.0,
        head_size=256,
        output="tied",
        tied=True,
    ),
    "gemma2": GgufFamily(
        "gemma2",
        "Gemma2ForCausalLM",
        _gemma2,
        _AROUND,
        _SPLIT,
        activation=GELU,
        norm_shift=1.0,
        head_size=256,
        output="tied",
        tied=True,
    ),
    "gemma3_text": GgufFamily(
        "gemma3",
        "Gemma3ForCausalLM",
        _gemma3,
        (*_AROUND, *_HEAD_NORMS),
        _SPLIT,
        activation=GELU,
        norm_shift=1.0,
        head_size=256,
        tied=True,
    ),
    "granite": GgufFamily("granite", "GraniteForCausalLM", _granite, _BEFORE, _SPLIT, turned=True),
    "olmo2": GgufFamily(
        "olmo2",
        "Olmo2ForCausalLM",
        _olmo2,
        (
            *_AFTER,
            Norm("self_attn.q_norm", "attn_q_norm", "queries"),
            Norm("self_attn.k_norm", "attn_k_norm", "keys"),
        ),
        _SPLIT,
        heads_fill_hidden=True,
        output="untied",
    ),
    "smollm3": GgufFamily("smollm3", "SmolLM3ForCausalLM", _smollm3, _BEFORE, _SPLIT, turned=True, tied=True),
}
