"""Samplers that cheat, each in a few lines, and the stage on which they meet the verifier: a run, its heads, its judge.

Every forger gets a slot and gives a sealed group, as it would send it. The stage's honest sampler is of one engine class,
its judge is torch in float32. Tests and `python -m benchmarks.verify` share it.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from echo_node.admission import Admission, Admitted, Refused
from echo_node.contract import load
from echo_node.engine.base import Draw, Engine, SlotRequest, Span, TensorBytes, generate_groups
from echo_node.engine.kinds import EngineSpec, make_engine
from echo_node.engine.local import LocalEngine
from echo_node.run import ENGINES, Run, draft
from echo_node.verifier.judging import Finding, Judge
from echo_node.weights.local import read_folder
from protocol import (
    ZERO,
    Completion,
    Envelope,
    Identity,
    Member,
    Opened,
    Roster,
    Route,
    Stretch,
    TrajectoryGroup,
    WeightsHead,
    blob_id,
    encode,
    merkle_root,
    open_sealed,
    seal,
)
from protocol.manifest import EngineTolerance, Sampling, Sync
from protocol.sampling import probabilities, uniforms

Weights = Mapping[str, TensorBytes]
Pick = Callable[[NDArray[np.float64], int, int], int]
"""From the probabilities, the number of the completion and that of the token: the token."""


def identity(name: str) -> Identity:
    return Identity(hashlib.sha256(name.encode()).digest())


TRAINER, SAMPLER, OTHER = identity("trainer"), identity("sampler"), identity("another sampler")


def nudged(weights: Weights, share: float, seed: int = 0) -> dict[str, TensorBytes]:
    """Weights of which a share has moved by one unit in the last place, as a step of training leaves them."""
    luck = np.random.default_rng(seed)
    moved = {}
    for name, tensor in weights.items():
        bits = np.frombuffer(tensor.data, "<u2").copy()
        moves = (luck.random(bits.size, np.float32) < share) & (bits & 0x7FFF > 0)  # nothing lies below zero
        places = np.flatnonzero(moves)
        bits[places] += luck.choice(np.array([1, 0xFFFF], np.uint16), places.size)
        moved[name] = dataclasses.replace(tensor, data=bits.tobytes())
    return moved


def noised(weights: Weights, amount: float, seed: int = 0) -> dict[str, TensorBytes]:
    """Weights of another model: every one is off by a part of the tensor's spread."""
    luck = np.random.default_rng(seed)
    other = {}
    for name, tensor in weights.items():
        values = (np.frombuffer(tensor.data, "<u2").astype(np.uint32) << 16).view(np.float32)
        noise = luck.normal(0, amount * float(values.std() or 1.0), values.size).astype(np.float32)
        bits = ((values + noise).view(np.uint32) >> 16).astype(np.uint16)
        other[name] = dataclasses.replace(tensor, data=bits.tobytes())
    return other


