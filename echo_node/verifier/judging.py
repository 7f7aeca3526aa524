"""Whether a group was honestly sampled: one prefill per completion at the named heads, and only then its reward.

Checks go from cheap to dear and stop at the first breach. What needs no model (limits, roster, prompt, end) is
`admission`'s, which comes before. It knows no network; the engine and the weights are the caller's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from echo_node.admission import Admitted
from echo_node.contract import Score
from echo_node.contract.jail.seat import Failed
from echo_node.engine.base import Engine, Ids, SamplingLimits
from echo_node.errors import ContractError
from echo_node.run import Run
from echo_node.verifier.bands import Bands, Breach
from echo_node.verifier.evidence import Evidence, evidence
from protocol.sampling import uniforms
from protocol.trajectory import Completion

PIECE: Final = 64
"""Tokens of the first piece of a completion; each further one is twice as long."""
TEMPERATURES: Final = (0.9, 1.1)
"""What else a sampler might have drawn at, times the run's."""
REWARD_SLACK: Final = 1e-9


@dataclass(frozen=True, slots=True)
class Finding:
    """What came of a group: honest if there is no breach. Evidence is of all tokens that were looked at."""

    breach: Breach | None
    evidence: Evidence
    reward: float | None
    """The mean reward that the contract gives, if it came to that."""


class Judge:
    """Judges the groups of a run. `at(head_id)` gives an engine that holds the weights of a head."""

    def __init__(self, run: Run, at: Callable[[bytes], Engine]) -> None:
        self._run = run
        self._at = at
        self._bands = {told.engine: Bands(told) for told in run.told.engines}

    def judge(self, admitted: Admitted, cancelled: Callable[[], bool] = lambda: False) -> Finding | None:
        """Look at a whole group. It takes a while: run it in a thread. None: it was cancelled."""
        group = admitted.group.message
        bands = self._bands[group.engine]
        key = self._run.slot_key(group.heads[0], admitted.group.signer, group.slot)
        completions = group.completions()
        whole = Evidence()
        for head, index, start, end in _by_head(group.heads, completions):
            if cancelled():
                return None
            completion = completions[index]
            prompt = np.concatenate((group.prompt_ids(), completion.ids[:start])).astype(np.int64)
            for found in self._pieces(self._at(head), prompt, completion, (start, end), key, index, bands):
                whole += found
                breach = bands.breach(found)
                if breach is not None:
                    return Finding(breach, whole, None)
        breach = bands.breach(whole)
        if breach is not None:
            return Finding(breach, whole, None)
        return self._reward(admitted, completions, whole)

    def _pieces(
        self,
        engine: Engine,
        prompt: Ids,
        completion: Completion,
        stretch: tuple[int, int],
        key: bytes,
        index: int,
        bands: Bands,
    ) -> Iterator[Evidence]:
        """Evidence of a stretch under one head, in pieces, so that a breach ends it early."""
        first, end = stretch
        luck = uniforms(key, index, end - first, first)
        start, size = first, PIECE
        while start < end:
            stop = end if end - start <= 2 * size else start + size
            before = np.concatenate((prompt, completion.ids[first:start]))
            ids = completion.ids[start:stop]
            here = luck[start - first : stop - first]
            scores = engine.score(before, ids, self._run.limits)
            others = (
                tuple(engine.score(before, ids, limits) for limits in self._other_limits())
                if bands.wide
                else ()
            )
            yield evidence(scores, here, completion.logprobs[start:stop], others)
            start, size = stop, 2 * size

    def _other_limits(self) -> Iterator[SamplingLimits]:
        limits = self._run.limits
        return (replace(limits, temperature=limits.temperature * factor) for factor in TEMPERATURES)

    def _reward(self, admitted: Admitted, completions: Sequence[Completion], found: Evidence) -> Finding:
        """Only what was honestly sampled is worth the risk of scoring it."""
        try:
            results = self._run.results(admitted.prompt, [completion.ids for completion in completions])
        except ContractError as error:
            return Finding(
                Breach("not-scored", f"the contract fails here: {error.what}", sure=False), found, None
            )
        failed = next((each for each in results if isinstance(each, Failed)), None)
        if failed is not None:  # by the text, or by this machine: nobody is condemned for it
            return Finding(
                Breach("not-scored", f"the contract fails here: {failed.reason}", sure=False), found, None
            )
        rewards = [each.value for each in results if isinstance(each, Score)]
        for completion, reward in zip(completions, rewards, strict=True):
            if abs(reward - completion.reward) > REWARD_SLACK:
                what = f"a reward of {completion.reward:g} is claimed, and the contract gives {reward:g}"
                return Finding(Breach("wrong-reward", what), found, float(np.mean(rewards)))
        return Finding(None, found, float(np.mean(rewards)))


def _by_head(
    heads: Sequence[bytes], completions: Sequence[Completion]
) -> Iterator[tuple[bytes, int, int, int]]:
    """Every stretch of every completion, those of one head together: weights are changed as seldom as can be."""
    for place, head in enumerate(heads):
        for index, completion in enumerate(completions):
            for stretch in completion.stretches:
                if stretch.head == place:
                    yield head, index, stretch.start, stretch.end
