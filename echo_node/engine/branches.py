"""Which completions still agree. Those with the same prompt and the same tokens so far share a row of the batch.

A group begins on the one row of its prompt and branches where its luck parts; a completion that ends leaves. So an
engine computes each distinct prefix once. Pure bookkeeping: it knows no model and draws nothing itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from echo_node.engine.base import Draw, Floats, Ids, SamplingLimits, SlotRequest
from protocol.sampling import uniforms


class Growth(NamedTuple):
    """The rows of the next step: the row that each grows from, and the token that it grows by."""

    parents: Ids
    tokens: Ids


class Branches:
    """The completions of a batch, from the prompts to the last token."""

    def __init__(self, requests: Sequence[SlotRequest], limits: SamplingLimits) -> None:
        self._limits = limits
        self._sizes = [request.group_size for request in requests]
        self._luck = np.stack(
            [
                uniforms(request.slot_key, completion, limits.max_tokens)
                for request in requests
                for completion in range(request.group_size)
            ]
        )
        self._ids = np.zeros(self._luck.shape, np.int64)
        self._logprobs = np.zeros(self._luck.shape)
        self._lengths = np.zeros(len(self._luck), np.int64)
        self._ended = np.zeros(len(self._luck), np.bool_)
        self._ends = np.array(sorted(limits.end_tokens), np.int64)
        self._step = 0
        self._living = np.arange(len(self._luck))
        self.rows: Ids = np.repeat(np.arange(len(requests)), self._sizes)
        """Of each living completion, the row that it draws from."""

    @property
    def luck(self) -> Floats:
        """Of each living completion, the number that draws its next token."""
        now: Floats = self._luck[self._living, self._step]
        return now

    def grow(self, tokens: Ids, logprobs: Floats) -> Growth | None:
        """Give each living completion its token. None: all have ended."""
        self._ids[self._living, self._step] = tokens
        self._logprobs[self._living, self._step] = logprobs
        self._lengths[self._living] += 1
        self._step += 1
        ended = np.isin(tokens, self._ends)
        self._ended[self._living[ended]] = True
        going = ~ended
        self._living = self._living[going]
        if self._step == self._limits.max_tokens or not self._living.size:
            return None
        grown = self.rows[going] * self._limits.vocab_size + tokens[going]
        distinct, self.rows = np.unique(grown, return_inverse=True)
        return Growth(*np.divmod(distinct, self._limits.vocab_size))

    def groups(self) -> list[tuple[Draw, ...]]:
        """The completions as they stand, by request."""
        draws = iter(self._draw(completion) for completion in range(len(self._ids)))
        return [tuple(itertools.islice(draws, size)) for size in self._sizes]

    def _draw(self, completion: int) -> Draw:
        length = self._lengths[completion]
        return Draw(
            ids=self._ids[completion, :length].copy(),
            logprobs=self._logprobs[completion, :length].copy(),
            finish="end" if self._ended[completion] else "length",
        )
