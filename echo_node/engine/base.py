"""What an engine is: the weights of a head in, completions and scores out.

Calls are synchronous and run one at a time; whoever calls picks the thread. Nothing here knows torch, llama.cpp,
peers or text. An engine names the head whose weights it holds, since a version number does not name weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
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


@dataclass(frozen=True, slots=True, eq=False)
class Change:
    """Elements of one tensor, ascending, and their new bit patterns (unsigned, as wide as the tensor's type)."""

    tensor: str
    positions: NDArray[np.int64]
    values: NDArray[np.uint16] | NDArray[np.uint32]


@dataclass(frozen=True, slots=True, eq=False)
class Update:
    """The way from the weights of one head to those of another.

    `changes(granule)` opens what changed, in whole aligned runs of `granule` elements of a tensor; nobody writes to
    the weights until it is closed.
    """

    since: bytes
    head_id: bytes
    changes: Callable[[int], AbstractContextManager[Iterable[Change]]]


@dataclass(frozen=True, slots=True)
class SamplingLimits:
    """How a completion is drawn: over the first `vocab_size` ids, up to an end token or the limit."""

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
    limits: SamplingLimits


@dataclass(frozen=True, slots=True)
class Span:
    """From its token `start` on, a completion was drawn under this head, up to the next span."""

    start: int
    head_id: bytes


@dataclass(frozen=True, slots=True, eq=False)
class Draw:
    """One completion. A log-probability is that of the token in the whole distribution at the temperature."""

    ids: Ids
    logprobs: Floats
    finish: Literal["end", "length"]
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Finished:
    """A completion that has ended: number `completion` of the request that was taken as number `request`."""

    request: int
    completion: int
    draw: Draw


@dataclass(frozen=True, slots=True, eq=False)
class Claim:
    """Tokens that somebody says were drawn after a prompt, which may hold the completion's tokens before them."""

    prompt: Ids
    ids: Ids


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

    def parts(self, sizes: Sequence[int]) -> list[Scores]:
        """Those of the first so many tokens, then of the next, and so on."""
        columns = (self.logprobs, self.low, self.high, self.squares_low, self.squares_high, self.squares)
        cuts = np.cumsum(sizes)[:-1]
        return [Scores(*part) for part in zip(*(np.split(each, cuts) for each in columns), strict=True)]


@dataclass(frozen=True, slots=True)
class Description:
    """What an engine is and takes. `context` is the longest prompt and completion together; None: no bound."""

    engine_class: str
    device: str
    parameters: int
    memory_bytes: int
    context: int | None
    rows: int
    """Completions that it draws at once."""
    tokens_per_second: float | None
    """As last seen; None: it has generated nothing yet."""


def never() -> bool:
    """Nobody asks to stop."""
    return False


def no_news() -> Update | None:
    """The weights stay as they are."""
    return None


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

    def patch(self, update: Update) -> None:
        """Go from the weights that are loaded, which must be those of `update.since`, to those of another head."""

    def generate(
        self,
        requests: Iterable[SlotRequest],
        *,
        stop: Callable[[], bool] = never,
        news: Callable[[], Update | None] = no_news,
    ) -> Iterator[Finished]:
        """Completions, each as it ends. A request is taken as soon as there is room for it, and no sooner.

        `stop` is asked before each token: `EngineStoppedError`. `news` is asked then too, but only while every running
        completion can still change its head (once at most): an update that it gives goes in at once, in flight.
        """

    def score(self, prompt: Ids, ids: Ids, limits: SamplingLimits) -> Scores:
        """Measure a claimed completion by one prefill."""

    def score_many(self, claims: Sequence[Claim], limits: SamplingLimits) -> list[Scores]:
        """Measure several, in one pass where the engine can. Short ones cost little more together than one alone."""

    def describe(self) -> Description:
        """What this engine is and takes."""

    def close(self) -> None:
        """Give everything back. An engine that is closed refuses further calls."""


def generate_groups(
    engine: Engine, requests: Sequence[SlotRequest], *, stop: Callable[[], bool] = never
) -> list[tuple[Draw, ...]]:
    """A group for each request, in order, once all have ended."""
    groups: list[dict[int, Draw]] = [{} for _ in requests]
    for finished in engine.generate(requests, stop=stop):
        groups[finished.request][finished.completion] = finished.draw
    return [tuple(draws[place] for place in range(len(draws))) for draws in groups]
