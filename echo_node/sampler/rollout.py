"""Rollouts: contract prompts and engine draws into sealed groups."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from echo_node.contract import Prompt
from echo_node.engine.base import Draw, Engine, Ids, SlotRequest, Update, no_environment, no_news
from echo_node.errors import ContractError, DefectError
from echo_node.rollouts.record import RolloutRecord
from echo_node.runs.episodes import completion_of, responder, scorable
from echo_node.runs.run import Run
from protocol import Completion, Envelope, Identity, Opened, TrajectoryGroup, WeightsHead

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _OpenGroup:
    """A group in progress: its slot and prompt, and its completions by number."""

    slot: int
    prompt: Prompt
    ids: Ids
    draws: dict[int, Draw] = field(default_factory=dict)


class Rollout:
    """Generator of one sampler's groups.

    The engine must have the weights of the head loaded.
    """

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
        """Return sealed groups for these slots, in order. Slow: run it in a thread."""
        found = {group.slot: group for group in self.stream(head, [slots], stop, news)}
        return [found[slot] for slot in slots if slot in found]

    def stream(
        self,
        head: Opened[WeightsHead],
        blocks: Iterable[Sequence[int]],
        stop: Callable[[], bool],
        news: Callable[[], Update | None] = no_news,
    ) -> Iterator[RolloutRecord]:
        """Yield sealed groups, each as its last completion ends. Slow: run it in a thread.

        A further block of slots is taken when rows of the engine fall free. Weights that `news`
        returns are applied while completions run; each token names the head that it was drawn
        under.

        A slot whose environment fails is void: it has no group.
        """
        if self._engine.loaded not in {None, head.id}:
            raise DefectError("the engine holds the weights of another head than the slots'")
        heads = [head.id]
        open_groups: list[_OpenGroup | None] = []
        prompts: list[Prompt] = []
        ended = 0

        def note() -> Update | None:
            update = news()
            if update is not None:
                heads.append(update.head_id)
            return update

        def requests() -> Iterator[SlotRequest]:
            source = iter(blocks)
            # A further block is taken once rows are known to fall free: a caller that lists the
            # requests before it draws has the first block alone.
            while (ended or not open_groups) and (block := next(source, None)) is not None:
                for group, request in self._requests(head.id, block):
                    open_groups.append(group)
                    prompts.append(group.prompt)
                    yield request

        respond = responder(self._run, prompts) or no_environment
        for finished in self._engine.generate(requests(), stop=stop, news=note, respond=respond):
            ended += 1
            group = open_groups[finished.request]
            if group is None:
                raise DefectError(f"completion {finished.completion} of a group that is sealed")
            group.draws[finished.completion] = finished.draw
            if len(group.draws) == self._run.manifest.sampling.group_size:
                open_groups[finished.request] = None  # it may be long, and is needed no more
                yield from self._sealed(head, group, heads)

    def _requests(self, head: bytes, slots: Sequence[int]) -> Iterator[tuple[_OpenGroup, SlotRequest]]:
        """Yield the groups of some slots with their requests; prompts are made together."""
        keys = [self._run.slot_key(head, self._identity.public, slot) for slot in slots]
        size, limits = self._run.manifest.sampling.group_size, self._run.limits
        for slot, key, (prompt, ids) in zip(slots, keys, self._run.prompts(keys), strict=True):
            yield (
                _OpenGroup(slot, prompt, ids),
                SlotRequest(ids, key, size, limits, turns=self._run.turn_rules),
            )

    def _sealed(
        self, head: Opened[WeightsHead], group: _OpenGroup, heads: Sequence[bytes]
    ) -> Iterator[RolloutRecord]:
        """Yield the sealed group, unless its slot is void."""
        draws = [group.draws[number] for number in sorted(group.draws)]
        later = {span.head_id for draw in draws for span in draw.spans} - {head.id, None}
        used = (head.id, *(each for each in heads if each in later))
        completions = self._completions(group.slot, group.prompt, draws, used)
        if completions is None:
            return
        message = TrajectoryGroup.of(
            prompt=group.ids,
            completions=completions,
            engine=self._engine.engine_class,
            heads=used,
            slot=group.slot,
            vocabulary=self._run.manifest.model.vocab_size,
        )
        envelope = Envelope.seal(message, self._identity, self._run.id)
        yield RolloutRecord.of(envelope, message, head.message.step, group.prompt)

    def _completions(
        self, slot: int, prompt: Prompt, draws: Sequence[Draw], heads: tuple[bytes, ...]
    ) -> list[Completion] | None:
        """Return the completions of a slot with claimed rewards; None if it is void.

        Before anybody else does, the environment is asked again: what does not repeat is not sent.
        """
        try:
            answers = scorable(self._run, prompt, draws)
        except ContractError as error:
            log.warning("slot %d is void: %s", slot, error)
            return None
        rewards: Sequence[float | None] = [None] * len(draws)
        if self._run.has_claims:
            rewards = [score.value for score in self._run.scores(prompt, answers)]
        return [
            completion_of(self._run, draw, heads, reward) for draw, reward in zip(draws, rewards, strict=True)
        ]
