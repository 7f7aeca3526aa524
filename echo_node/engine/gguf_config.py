"""A model's config.json, read key by key for llama.cpp; its positions and windows."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from echo_node.errors import EngineError

_LARGEST: Final = 2**31 - 1  # llama.cpp counts in 32 bits
_ADVICE: Final = "use the torch engine for this model"
_YARN: Final[Mapping[str, Any]] = {
    "attention_factor": None,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": None,
    "mscale_all_dim": None,
    "truncate": True,
}
"""Settings of yarn that llama.cpp has fixed, and how."""


class GgufConfig:
    """A config.json. Wrong values are refused with the file and the key."""

    def __init__(self, path: Path, content: Mapping[str, Any]) -> None:
        self._path = path
        self._content = content

    @classmethod
    def read(cls, path: Path) -> GgufConfig:
        try:
            content = json.loads(path.read_text("utf-8"))
        except (OSError, ValueError) as cause:
            raise EngineError(
                f"the model's {path} cannot be read: {cause}", advice="take a whole model folder"
            ) from cause
        if not isinstance(content, dict):
            raise EngineError(f"the model's {path} is no JSON object", advice="take a whole model folder")
        return cls(path, content)

    def get(self, key: str, default: Any = None) -> Any:
        value = self._content.get(key)
        return default if value is None else value

    def whole(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _LARGEST:
            raise self._wrong(key, value)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key, default)
        if not isinstance(value, int | float) or not (math.isfinite(value) and value > 0):
            raise self._wrong(key, value)
        return float(value)

    def rope(self) -> Any:
        """Return the table of positions, by its new name or its old one."""
        return self.get("rope_parameters", self.get("rope_scaling", {}))

    def _wrong(self, key: str, value: Any) -> EngineError:
        return EngineError(
            f"the model's {self._path} has {key} = {value!r}", advice="take a whole model folder"
        )


def refusal(what: str) -> EngineError:
    """Return the error for a model that llama.cpp and transformers run differently."""
    return EngineError(f"the llama.cpp engine cannot run {what}", advice=_ADVICE)


def theta_of(config: GgufConfig, rope: Any, default: float = 10000.0) -> float:
    """Return the base of the positions' frequencies."""
    if not isinstance(rope, dict):
        raise refusal(f"positions by {rope!r}")
    theta = rope.get("rope_theta", config.get("rope_theta", default))
    if not isinstance(theta, int | float) or not (math.isfinite(theta) and theta > 0):
        raise refusal(f"positions with the base {theta!r}")
    if rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) != 1.0:
        raise refusal("heads that are turned in part")
    return float(theta)


def scaling_of(rope: Mapping[str, Any]) -> str:
    """Return how positions are scaled; `default` is not at all."""
    return str(rope.get("rope_type", rope.get("type", "default")) or "default")


def check_unscaled(family: str, rope: Mapping[str, Any]) -> None:
    if (kind := scaling_of(rope)) != "default":
        raise refusal(f"a {family} model whose positions are scaled by {kind!r}")


def llama3_stretches(family: str, rope: Mapping[str, Any], theta: float, head_size: int) -> tuple[float, ...]:
    """Compute Llama 3 rope factors.

    Slow frequencies are scaled, fast ones kept, and those between blended.
    """
    if scaling_of(rope) != "llama3":
        check_unscaled(family, rope)
        return ()
    keys = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    numbers = [rope.get(key) for key in keys]
    if not all(isinstance(x, int | float) and math.isfinite(x) and x > 0 for x in numbers):
        raise refusal(f"positions scaled by 'llama3' without all of {', '.join(keys)}")
    factor, low, high, before = map(float, numbers)  # type: ignore[arg-type]  # as just checked
    if not low < high:
        raise refusal(f"positions scaled by 'llama3' with factors {low} and {high}")
    waves = 2 * np.pi * theta ** (np.arange(0, head_size, 2) / head_size)
    blend = np.clip((before / waves - low) / (high - low), 0.0, 1.0)
    return tuple(float(x) for x in 1 / ((1 - blend) / factor + blend))


def yarn_settings(family: str, rope: Mapping[str, Any]) -> dict[str, int | float | str]:
    """Return header keys of positions scaled by YaRN; none if not scaled."""
    if scaling_of(rope) != "yarn":
        check_unscaled(family, rope)
        return {}
    factor, before = rope.get("factor"), rope.get("original_max_position_embeddings")
    if not isinstance(factor, int | float) or not 1 <= factor <= _LARGEST or not isinstance(before, int):
        raise refusal("positions scaled by 'yarn' without factor and original_max_position_embeddings")
    for key, usual in _YARN.items():
        if rope.get(key) not in (None, usual):
            raise refusal(f"positions scaled by 'yarn' with {key} {rope[key]!r}")
    scaling = "rope.scaling"
    return {
        f"{scaling}.type": "yarn",
        f"{scaling}.factor": float(factor),
        f"{scaling}.original_context_length": before,
    }


def check_no_window(config: GgufConfig, layers: int, context: int) -> None:
    """Refuse sliding windows of qwen2, qwen3 and smollm3.

    Their attention reaches back to the first token in llama.cpp.
    """
    if not config.get("use_sliding_window", False):
        return
    window = config.whole("sliding_window", 4096)
    kinds = config.get("layer_types")
    if kinds is None:
        kinds = ["sliding_attention"] if config.get("max_window_layers", 28) < layers else []
    if window < context and "sliding_attention" in kinds:
        raise refusal(f"a model whose attention slides over a window of {window} tokens")
