"""Setup for cheating samplers and a verifier: run, heads, engines and checks.

The stage's honest sampler is of one engine class, its judge is torch in float32. It holds nothing
against anybody: who cheats, and how, stands in `forgers`. Tests and `python -m benchmarks.verify`
share it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.forgers_weights import Weights, nudged
from echo_node.contract import load
from echo_node.engine.base import Claim, Draw, SamplingLimits, Scores, SlotRequest, Span, generate_groups
from echo_node.engine.decoder import Decoder
from echo_node.engine.engine_classes import EngineSpec, make_engine
from echo_node.engine.local import LocalEngine
from echo_node.engine.torch_decoder import TorchDecoder
from echo_node.rollouts.admission import Admission, Refused
from echo_node.rollouts.record import RolloutRecord
from echo_node.runs.run import ENGINES, Run, draft
from echo_node.verifier.replay_check import Finding, ReplayCheck
from echo_node.weights.open_store import read_folder
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
from protocol.sampling import probabilities

Pick = Callable[[NDArray[np.float64], int, int], int]
"""Choose a token from the probabilities, the completion's number and the token's."""
ROWS: Final = 16
"""Completions that are drawn at once."""


def identity(name: str) -> Identity:
    return Identity(hashlib.sha256(name.encode()).digest())


TRAINER, SAMPLER, OTHER, HONEST = map(identity, ("trainer", "sampler", "another sampler", "an honest one"))


class WatchedEngine(LocalEngine):
    """Engine that caches its last scoring request."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__(decoder, rows=1)
        self.seen: list[Scores] = []

    def score_many(self, claims: Sequence[Claim], limits: SamplingLimits) -> list[Scores]:
        found = super().score_many(claims, limits)
        self.seen.extend(found)
        return found


