"""From slots to sealed groups: prompts by the contract, draws by the engine, one seal each. Knows no network."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from echo_node.engine.base import Draw, Engine, SlotRequest
from echo_node.run import Run
from protocol import Completion, Identity, Stretch, TrajectoryGroup, seal


class Rollout:
    """One sampler's way of filling slots. The engine must hold the weights of the head that is asked for."""

    def __init__(self, run: Run, identity: Identity, engine: Engine) -> None:
        self._run = run
        self._identity = identity
        self._engine = engine

    def fill(self, head_id: bytes, slots: Sequence[int], cancelled: Callable[[], bool]) -> list[bytes]:
        """Sealed groups for these slots, in their order. It takes a while: run it in a thread."""
        keys = [self._run.slot_key(head_id, self._identity.public, slot) for slot in slots]
        prompts = [self._run.prompt(key) for key in keys]
        size = self._run.told.sampling.group_size
        requests = [SlotRequest(ids, key, size) for key, (_, ids) in zip(keys, prompts, strict=True)]
        groups = self._engine.generate(requests, self._run.limits, cancelled)
        sealed = []
        for slot, (prompt, ids), draws in zip(slots, prompts, groups, strict=True):
            group = TrajectoryGroup.of(
                prompt=ids,
                completions=[
                    self._completion(draw, self._run.score(prompt, draw.ids).value) for draw in draws
                ],
                engine=self._engine.engine_class,
                heads=(head_id,),
                slot=slot,
                vocabulary=self._run.told.model.vocab_size,
            )
            sealed.append(seal(group, self._identity, self._run.id))
        return sealed

    @staticmethod
    def _completion(draw: Draw, reward: float) -> Completion:
        whole = (Stretch(0, len(draw.ids), 0),)
        return Completion(draw.ids, draw.logprobs, draw.finish, reward, whole)
