"""What an engine is: the weights of a head in, completions and scores out.

Calls are synchronous and run one at a time; whoever calls picks the thread. Nothing here knows torch, llama.cpp,
peers or text. An engine names the head whose weights it holds, since a version number does not name weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from echo_node.errors import EngineError
from protocol.sampling import Replay, distances

Ids = NDArray[np.int64]
Floats = NDArray[np.float64]
Dtype = Literal["bf16", "f16", "f32"]


class EngineStoppedError(EngineError):
    """The caller asked for it: nothing came out, nothing is broken."""


@dataclass(frozen=True, slots=True)
class TensorBytes:
    """One tensor as it lies in a safetensors file: raw, little-endian, row by row."""

    dtype: Dtype
    shape: tuple[int, ...]
    data: bytes | memoryview


@dataclass(frozen=True, slots=True)
class SamplingLimits:
    """How every completion of a run is drawn: over the first `vocab_size` ids, up to an end token or the limit."""

    max_tokens: int
    temperature: float
    end_tokens: frozenset[int]
    vocab_size: int


@dataclass(frozen=True, slots=True, eq=False)
class SlotRequest:
    """One prompt and the luck of its slot: completion j draws its token t by `uniforms(slot_key, j, …)[t]`."""

    prompt: Ids
    slot_key: bytes
    group_size: int


@dataclass(frozen=True, slots=True, eq=False)
class Draw:
    """One completion. A log-probability is that of the token in the whole distribution at the temperature."""

    ids: Ids
    logprobs: Floats
    finish: Literal["end", "length"]


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """Per token its log-probability, its interval [low, high) of the CDF, and the sums of p² below and over all."""

    logprobs: Floats
    low: Floats
    high: Floats
    squares_low: Floats
    squares_high: Floats
    squares: Floats

    def replay(self, u: Floats) -> Replay:
        """How far each token lies from where its number `u` would have drawn it."""
        return distances(u, self.low, self.high, self.squares_low, self.squares_high, self.squares)


@dataclass(frozen=True, slots=True)
class Description:
    """What an engine is and takes. `context` is the longest prompt and completion together; None: no bound."""

    engine_class: str
    device: str
    parameters: int
    memory_bytes: int
    context: int | None


def never() -> bool:
    """Nobody asks to stop."""
    return False


class Engine(Protocol):
    """Loads the weights of a head, generates from them, and scores what others say they generated."""

    @property
    def engine_class(self) -> str:
        """Kind and arithmetic, such as `torch/f32`: tolerances are per class."""

    @property
    def loaded(self) -> bytes | None:
        """The id of the head whose weights are in."""

    def load(self, head_id: bytes, weights: Mapping[str, TensorBytes]) -> None:
        """Take these weights, by their Hugging Face names, tied ones once: all of them or, if one is wrong, none."""

    def generate(
        self,
        requests: Sequence[SlotRequest],
        limits: SamplingLimits,
        cancelled: Callable[[], bool] = never,
    ) -> list[tuple[Draw, ...]]:
        """A group for each request, in order. `cancelled` is asked before each token: `EngineStoppedError`."""

    def score(self, prompt: Ids, ids: Ids, limits: SamplingLimits) -> Scores:
        """Measure a claimed completion by one prefill."""

    def describe(self) -> Description:
        """What this engine is and takes."""
