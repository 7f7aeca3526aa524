"""Rollouts: prompts from the contract, draws from the engine, sealed trajectory groups."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from echo_node.contract import Prompt
from echo_node.engine.base import Draw, Engine, SlotRequest, Update, no_news
from echo_node.errors import DefectError
from echo_node.rollouts.record import RolloutRecord
from echo_node.runs.run import Run
from protocol import Completion, Envelope, Identity, Opened, Stretch, TrajectoryGroup, WeightsHead


class Rollout:
    """Generator of one sampler's groups; the engine must have the weights of the head loaded."""

    def __init__(self, run: Run, identity: Identity, engine: Engine) -> None:
        self._run = run
        self._identity = identity
        self._engine = engine

    def fill(
        self,
        head: Opened[WeightsHead],
        slots: Sequence[int],
        stop: Callable[[], bool],
        news: Callable[[], Update | None] = no_news,
    ) -> list[RolloutRecord]:
        """Return sealed groups for these slots, in order. Slow: run it in a thread.

        Weights that `news` returns are applied while completions run; each token names the head
        that it was drawn under.
        """
        head_id = head.id
        if self._engine.loaded not in {None, head_id}:
            raise DefectError("the engine holds the weights of another head than the slots'")
        heads = [head_id]

        def note() -> Update | None:
            update = news()
            if update is not None:
                heads.append(update.head_id)
            return update

        keys = [self._run.slot_key(head_id, self._identity.public, slot) for slot in slots]
        prompts = self._run.prompts(keys)
        size = self._run.manifest.sampling.group_size
        limits = self._run.limits
        requests = [SlotRequest(ids, key, size, limits) for key, (_, ids) in zip(keys, prompts, strict=True)]
        groups: list[dict[int, Draw]] = [{} for _ in slots]
        for finished in self._engine.generate(requests, stop=stop, news=note):
            groups[finished.request][finished.completion] = finished.draw
        records = []
        for slot, (prompt, ids), draws in zip(slots, prompts, groups, strict=True):
            later = {span.head_id for draw in draws.values() for span in draw.spans} - {head_id}
            used = (head_id, *(head for head in heads if head in later))
            rewards = self._claims(prompt, [draws[index] for index in range(size)])
            group = TrajectoryGroup.of(
                prompt=ids,
                completions=[self._completion(draws[index], used, rewards[index]) for index in range(size)],
                engine=self._engine.engine_class,
                heads=used,
                slot=slot,
                vocabulary=self._run.manifest.model.vocab_size,
            )
            envelope = Envelope.seal(group, self._identity, self._run.id)
            records.append(RolloutRecord.of(envelope, group, head.message.step, prompt))
        return records

    def _claims(self, prompt: Prompt, draws: Sequence[Draw]) -> Sequence[float | None]:
        """Return the rewards to claim: none in a run whose contract may not be pure."""
        if not self._run.has_claims:
            return [None] * len(draws)
        return [score.value for score in self._run.scores(prompt, [draw.ids for draw in draws])]

    @staticmethod
    def _completion(draw: Draw, heads: tuple[bytes, ...], reward: float | None) -> Completion:
        cuts = [*(span.start for span in draw.spans), len(draw.ids)]
        stretches = tuple(
            Stretch(start, end, heads.index(span.head_id))
            for span, (start, end) in zip(draw.spans, itertools.pairwise(cuts), strict=True)
        )
        return Completion(draw.ids, draw.logprobs, draw.finish, reward, stretches)
