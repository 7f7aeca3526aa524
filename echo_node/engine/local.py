"""An engine in this process: one decoder, one call at a time.

Requests are checked before any work. The head's id is dropped while the weights change. `worker`
runs the same in a process of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

import numpy as np

from echo_node.engine.base import (
    Claim,
    Description,
    EngineStoppedError,
    Finished,
    Ids,
    Respond,
    SamplingLimits,
    Scores,
    SlotRequest,
    TensorBytes,
    Update,
    never,
    no_environment,
    no_news,
)
from echo_node.engine.continuous_batching import Batch
from echo_node.engine.decoder import Decoder
from echo_node.engine.request_checks import Reach, check_weights
from echo_node.engine.token_sampling import measure
from echo_node.errors import EngineError, boundary

LOGITS_AT_ONCE: Final = 64 * 1024 * 1024
"""Most logits of claims in memory at once, of 4 bytes each."""
LONG: Final = 4_096
"""Longest sequence that is scored in one pass; attention takes memory by its square."""
_LEAST_PIECE: Final = 64
ROWS: Final = 128
"""Completions at once, unless the caller says otherwise."""


class LocalEngine:
    """A decoder as an engine."""

    def __init__(self, decoder: Decoder, *, rows: int = ROWS) -> None:
        if rows < 1:
            raise EngineError(f"an engine of {rows} rows draws nothing", advice="give it at least one")
        self._decoder = decoder
        self._rows = rows
        self._reach = Reach(decoder.vocabulary, decoder.context)
        self._busy = threading.Lock()
        self._closed = False
        self._speed: float | None = None
        self.engine_class = decoder.engine_class
        self.loaded: bytes | None = None

    def load(self, head_id: bytes, weights: Mapping[str, TensorBytes]) -> None:
        """Load weights by their Hugging Face names, tied ones once: all of them or none."""
        with self._alone("loading weights"):
            check_weights(weights, self._decoder.shapes)
            self.loaded = None  # should the copying break off, no head's name stands over a mixture
            self._decoder.load(weights)
            self.loaded = head_id

    def patch(self, update: Update) -> None:
        """Patch the loaded weights, those of `update.since`, to those of another head."""
        with self._alone("changing weights"):
            self._put(update)

    def generate(
        self,
        requests: Iterable[SlotRequest],
        *,
        stop: Callable[[], bool] = never,
        news: Callable[[], Update | None] = no_news,
        respond: Respond = no_environment,
    ) -> Iterator[Finished]:
        """Completions, each as it ends; see `Engine`."""
        with self.batch() as batch:
            if isinstance(requests, Sequence):
                batch.check(requests)  # all of them, before any work
            source = iter(requests)
            more = True
            while more or not batch.idle:
                while more and batch.room:
                    request = next(source, None)
                    more = request is not None
                    if request is not None:
                        batch.add(request)
                if stop():
                    raise EngineStoppedError("generation was stopped by whoever asked for it")
                if batch.updatable and (update := news()) is not None:
                    batch.update(update)
                yield from batch.step()
                if ended := batch.ended_turns():
                    for turn, reply in zip(ended, respond(ended), strict=True):
                        yield from batch.respond(turn.request, turn.completions[0], reply)

    @contextmanager
    def batch(self) -> Generator[Batch]:
        """Open a batch with the loaded weights; no other call runs until the block ends."""
        with self._alone("generating"):
            batch = Batch(self._decoder, self._check_loaded(), rows=self._rows, put=self._put)
            try:
                yield batch
            finally:
                if batch.seconds:
                    self._speed = batch.tokens / batch.seconds

    def score(self, prompt: Ids, ids: Ids, limits: SamplingLimits) -> Scores:
        """Measure a claimed completion by one prefill."""
        return self.score_many([Claim(prompt, ids)], limits)[0]

    def score_many(self, claims: Sequence[Claim], limits: SamplingLimits) -> list[Scores]:
        """Measure several; see `Engine`."""
        with self._alone("scoring"):
            self._check_loaded()
            for claim in claims:
                self._reach.check_claim(claim.prompt, claim.ids, limits)
            if not claims:
                return []
            # the last token is only predicted
            before = [np.concatenate((each.prompt, each.ids[:-1])).astype(np.int64) for each in claims]
            piece = max(_LEAST_PIECE, LOGITS_AT_ONCE // self._decoder.vocabulary)
            if max(ids.size for ids in before) > LONG or sum(each.ids.size for each in claims) > piece:
                return [
                    self._score_pieces(ids, each.ids, limits, min(piece, LONG))
                    for ids, each in zip(before, claims, strict=True)
                ]
            logits = self._decoder.score_many(before, [each.ids.size for each in claims])
            ids = np.concatenate([each.ids for each in claims])
            return measure(logits[:, : limits.vocab_size], ids, limits.temperature).parts(
                [each.ids.size for each in claims]
            )

    def _score_pieces(self, before: Ids, ids: Ids, limits: SamplingLimits, piece: int) -> Scores:
        """Score a claim with the logits of at most `piece` tokens in memory."""
        found: list[Scores] = []
        done = 0
        for logits in self._decoder.score_pieces(before, ids.size, piece):
            part = ids[done : done + len(logits)]
            found.append(measure(logits[:, : limits.vocab_size], part, limits.temperature))
            done += len(logits)
        return Scores.joined(found)

    def describe(self) -> Description:
        """Describe this engine."""
        return Description(
            engine_class=self.engine_class,
            device=self._decoder.device,
            parameters=self._decoder.parameters,
            memory_bytes=self._decoder.memory_bytes,
            context=self._decoder.context,
            rows=self._rows,
            tokens_per_second=self._speed,
        )

    def close(self) -> None:
        """Give everything back."""
        if not self._closed:
            with self._alone("closing"):
                self._closed, self.loaded = True, None
                self._decoder.close()

    def _put(self, update: Update) -> None:
        if update.since != self.loaded:
            raise EngineError("an update of other weights than those that are in", advice="load all of them")
        self.loaded = None
        with update.changes(self._decoder.granule) as changes:
            self._decoder.put(changes)
        self.loaded = update.head_id

    def _check_loaded(self) -> bytes:
        if self.loaded is None:
            raise EngineError("the engine has no weights", advice="load those of a head first")
        return self.loaded

    @contextmanager
    def _alone(self, doing: str) -> Iterator[None]:
        """Refuse a second call while one runs.

        So no token is drawn from a mixture of weights.
        """
        if not self._busy.acquire(blocking=False):
            raise EngineError(f"{doing} while another call runs", advice="make one call at a time")
        try:
            if self._closed:
                raise EngineError(f"{doing} with an engine that is closed", advice="make another")
            with boundary(EngineError, doing):
                yield
        finally:
            self._busy.release()