class Stage:
    """A run on a model with two heads, the older one step behind."""

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
            pure=True,
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
        names = sorted(each.public for each in (SAMPLER, OTHER, HONEST))
        self.roster = Roster(tuple(Member(key, engine_class, bytes(32)) for key in names))
        self.old_head = self._head(None, 0)
        self.head = self._head(self.old_head, 1)
        self.weights = {self.old_head.id: self.older, self.head.id: self.newest}
        self.sampler = self.engine(engine_class)
        self.sampler.load(self.head.id, self.newest)
        self._others: dict[str, LocalEngine] = {}
        self.together: Sequence[int] = ()
        """Slots that are all drawn when one of them is wanted: many at once are drawn faster."""
        self._drawn: dict[tuple[bytes | None, bytes], list[Draw]] = {}
        self._judge_engine = WatchedEngine(TorchDecoder(folder, device="cpu", threads=threads))
        self._judge = ReplayCheck(self.run, self.at)
        self.admission = self.fresh_admission()

    def engine(self, engine_class: str) -> LocalEngine:
        rows = max(ROWS, self.run.manifest.sampling.group_size)
        return make_engine(EngineSpec(engine_class, self.folder, "cpu", rows, self._threads))

    def other_engine(self, name: str, engine_class: str, make: Callable[[], Weights]) -> LocalEngine:
        """Return an engine with other weights than the run's, one per class."""
        if engine_class not in self._others:
            self._others[engine_class] = self.engine(engine_class)
        engine, wanted = self._others[engine_class], blob_id(name.encode())
        if engine.loaded != wanted:
            engine.load(wanted, make())
        return engine

    def verify(self, sealed: bytes) -> str | None:
        """Why a group is refused or condemned; None if it passes for honest."""
        judged = self.admission.judge(Envelope.parse(sealed))
        if isinstance(judged, Refused):
            return judged.reason
        breach = self.find(judged).breach
        return None if breach is None else breach.reason

    def admit(self, sealed: bytes, *, in_turn: bool = False) -> RolloutRecord:
        """Admit a group by the cheap checks; `in_turn`: after those admitted before it."""
        judged = (self.admission if in_turn else self.fresh_admission()).judge(Envelope.parse(sealed))
        if isinstance(judged, Refused):
            raise ValueError(f"refused: {judged.what}")  # noqa: TRY004 - it is the value that is wrong
        return judged

    def find(self, admitted: RolloutRecord) -> Finding:
        self._judge_engine.seen = []
        found = self._judge.check(admitted)
        assert found is not None
        return found

    @property
    def seen(self) -> list[Scores]:
        """Return the verifier's evidence on the last group, one per completion."""
        return self._judge_engine.seen

    def at(self, head_id: bytes) -> LocalEngine:
        """Return the verifier's engine with the weights of a head."""
        if self._judge_engine.loaded != head_id:
            self._judge_engine.load(head_id, self.weights[head_id])
        return self._judge_engine

    def fresh_admission(self) -> Admission:
        """One that has admitted nothing yet: a group then stands for itself."""
        admission = Admission(self.run)
        for head in (self.old_head, self.head):
            admission.published(head, self.roster)
        return admission

    def close(self) -> None:
        for engine in (self.sampler, self._judge_engine, *self._others.values()):
            engine.close()
        self.run.close()

    # what forgers need

    def key(self, slot: int, head: bytes | None = None, sampler: Identity = SAMPLER) -> bytes:
        return self.run.slot_key(head or self.head.id, sampler.public, slot)

    def request(self, slot: int, head: bytes | None = None, sampler: Identity = SAMPLER) -> SlotRequest:
        return self.requests([slot], head, sampler)[0]

    def requests(
        self, slots: Sequence[int], head: bytes | None = None, sampler: Identity = SAMPLER
    ) -> list[SlotRequest]:
        keys = [self.key(slot, head, sampler) for slot in slots]
        size, limits = self.run.manifest.sampling.group_size, self.run.limits
        return [
            SlotRequest(ids, key, size, limits)
            for key, (_, ids) in zip(keys, self.run.prompts(keys), strict=True)
        ]

    def prepare(self, requests: Sequence[SlotRequest], engine: LocalEngine | None = None) -> None:
        """Draw what is not drawn yet, all at once, and keep it for whoever asks for one of them."""
        engine = engine or self.sampler
        left = [each for each in requests if (engine.loaded, each.slot_key) not in self._drawn]
        for request, draws in zip(left, generate_groups(engine, left), strict=True):
            self._drawn[engine.loaded, request.slot_key] = list(draws)

    def drawn_for(self, request: SlotRequest, engine: LocalEngine | None = None) -> list[Draw]:
        """Return this engine's honest reply to a request."""
        self.prepare([request], engine)
        return self._drawn[(engine or self.sampler).loaded, request.slot_key]

    def draws(self, slot: int, engine: LocalEngine | None = None) -> list[Draw]:
        """Return an honest sampler's completions with this engine."""
        if slot in self.together:
            self.prepare(self.requests(self.together), engine)
        return self.drawn_for(self.request(slot), engine)

    def picked(self, slot: int, pick: Pick) -> list[Draw]:
        """Completions by a sampler's own rule."""
        asked, decoder = self.request(slot), self.sampler._decoder  # noqa: SLF001
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

    def prefilled(self, slot: int, texts: Sequence[list[int]]) -> list[Draw]:
        """Texts from elsewhere, with the log-probabilities that the model gives them."""
        prompt = self.request(slot).prompt
        claims = [Claim(prompt, np.array(ids)) for ids in texts]
        found = self.sampler.score_many(claims, self.run.limits)
        return [self.drawn(ids, scores.logprobs) for ids, scores in zip(texts, found, strict=True)]

    def group(
        self,
        slot: int,
        draws: Sequence[Draw],
        *,
        head: bytes | None = None,
        prompt: NDArray[np.int64] | None = None,
        rewards: list[float] | None = None,
        sampler: Identity = SAMPLER,
    ) -> bytes:
        """Seal a group of these completions."""
        key = self.key(slot, head, sampler)
        asked, ids = self.run.prompt(key)
        given = rewards or [each.value for each in self.run.scores(asked, [draw.ids for draw in draws])]
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
            vocabulary=self.run.manifest.model.vocab_size,
        )
        return seal(group, sampler, self.run.id)

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
