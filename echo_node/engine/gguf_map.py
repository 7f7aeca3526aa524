"""Mapping of a model folder's config.json to llama.cpp's header and tensor names.

Whatever llama.cpp would compute differently from transformers is refused here, by name. What is
peculiar to a family is in `gguf_families`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from echo_node.engine.gguf_config import GgufConfig, refusal
from echo_node.engine.gguf_families import GELU, GGUF_FAMILIES, GgufFamily, HeaderValue
from echo_node.errors import EngineError

_ADVICE: Final = "take its full-precision form"


@dataclass(frozen=True, slots=True)
class Place:
    """Target of a tensor.

    With `heads` above 0 the rows of that many heads are interleaved; `shift` is added to every
    value, for norms that transformers stores less one.
    """

    name: str
    shape: tuple[int, ...]
    heads: int = 0
    shift: float = 0.0

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
    settings: Mapping[str, HeaderValue]
    """Further keys of the header, without the architecture's name."""
    constants: Mapping[str, tuple[float, ...]]
    """Tensors of the file that the model does not have, such as factors of its positions."""
    places: Mapping[str, Place]

    @property
    def parameters(self) -> int:
        return sum(math.prod(place.shape) for place in self.places.values())


def read_plan(folder: Path, kind: str = "f16") -> ModelPlan:
    """Plan how llama.cpp runs a folder's model with weights of a kind, or refuse."""
    config = GgufConfig.read(folder / "config.json")
    name = str(config.get("model_type", ""))
    family = GGUF_FAMILIES.get(name)
    if family is None:
        raise refusal(f"a model of type {name!r}: only {', '.join(GGUF_FAMILIES)}")
    _check_class(config, family)
    if kind == "f32" and family.activation == GELU:
        raise EngineError(
            f"the llama.cpp engine cannot run a {name} model as f32: it rounds the activation {GELU} to f16",
            advice="use llama/f16 or torch/f32 for this model",
        )
    layers, hidden, heads = (
        config.whole(key) for key in ("num_hidden_layers", "hidden_size", "num_attention_heads")
    )
    kv_heads = config.whole("num_key_value_heads", heads)
    head_size = config.whole("head_dim", family.head_size or hidden // heads)
    _check_heads(family, hidden, heads, kv_heads, head_size)
    tied = bool(config.get("tie_word_embeddings", family.tied))
    if family.output != "either" and tied != (family.output == "tied"):
        raise refusal(
            f"models of type {name!r} whose output is {'tied' if tied else 'not tied'} to its embedding"
        )
    own = family.check(config, layers, head_size)
    places = _places(config, family, layers, hidden, (heads, kv_heads, head_size), tied=tied)
    return ModelPlan(
        architecture=own.architecture or family.architecture,
        vocabulary=config.whole("vocab_size"),
        context=own.context,
        layers=layers,
        hidden=hidden,
        feed_forward=config.whole("intermediate_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_size=head_size,
        epsilon=config.number("rms_norm_eps", 1e-6),
        theta=own.theta,
        settings=own.settings,
        constants=own.constants,
        places=dict(places),
    )


def _places(
    config: GgufConfig,
    family: GgufFamily,
    layers: int,
    hidden: int,
    attention: tuple[int, int, int],
    *,
    tied: bool,
) -> Iterator[tuple[str, Place]]:
    heads, kv_heads, head_size = attention
    vocabulary, wide = config.whole("vocab_size"), config.whole("intermediate_size")
    sizes = {
        "hidden": hidden,
        "wide": wide,
        "two wide": 2 * wide,
        "queries": heads * head_size,
        "keys": kv_heads * head_size,
        "fused": (heads + 2 * kv_heads) * head_size,
        "head": head_size,
    }
    turned = {"queries": heads, "keys": kv_heads} if family.turned else {}
    biased = family.biased(config)
    yield "model.embed_tokens.weight", Place("token_embd.weight", (vocabulary, hidden))
    yield "model.norm.weight", Place("output_norm.weight", (hidden,), shift=family.norm_shift)
    if not tied:
        yield "lm_head.weight", Place("output.weight", (vocabulary, hidden))
    for layer in range(layers):
        here, there = f"model.layers.{layer}", f"blk.{layer}"
        for norm in family.norms:
            yield (
                f"{here}.{norm.own}.weight",
                Place(f"{there}.{norm.name}.weight", (sizes[norm.size],), shift=family.norm_shift),
            )
        for matrix in family.matrices:
            shape = (sizes[matrix.rows], sizes[matrix.columns])
            interleaved = turned.get(matrix.rows, 0) if matrix.rotated else 0
            yield f"{here}.{matrix.own}.weight", Place(f"{there}.{matrix.name}.weight", shape, interleaved)
            if matrix.group in biased:
                yield (
                    f"{here}.{matrix.own}.bias",
                    Place(f"{there}.{matrix.name}.bias", shape[:1], interleaved),
                )


def _check_class(config: GgufConfig, family: GgufFamily) -> None:
    classes = config.get("architectures", [family.model_class])
    if classes != [family.model_class]:
        raise refusal(f"a model of class {classes!r}: only {family.model_class}")
    if config.get("quantization_config") is not None:
        raise EngineError("the llama.cpp engine cannot run a quantised model", advice=_ADVICE)
    activation: Any = config.get("hidden_activation", config.get("hidden_act", family.activation))
    if activation != family.activation:
        raise refusal(f"a model with the activation {activation!r}")


def _check_heads(family: GgufFamily, hidden: int, heads: int, kv_heads: int, head_size: int) -> None:
    if heads % kv_heads:
        raise refusal(f"{heads} heads that share {kv_heads} heads of keys and values")
    if head_size % 2:
        raise refusal(f"heads of the odd size {head_size}")
    if family.heads_fill_hidden and heads * head_size != hidden:
        name = family.architecture
        raise refusal(f"a {name} model of {heads} heads of {head_size} with a hidden size of {hidden}")
