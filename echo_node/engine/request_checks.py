"""Validation of engine requests before any work is done."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from echo_node.engine.base import Ids, SamplingLimits, SlotRequest, TensorBytes
from echo_node.errors import EngineError

KEY_BYTES: Final = 32
ITEM_BYTES: Final[Mapping[str, int]] = {"bf16": 2, "f16": 2, "f32": 4}
_SHOWN: Final = 3


@dataclass(frozen=True, slots=True)
class Reach:
    """Limits of a model: ids below `vocabulary`, at most `context` of them.

    None for `context` is no bound.
    """

    vocabulary: int
    context: int | None

    def check_request(self, request: SlotRequest, number: int) -> None:
        """Refuse a request that cannot be generated from the first token to the last."""
        limits, name = request.limits, f"request {number}"
        self._check_limits(limits)
        if request.group_size < 1:
            raise EngineError(f"{name} asks for a group of {request.group_size} completions")
        if len(request.slot_key) != KEY_BYTES:
            raise EngineError(f"{name} has a key of {len(request.slot_key)} bytes, not {KEY_BYTES}")
        self._check_ids(request.prompt, limits, f"the prompt of {name}")
        self._check_length(len(request.prompt), limits.max_tokens, name)
        for prefix in request.drawn:
            self._check_ids(prefix.ids, limits, f"a prefix of {name}")
            fits = 0 <= prefix.completion < request.group_size and prefix.ids.size <= limits.max_tokens
            if not fits or prefix.logprobs.shape != prefix.ids.shape:
                raise EngineError(f"{name} has a prefix that does not fit it")

    def check_claim(self, prompt: Ids, ids: Ids, limits: SamplingLimits) -> None:
        """Refuse a claimed completion that cannot be scored."""
        self._check_limits(limits)
        self._check_ids(prompt, limits, "the prompt")
        self._check_ids(ids, limits, "the completion")
        self._check_length(len(prompt), len(ids), "the completion")

    def _check_limits(self, limits: SamplingLimits) -> None:
        if limits.max_tokens < 1:
            raise EngineError(f"a limit of {limits.max_tokens} tokens leaves nothing to generate")
        if not (math.isfinite(limits.temperature) and limits.temperature > 0):
            raise EngineError(f"a temperature of {limits.temperature} is not above zero and finite")
        if not 1 <= limits.vocab_size <= self.vocabulary:
            raise EngineError(f"a vocabulary of {limits.vocab_size} ids for a model of {self.vocabulary}")
        outside = [token for token in limits.end_tokens if not 0 <= token < limits.vocab_size]
        if outside:
            raise EngineError(f"end token {outside[0]} lies outside the vocabulary of {limits.vocab_size}")

    def _check_ids(self, ids: Ids, limits: SamplingLimits, name: str) -> None:
        if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
            raise EngineError(f"{name} is no row of token ids")
        if not ids.size:
            raise EngineError(f"{name} is empty")
        outside = ids[(ids < 0) | (ids >= limits.vocab_size)]
        if outside.size:
            raise EngineError(
                f"{name} holds id {outside[0]}, which lies outside the vocabulary of {limits.vocab_size}"
            )

    def _check_length(self, prompt: int, tokens: int, name: str) -> None:
        if self.context is not None and prompt + tokens > self.context:
            raise EngineError(
                f"{name} takes {prompt} ids of prompt and {tokens} tokens, and the model's context is {self.context}",
                advice="take a shorter prompt or a lower limit of tokens",
            )


def check_weights(weights: Mapping[str, TensorBytes], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse weights whose names, shapes or bytes are not those of the model."""
    if missing := shapes.keys() - weights.keys():
        raise EngineError(f"weights without {_some(missing)}, which the model has")
    if extra := weights.keys() - shapes.keys():
        raise EngineError(f"weights with {_some(extra)}, which the model does not have")
    for name, shape in shapes.items():
        tensor = weights[name]
        if tensor.dtype not in ITEM_BYTES:
            raise EngineError(
                f"weights {name} are of type {tensor.dtype!r}, not one of {', '.join(ITEM_BYTES)}"
            )
        if tuple(tensor.shape) != shape:
            raise EngineError(f"weights {name} have the shape {tensor.shape}, and the model has {shape}")
        wanted, there = ITEM_BYTES[tensor.dtype] * math.prod(shape), memoryview(tensor.data).nbytes
        if there != wanted:
            raise EngineError(f"weights {name} are {there} bytes long, and their shape takes {wanted}")


def _some(names: Iterable[str]) -> str:
    shown = sorted(names)
    more = len(shown) - _SHOWN
    return ", ".join(shown[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