class Stage:
    """A run on a model, with two heads: an older one, whose weights are a step behind, and the newest."""

    def __init__(
        self,
        folder: Path,
        *,
        max_tokens: int,
        group_size: int = 4,
        engine_class: str = "llama/f16",
        tolerances: tuple[EngineTolerance, ...] = ENGINES,
        threads: int = 2,
    ) -> None:
        self.folder, self._threads = folder, threads
        contract = load("digits-reverse", "1")
        sealed = draft(
            name="a stage for forgers",
            folder=folder,
            contract=contract,
            params={},
            algorithm={},
            sampling_=Sampling(group_size=group_size, max_prompt=32, max_tokens=max_tokens, temperature=1.0),
            sync=Sync(async_from=0, head_every=1, in_flight=False, staleness=4),
            author=TRAINER,
            trainers=[TRAINER.public],
            engines=tolerances,
            nonce=bytes(32),
        )
        self.run = Run.open(sealed, folder)
        self.engine_class = engine_class
        self.newest = read_folder(folder)
        self.older = nudged(self.newest, 0.01)
        self.roster = Roster(
            tuple(Member(key, engine_class, bytes(32)) for key in sorted((SAMPLER.public, OTHER.public)))
        )
        self.old_head = self._head(None, 0)
        self.head = self._head(self.old_head, 1)
        self.weights = {self.old_head.id: self.older, self.head.id: self.newest}
        self.sampler = self.engine(engine_class, self.newest)
        self._judge_engine = make_engine(EngineSpec("torch/f32", folder, "cpu", 1, threads))
        self._judge = Judge(self.run, self._at)
        self.admission = self._admission()

    def engine(self, engine_class: str, weights: Weights) -> LocalEngine:
        size = self.run.told.sampling.group_size
        made = make_engine(EngineSpec(engine_class, self.folder, "cpu", max(16, size), self._threads))
        made.load(self.head.id, weights)
        return made

    def verify(self, sealed: bytes) -> str | None:
        """Why a group is refused or condemned; None if it passes for honest."""
        judged = self.admission.judge(Envelope.parse(sealed))
        if isinstance(judged, Refused):
            return judged.reason
        breach = self.find(judged).breach
        return None if breach is None else breach.reason

    def admit(self, sealed: bytes, *, in_turn: bool = False) -> Admitted:
        """What the cheap checks let through; `in_turn`: after all that were admitted so before it."""
        judged = (self.admission if in_turn else self._admission()).judge(Envelope.parse(sealed))
        if isinstance(judged, Refused):
            raise ValueError(f"refused: {judged.what}")  # noqa: TRY004 - it is the value that is wrong
        return judged

    def find(self, admitted: Admitted) -> Finding:
        found = self._judge.judge(admitted)
        assert found is not None
        return found

    def close(self) -> None:
        self.sampler.close()
        self._judge_engine.close()
        self.run.close()

    # what forgers need

    def key(self, slot: int, head: bytes | None = None, sampler: Identity = SAMPLER) -> bytes:
        return self.run.slot_key(head or self.head.id, sampler.public, slot)

    def request(self, slot: int, head: bytes | None = None, sampler: Identity = SAMPLER) -> SlotRequest:
        key = self.key(slot, head, sampler)
        _, ids = self.run.prompt(key)
        return SlotRequest(ids, key, self.run.told.sampling.group_size, self.run.limits)

    def draws(self, slot: int, engine: LocalEngine | None = None) -> list[Draw]:
        """What an honest sampler says with this engine."""
        return list(generate_groups(engine or self.sampler, [self.request(slot)])[0])

    def picked(self, slot: int, pick: Pick, engine: LocalEngine | None = None) -> list[Draw]:
        """Completions by a sampler's own rule."""
        asked, decoder = self.request(slot), (engine or self.sampler)._decoder  # noqa: SLF001
        size, bounds = asked.group_size, self.run.limits
        decoder.make_room(size, asked.prompt.size + bounds.max_tokens)
        logits = np.repeat(decoder.prefill([0], [asked.prompt]), size, axis=0)
        for row in range(1, size):
            decoder.copy(0, row, asked.prompt.size)
        ids: list[list[int]] = [[] for _ in range(size)]
        logprobs: list[list[float]] = [[] for _ in range(size)]
        done = [False] * size
        for place in range(bounds.max_tokens):
            chance = probabilities(logits[:, : bounds.vocab_size], bounds.temperature)
            for row in range(size):
                if not done[row]:
                    token = pick(chance[row], row, place)
                    ids[row].append(token)
                    logprobs[row].append(float(np.log(max(chance[row, token], 1e-30))))
                    done[row] = token in bounds.end_tokens
            if all(done):
                break
            logits = decoder.decode(np.array([row[-1] for row in ids]))
        return [self.drawn(row, values) for row, values in zip(ids, logprobs, strict=True)]

    def drawn(self, ids: list[int], logprobs: list[float] | NDArray[np.float64]) -> Draw:
        ends = ids[-1] in self.run.limits.end_tokens
        span = (Span(0, self.head.id),)
        return Draw(np.array(ids), np.array(logprobs), "end" if ends else "length", span)

    def prefilled(self, slot: int, ids: list[int]) -> Draw:
        """A text from elsewhere, with the log-probabilities that the model gives it."""
        scores = self.sampler.score(self.request(slot).prompt, np.array(ids), self.run.limits)
        return self.drawn(ids, scores.logprobs)

    def group(
        self,
        slot: int,
        draws: list[Draw],
        *,
        head: bytes | None = None,
        prompt: NDArray[np.int64] | None = None,
        rewards: list[float] | None = None,
        sampler: Identity = SAMPLER,
    ) -> bytes:
        """A sealed group of these completions."""
        key = self.key(slot, head, sampler)
        asked, ids = self.run.prompt(key)
        given = rewards or [self.run.score(asked, draw.ids).value for draw in draws]
        completions = [
            Completion(draw.ids, draw.logprobs, draw.finish, reward, (Stretch(0, len(draw.ids), 0),))
            for draw, reward in zip(draws, given, strict=True)
        ]
        group = TrajectoryGroup.of(
            prompt=ids if prompt is None else prompt,
            completions=completions,
            engine=self.engine_class,
            heads=(head or self.head.id,),
            slot=slot,
            vocabulary=self.run.told.model.vocab_size,
        )
        return seal(group, sampler, self.run.id)

    def _at(self, head_id: bytes) -> Engine:
        if self._judge_engine.loaded != head_id:
            self._judge_engine.load(head_id, self.weights[head_id])
        return self._judge_engine

    def _admission(self) -> Admission:
        admission = Admission(self.run)
        for head in (self.old_head, self.head):
            admission.published(head, self.roster)
        return admission

    def _head(self, previous: Opened[WeightsHead] | None, step: int) -> Opened[WeightsHead]:
        head = WeightsHead(
            groups=merkle_root([]),
            layout=self.run.rules.layout,
            luck=bytes([step]) * 32,
            previous=previous.id if previous else ZERO,
            root=self.run.rules.root,
            roster=blob_id(encode(self.roster)),
            routes=(Route(base=None, codec="safetensors", size=1, table=bytes(32)),),
            step=step,
            term=1,
            version=step,
        )
        return open_sealed(seal(head, TRAINER, self.run.id), WeightsHead, self.run.id)


