"""Honest samplers against the verifier: refusals, costs and token statistics.

One thread draws ahead while the caller's judges. Costs are the CPU seconds of each thread, so that
a busy machine counts for little.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np
from rich.progress import Progress

from benchmarks.forgers_stage import HONEST, ROWS, Stage
from benchmarks.verify_power import Tokens
from echo_node.engine.base import Draw, Ids, generate_groups
from protocol.sampling import uniforms

T = TypeVar("T")


@dataclass
class Cost:
    """CPU seconds of one thread, and the tokens that they went to."""

    seconds: float = 0.0
    tokens: int = 0

    def of(self, work: Callable[[], T]) -> T:
        start = time.thread_time()
        found = work()
        self.seconds += time.thread_time() - start
        return found

    @property
    def per_token(self) -> float:
        return self.seconds / max(self.tokens, 1)


def ahead(work: Iterable[Callable[[], T]]) -> Iterator[T]:
    """Yield results computed by another thread, up to two ahead."""
    with ThreadPoolExecutor(1, thread_name_prefix="sampler") as pool:
        coming: deque[Future[T]] = deque()
        for each in work:
            coming.append(pool.submit(each))
            if len(coming) > 2:
                yield coming.popleft().result()
        while coming:
            yield coming.popleft().result()


class Honest:
    """An honest sampler, slot by slot. `report` gets its figures after each part."""

    def __init__(self, stage: Stage, report: Callable[[str, object], None], progress: Progress) -> None:
        self._stage, self._report, self._progress = stage, report, progress
        self._drawing, self._judging, self._refused = Cost(), Cost(), 0
        self.worth: list[float] = []
        """Mean rewards of its groups."""

    def go_on(self, groups: int) -> dict[bytes, Tokens]:
        """Generate at least so many more groups, and return the tokens of each prompt."""
        stage, first = self._stage, len(self.worth)
        size = stage.run.manifest.sampling.group_size
        step = max(1, ROWS // size)
        chunks = [range(slot, slot + step) for slot in range(first, first + groups, step)]
        bar = self._progress.add_task("honest completions", total=len(chunks) * step * size)
        tokens = {}
        for drawn in ahead(partial(self._drawn, slots) for slots in chunks):
            for slot, draws, sealed in drawn:
                admitted = stage.admit(sealed, in_turn=True)
                finding = self._judging.of(partial(stage.find, admitted))
                self._judging.tokens += finding.evidence.tokens
                self._refused += size * (finding.breach is not None)
                if finding.breach is None:
                    tokens[name_of(admitted.message.prompt_ids())] = self._tokens(slot, draws)
                self.worth.append(float(np.mean(admitted.message.rewards)))
                self._progress.update(bar, advance=size)
        self._progress.remove_task(bar)
        self._sum_up(size)
        return tokens

    def _sum_up(self, size: int) -> None:
        drawing, judging = self._drawing.per_token, self._judging.per_token
        self._report("honest_completions", len(self.worth) * size)
        self._report("honest_refused", self._refused)
        self._report("generate_ms_per_token", round(1e3 * drawing, 4))
        self._report("verify_ms_per_token", round(1e3 * judging, 4))
        self._report("verify_over_generate", round(judging / drawing, 3))

    def _drawn(self, slots: Sequence[int]) -> list[tuple[int, list[Draw], bytes]]:
        """Yield groups generated in their own thread; the cost of prompts is included."""
        stage = self._stage
        drawn = self._drawing.of(
            lambda: generate_groups(stage.sampler, stage.requests(slots, sampler=HONEST))
        )
        self._drawing.tokens += sum(draw.ids.size for draws in drawn for draw in draws)
        return [
            (slot, list(draws), stage.group(slot, draws, sampler=HONEST))
            for slot, draws in zip(slots, drawn, strict=True)
        ]

    def _tokens(self, slot: int, draws: Sequence[Draw]) -> Tokens:
        """Return the evidence of the last group's tokens."""
        key = self._stage.key(slot, sampler=HONEST)
        return Tokens.join(
            Tokens.of(scores, uniforms(key, row, draw.ids.size), draw.logprobs)
            for row, (scores, draw) in enumerate(zip(self._stage.seen, draws, strict=True))
        )


def name_of(prompt: Ids) -> bytes:
    """Return the key by which two prompts are the same."""
    return prompt.astype(np.int64).tobytes()
