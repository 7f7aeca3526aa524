"""The engine interface: load the weights of a head, generate, score.

Calls are synchronous and run one at a time; the caller picks the thread. An engine names the head
whose weights it holds, since a version number does not identify weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from echo_node.errors import EngineError
from protocol.sampling import Replay, distances
from protocol.turns import TurnRules

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
    """Changed elements of one tensor, ascending, and their bit patterns.

    The patterns are unsigned.
    """

    tensor: str
    positions: NDArray[np.int64]
    values: NDArray[np.uint16] | NDArray[np.uint32]


@dataclass(frozen=True, slots=True, eq=False)
class Update:
    """A patch from the weights of one head to those of another.

    `changes(granule)` opens the changes in whole aligned runs of `granule` elements of a tensor;
    the weights must not be written until it is closed.
    """

    since: bytes
    head_id: bytes
    changes: Callable[[int], AbstractContextManager[Iterable[Change]]]


@dataclass(frozen=True, slots=True)
class SamplingLimits:
    """Sampling settings: ids below `vocab_size`, up to an end token or `max_tokens`."""

    max_tokens: int
    temperature: float
    end_tokens: frozenset[int]
    vocab_size: int


@dataclass(frozen=True, slots=True, eq=False)
class Prefix:
    """Tokens of a completion that were drawn before, under the loaded weights.

    `completion` is its number in the request.
    """

    completion: int
    ids: Ids
    logprobs: Floats


@dataclass(frozen=True, slots=True, eq=False)
class SlotRequest:
    """A prompt and its slot's key.

    Completion j draws its token t by `uniforms(slot_key, j, …)[t]`, and goes on after its prefix if
    it has one. With `turns` it pauses at the end of each turn until the environment has answered.
    """

    prompt: Ids
    slot_key: bytes
    group_size: int
    limits: SamplingLimits
    drawn: tuple[Prefix, ...] = ()
    turns: TurnRules | None = None


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens of a completion from `start` to the next span, drawn under one head.

    No head means the environment's tokens.
    """

    start: int
    head_id: bytes | None


Finish = Literal["done", "end", "length", "turns", "void"]
"""How a completion ended; `void`: the environment failed, and nothing may come of the slot."""


@dataclass(frozen=True, slots=True, eq=False)
class TurnEnd:
    """Completions of a request that agree so far, at the end of turn `turn`."""

    request: int
    completions: tuple[int, ...]
    ids: Ids
    """All ids of the completion."""
    start: int
    """First token of this turn."""
    turn: int
    environment: int
    """Tokens of the environment so far."""


@dataclass(frozen=True, slots=True, eq=False)
class TurnReply:
    """The environment's answer: ids that follow, or how the completion ends."""

    ids: Ids | None
    finish: Finish = "done"


Respond = Callable[[Sequence[TurnEnd]], Sequence[TurnReply]]
"""Answers ended turns, in their order; called by whoever owns the engine."""


@dataclass(frozen=True, slots=True, eq=False)
class Draw:
    """One completion; log-probabilities are at the request's temperature.

    They are of the full distribution.
    """

    ids: Ids
    logprobs: Floats
    finish: Finish
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Finished:
    """A finished completion: number `completion` of request number `request`."""

    request: int
    completion: int
    draw: Draw


@dataclass(frozen=True, slots=True, eq=False)
class Claim:
    """Tokens claimed to follow a prompt.

    The prompt may include earlier tokens of the same completion.
    """

    prompt: Ids
    ids: Ids


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """Scores per token: log-probability, CDF interval [low, high), sums of p².

    The sums are below the interval's edges and in total.
    """

    logprobs: Floats
    low: Floats
    high: Floats
    squares_low: Floats
    squares_high: Floats
    squares: Floats

    def replay(self, u: Floats) -> Replay:
        """Return the distance of each token from the one that its uniform `u` draws."""
        return distances(u, self.low, self.high, self.squares_low, self.squares_high, self.squares)

    @classmethod
    def joined(cls, pieces: Sequence[Scores]) -> Scores:
        """Join the scores of consecutive tokens."""
        names = [each.name for each in fields(cls)]
        return cls(*(np.concatenate([getattr(piece, name) for piece in pieces]) for name in names))

    def parts(self, sizes: Sequence[int]) -> list[Scores]:
        """Split the scores into parts of the given lengths, in order."""
        columns = (self.logprobs, self.low, self.high, self.squares_low, self.squares_high, self.squares)
        cuts = np.cumsum(sizes)[:-1]
        return [Scores(*part) for part in zip(*(np.split(each, cuts) for each in columns), strict=True)]


@dataclass(frozen=True, slots=True)
class Description:
    """Description of an engine and its resource use.

    `context` is the most tokens of prompt and completion together; None means no bound.
    """

    engine_class: str
    device: str
    parameters: int
    memory_bytes: int
    context: int | None
    rows: int
    """Completions that it draws at once."""
    tokens_per_second: float | None
    """Measured by the last call; None before the first."""


def never() -> bool:
    """Return False: the default of `stop`."""
    return False


def no_environment(ended: Sequence[TurnEnd]) -> Sequence[TurnReply]:
    """Refuse to answer turns: the default of `respond`."""
    raise EngineError(f"{len(ended)} turns ended, and there is no environment to answer them")


def no_news() -> Update | None:
    """Return no update."""
    return None


class Engine(Protocol):
    """Inference engine: loads a head's weights, generates, scores completions."""

    @property
    def engine_class(self) -> str:
        """Kind and arithmetic, such as `torch/f32`: tolerances are per class."""

    @property
    def loaded(self) -> bytes | None:
        """The id of the head whose weights are in."""

    def load(self, head_id: bytes, weights: Mapping[str, TensorBytes]) -> None:
        """Load weights by their Hugging Face names, tied ones once: all of them or none."""

    def patch(self, update: Update) -> None:
        """Patch the loaded weights, those of `update.since`, to those of another head."""

    def generate(
        self,
        requests: Iterable[SlotRequest],
        *,
        stop: Callable[[], bool] = never,
        news: Callable[[], Update | None] = no_news,
        respond: Respond = no_environment,
    ) -> Iterator[Finished]:
        """Yield completions, each as it ends.

        A request is taken as soon as there is room for it.

        `respond` answers turns of requests that have them; other completions go on meanwhile.

        `stop` is called before each token and raises `EngineStoppedError` if true. `news` is called
        then too, but only while every running completion can still change its head (once at most):
        an update that it returns is applied at once, in flight.
        """

    def score(self, prompt: Ids, ids: Ids, limits: SamplingLimits) -> Scores:
        """Measure a claimed completion by one prefill."""

    def score_many(self, claims: Sequence[Claim], limits: SamplingLimits) -> list[Scores]:
        """Score several claims, in one pass where the engine can."""

    def describe(self) -> Description:
        """Describe this engine."""

    def close(self) -> None:
        """Give everything back. An engine that is closed refuses further calls."""


def generate_groups(
    engine: Engine,
    requests: Sequence[SlotRequest],
    *,
    stop: Callable[[], bool] = never,
    respond: Respond | None = None,
) -> list[tuple[Draw, ...]]:
    """Return a group for each request, in order, once all have ended."""
    groups: list[dict[int, Draw]] = [{} for _ in requests]
    for finished in engine.generate(requests, stop=stop, respond=respond or no_environment):
        groups[finished.request][finished.completion] = finished.draw
    return [tuple(draws[place] for place in range(len(draws))) for draws in groups]