def by_luck(stage: Stage, slot: int, change: Callable[[NDArray[np.float64]], NDArray[np.float64]]) -> Pick:
    """The slot's own luck, on a distribution that was changed."""
    bounds = stage.run.limits
    size = stage.run.told.sampling.group_size
    luck = [uniforms(stage.key(slot), row, bounds.max_tokens) for row in range(size)]

    def pick(chance: NDArray[np.float64], row: int, place: int) -> int:
        cumulative = np.cumsum(change(chance))
        return int(np.searchsorted(cumulative, luck[row][place] * cumulative[-1], side="right"))

    return pick


def own_luck(seed: int) -> Pick:
    luck = np.random.default_rng(seed)
    return lambda chance, _row, _place: int(luck.choice(chance.size, p=chance / chance.sum()))


def at_temperature(factor: float) -> Callable[[Stage, int], bytes]:
    def forge(stage: Stage, slot: int) -> bytes:
        return stage.group(
            slot, stage.picked(slot, by_luck(stage, slot, lambda chance: chance ** (1 / factor)))
        )

    return forge


def top_p(stage: Stage, slot: int) -> bytes:
    def nucleus(chance: NDArray[np.float64]) -> NDArray[np.float64]:
        order = np.argsort(-chance)
        kept = order[: int(np.searchsorted(np.cumsum(chance[order]), 0.9)) + 1]
        cut = np.zeros_like(chance)
        cut[kept] = chance[kept]
        return cut

    return stage.group(slot, stage.picked(slot, by_luck(stage, slot, nucleus)))


def greedy(stage: Stage, slot: int) -> bytes:
    return stage.group(slot, stage.picked(slot, lambda chance, _row, _place: int(chance.argmax())))


def without_seed(stage: Stage, slot: int) -> bytes:
    return stage.group(slot, stage.picked(slot, own_luck(slot)))


def best_of_8(stage: Stage, slot: int) -> bytes:
    """Eight tries for each completion, the one with the best reward, and then the likeliest, is sent."""
    asked, _ = stage.run.prompt(stage.key(slot))
    tries = [stage.picked(slot, own_luck(1000 * slot + attempt)) for attempt in range(8)]

    def worth(draw: Draw) -> tuple[float, float]:
        return stage.run.score(asked, draw.ids).value, float(draw.logprobs.mean())

    return stage.group(slot, [max(row, key=worth) for row in zip(*tries, strict=True)])


