"""Model families that train and sample right, and refusals of all others by name.

A family is a `model_type` of config.json. It is listed here once trainer, engines and a plain
forward pass of transformers agree on it (`tests/families`, docs/models.md). No torch here, so that
every machine can check a model before a run is sealed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from echo_node.errors import ConfigError, boundary

Config = Mapping[str, Any]
"""A config.json."""
Attention = Literal["full", "window", "by layer"]
"""What a family's layers attend to: everything before; a window, in all layers if config.json has
one; or what `layer_types` says of each layer."""


@dataclass(frozen=True, slots=True)
class Family:
    """A family that is right; `architecture` is its class in transformers."""

    name: str
    architecture: str
    attention: Attention


FAMILIES: Final = {
    family.name: family
    for family in (
        Family("gemma", "GemmaForCausalLM", "full"),
        Family("gemma2", "Gemma2ForCausalLM", "by layer"),
        Family("gemma3_text", "Gemma3ForCausalLM", "by layer"),
        Family("gpt2", "GPT2LMHeadModel", "full"),
        Family("granite", "GraniteForCausalLM", "full"),
        Family("llama", "LlamaForCausalLM", "full"),
        Family("mistral", "MistralForCausalLM", "window"),
        Family("olmo2", "Olmo2ForCausalLM", "full"),
        Family("phi3", "Phi3ForCausalLM", "window"),
        Family("qwen2", "Qwen2ForCausalLM", "by layer"),
        Family("qwen3", "Qwen3ForCausalLM", "by layer"),
        Family("smollm3", "SmolLM3ForCausalLM", "by layer"),
    )
}
LAYER_TYPES: Final = frozenset({"full_attention", "sliding_attention"})
_EXPERTS: Final = (
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "moe_num_experts",
    "num_experts_per_tok",
)
"""Keys of config.json by which families count their experts."""
_MIXTURES: Final = frozenset(
    [
        "dbrx",
        "deepseek_v2",
        "deepseek_v3",
        "deepseek_v32",
        "dots1",
        "ernie4_5_moe",
        "flex_olmo",
        "glm4_moe",
        "gpt_oss",
        "granitemoe",
        "granitemoeshared",
        "jetmoe",
        "llama4",
        "llama4_text",
        "minimax",
        "mixtral",
        "olmoe",
        "phimoe",
        "qwen2_moe",
        "qwen3_moe",
    ]
)
_RECURRENT: Final = frozenset(
    [
        "bamba",
        "falcon_h1",
        "falcon_mamba",
        "granitemoehybrid",
        "jamba",
        "kimi_linear",
        "lfm2",
        "lfm2_moe",
        "mamba",
        "mamba2",
        "nemotron_h",
        "olmo_hybrid",
        "qwen3_5",
        "qwen3_5_moe",
        "qwen3_next",
        "recurrent_gemma",
        "rwkv",
        "xlstm",
        "zamba",
        "zamba2",
    ]
)
_LENGTH_DEPENDENT: Final = ("longrope", "dynamic")
"""Kinds of positions that change for every token once a sequence is long enough."""


def read_config(folder: Path) -> dict[str, Any]:
    """Read the config.json of a model's folder."""
    path = folder / "config.json"
    with boundary(ConfigError, f"reading {path}", advice="take a whole model folder"):
        config = json.loads(path.read_text("utf-8"))
    if not isinstance(config, dict):
        raise ConfigError(f"{path} is no JSON object", advice="take a whole model folder")
    return config


def check_family(config: Config) -> Family:
    """Return a model's family; refuse, by name, one that would be run wrongly.

    Wrong is training or sampling with other log-probabilities than the model's own.
    """
    name = config.get("model_type")
    if not isinstance(name, str) or not name:
        raise ConfigError("config.json names no model_type", advice="take a whole model folder")
    if name in _RECURRENT or _layer_types(config) - LAYER_TYPES:
        raise _refusal(name, "some of its layers carry a state from token to token, which rows cannot share")
    if name in _MIXTURES or any(_count(config, key) > 1 for key in _EXPERTS):
        raise _refusal(name, "it is a mixture of experts, and routing differs from engine to engine")
    if isinstance(config.get("text_config"), dict):
        raise _refusal(name, "it takes more than text; its text model alone may do")
    family = FAMILIES.get(name)
    if family is None:
        raise _refusal(name, "it has not been shown that trainer and engines agree on it")
    _check_settings(config, family)
    return family


def check_length(config: Config, longest: int) -> None:
    """Refuse `longest` tokens if positions depend on a sequence's length.

    Such positions turn all keys anew from some length on: what was sampled token by token is then
    not what one forward pass over the whole sequence computes.
    """
    rope = _rope(config)
    kind = rope.get("rope_type", rope.get("type"))
    if kind not in _LENGTH_DEPENDENT:
        return
    fixed = rope.get("original_max_position_embeddings") or config.get("original_max_position_embeddings")
    fixed = fixed or config.get("max_position_embeddings")
    if not isinstance(fixed, int) or longest > fixed:
        raise ConfigError(
            f"a {config.get('model_type')} model whose positions are scaled by {kind!r} computes otherwise"
            f" beyond {fixed} tokens, and prompt and completion of this run take up to {longest}",
            advice=f"set sampling.max_prompt and sampling.max_tokens to at most {fixed} together",
        )


def window_of(config: Config) -> int | None:
    """Return the narrowest attention window of a layer; None if there is none."""
    family = check_family(config)
    window = config.get("sliding_window")
    if not isinstance(window, int) or family.attention == "full":
        return None
    if family.attention == "window":
        return window
    types = _layer_types(config)
    if types:
        return window if "sliding_attention" in types else None
    # Without layer types: the gemmas have windows in some layers, the others only where asked for.
    return window if family.name.startswith("gemma") or config.get("use_sliding_window") else None


def _check_settings(config: Config, family: Family) -> None:
    classes = config.get("architectures") or [family.architecture]
    if classes != [family.architecture]:
        names = ", ".join(map(str, classes)) if isinstance(classes, list) else str(classes)
        raise ConfigError(
            f"a {family.name} model of class {names} cannot be trained here",
            advice=f"take one whose config.json names {family.architecture}",
        )
    if config.get("quantization_config") is not None:
        raise ConfigError("the model is quantised", advice="take its full-precision form")
    window = config.get("sliding_window")
    if window is not None and (not isinstance(window, int) or window < 1):
        raise _refusal(family.name, f"its attention window is {window!r} tokens")
    if config.get("use_bidirectional_attention") or config.get("is_causal") is False:
        raise _refusal(family.name, "its tokens attend to later ones")
    if config.get("add_cross_attention") or config.get("is_encoder_decoder"):
        raise _refusal(family.name, "it attends to a second sequence")


def _layer_types(config: Config) -> set[Any]:
    types = config.get("layer_types")
    return {each for each in types if isinstance(each, str)} if isinstance(types, list) else set()


def _rope(config: Config) -> Config:
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    return rope if isinstance(rope, dict) else {}


def _count(config: Config, key: str) -> int:
    value = config.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def _refusal(name: str, why: str) -> ConfigError:
    return ConfigError(
        f"models of the family {name!r} are refused: {why}", advice=f"take one of {', '.join(FAMILIES)}"
    )