def edited(stage: Stage, slot: int) -> bytes:
    """Four tokens of an honest completion are others; few as it has, half of them in short ones."""
    luck = np.random.default_rng(slot)
    bounds = stage.run.limits
    draws = []
    for draw in stage.draws(slot):
        ids = draw.ids.copy()
        inner = np.arange(max(1, ids.size - 1))
        for place in luck.choice(inner, min(4, (ids.size + 1) // 2), replace=False):
            options = [
                token for token in luck.integers(0, bounds.vocab_size, 64) if token not in bounds.end_tokens
            ]
            ids[place] = next(token for token in options if token != ids[place])
        draws.append(stage.prefilled(slot, ids.tolist()))
    return stage.group(slot, draws)


def written_elsewhere(stage: Stage, slot: int) -> bytes:
    """The right answer, typed in, with the log-probabilities of a prefill."""
    asked, _ = stage.run.prompt(stage.key(slot))
    text = stage.run.tokenizer.encode(stage.run.contract.answer(asked)).tolist()
    answer = [*text, min(stage.run.limits.end_tokens)][: stage.run.limits.max_tokens]
    return stage.group(slot, [stage.prefilled(slot, answer)] * stage.run.told.sampling.group_size)


def copied(stage: Stage, slot: int) -> bytes:
    """The completions of another peer for its slot, under the own name."""
    theirs = generate_groups(stage.sampler, [stage.request(slot, sampler=OTHER)])[0]
    return stage.group(slot, list(theirs))


def replayed(stage: Stage, slot: int) -> bytes:
    """Last slot's group once more, as this slot's."""
    before = max(slot - 1, 0) if slot else 1
    return stage.group(slot, stage.draws(before), prompt=stage.request(before).prompt)


def easy_prompt(stage: Stage, slot: int) -> bytes:
    """A prompt of its own choice."""
    easy = stage.request(slot + 7).prompt
    asked = dataclasses.replace(stage.request(slot), prompt=easy)
    return stage.group(slot, list(generate_groups(stage.sampler, [asked])[0]), prompt=easy)


def false_reward(stage: Stage, slot: int) -> bytes:
    draws = stage.draws(slot)
    asked, _ = stage.run.prompt(stage.key(slot))
    honest = [stage.run.score(asked, draw.ids).value for draw in draws]
    return stage.group(slot, draws, rewards=[1.0 - reward for reward in honest])


def inflated(stage: Stage, slot: int) -> bytes:
    """Every completion goes on after its end, up to the limit; or, if it ran to the limit, ends early there."""
    bounds = stage.run.limits
    end = min(bounds.end_tokens)
    draws = []
    for draw in stage.draws(slot):
        ids = draw.ids.tolist()
        if draw.finish == "end":
            filler = next(token for token in range(bounds.vocab_size) if token not in bounds.end_tokens)
            ids = [*ids[:-1], *[filler] * (bounds.max_tokens - len(ids) + 1)]
        else:
            ids = [*ids[:-1], end]
        draws.append(stage.prefilled(slot, ids))
    return stage.group(slot, draws)


def wrong_finish(stage: Stage, slot: int) -> bytes:
    swap = {"end": "length", "length": "end"}
    draws = [dataclasses.replace(draw, finish=swap[draw.finish]) for draw in stage.draws(slot)]
    return stage.group(slot, draws)


def made_up_logprobs(stage: Stage, slot: int) -> bytes:
    luck = np.random.default_rng(slot)
    draws = [
        dataclasses.replace(draw, logprobs=-luck.exponential(1.0, draw.ids.size))
        for draw in stage.draws(slot)
    ]
    return stage.group(slot, draws)


def zero_logprobs(stage: Stage, slot: int) -> bytes:
    draws = [dataclasses.replace(draw, logprobs=np.zeros(draw.ids.size)) for draw in stage.draws(slot)]
    return stage.group(slot, draws)


class WithEngine:
    """A forger that is honest but for the engine: other weights, or another type of them."""

    def __init__(self, make: Callable[[Stage], LocalEngine]) -> None:
        self._make = make
        self._made: dict[int, LocalEngine] = {}

    def __call__(self, stage: Stage, slot: int) -> bytes:
        if id(stage) not in self._made:
            self._made[id(stage)] = self._make(stage)
        return stage.group(slot, stage.draws(slot, self._made[id(stage)]))


FORGERS: dict[str, Callable[[Stage, int], bytes]] = {
    "wrong model": WithEngine(lambda stage: stage.engine(stage.engine_class, noised(stage.newest, 0.3))),
    "older version": WithEngine(lambda stage: stage.engine(stage.engine_class, stage.older)),
    "q4 as f16": WithEngine(lambda stage: stage.engine("llama/q4_0", stage.newest)),
    "temperature 0.8": at_temperature(0.8),
    "temperature 1.2": at_temperature(1.2),
    "top-p 0.9": top_p,
    "greedy": greedy,
    "own luck": without_seed,
    "best of 8": best_of_8,
    "edited": edited,
    "written elsewhere": written_elsewhere,
    "copied": copied,
    "replayed": replayed,
    "wrong prompt": easy_prompt,
    "false reward": false_reward,
    "inflated length": inflated,
    "wrong finish": wrong_finish,
    "made-up log-probabilities": made_up_logprobs,
    "log-probabilities of zero": zero_logprobs,
}
COUNTED_SLOWLY = ("older version",)
"""A step of training apart: too near for a single group."""
