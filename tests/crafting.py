"""A real run of the embedded model, and hand-written groups for it, sealed by real keys."""

from __future__ import annotations

import dataclasses
import functools
import hashlib

import numpy as np

from echo_node.config import DemoConfig
from echo_node.demo.swarm import Demo
from echo_node.models import embedded
from echo_node.runs.run import Run
from echo_node.telemetry.metrics import Records
from protocol import (
    ZERO,
    Completion,
    Envelope,
    Identity,
    Member,
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

ENGINE = "torch/f32"
END = 12


def identity(name: str) -> Identity:
    return Identity(hashlib.sha256(name.encode()).digest())


SAMPLERS = tuple(sorted((identity(f"sampler {n}") for n in range(4)), key=lambda one: one.public))
STRANGER = identity("stranger")
TRAINER = Demo(DemoConfig(), Records())._identity("trainer")


@functools.cache
def open_run(mode: str = "async", staleness: int = 2, group_size: int = 2) -> Run:
    """A run of the digits task with small groups."""
    config = DemoConfig(mode=mode, staleness=staleness, group_size=group_size, batch_groups=4)
    return Demo(config, Records())._open_run(jailed=False)


def changed_run(run: Run, **changes) -> Run:
    """The same run with another manifest, sealed and opened again."""
    return Run.open(
        seal(dataclasses.replace(run.manifest, **changes), TRAINER, ZERO), embedded.folder(), jailed=False
    )


def roster(*samplers: Identity, engine: str = ENGINE) -> Roster:
    keys = sorted(sampler.public for sampler in samplers)
    return Roster(tuple(Member(key, engine, bytes(32)) for key in keys))


class Chain:
    """Heads of a run, one for each step. What weights they stand for is of no interest here."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._tip = None

    def next(self, *samplers: Identity, step: int | None = None, term: int = 1):
        tip, run = self._tip, self._run
        head = WeightsHead(
            groups=merkle_root([]),
            layout=run.rules.layout,
            luck=bytes(32),
            previous=tip.id if tip else ZERO,
            root=run.rules.root,
            roster=blob_id(encode(roster(*samplers))),
            routes=(Route(base=None, codec="safetensors", size=1, table=bytes(32)),),
            step=step if step is not None else tip.message.step + 1 if tip else 0,
            term=term,
            version=tip.message.version + 1 if tip else 0,
        )
        self._tip = open_sealed(seal(head, TRAINER, run.id), WeightsHead, run.id)
        return self._tip


def completion(ids, finish: str = "end", reward: float = 1.0) -> Completion:
    row = np.array(ids, dtype=np.int64)
    return Completion(row, np.full(len(row), -0.5), finish, reward, (Stretch(0, len(row), 0),))


def right_answer(run: Run, head_id: bytes, sampler: bytes, slot: int) -> Completion:
    prompt, _ = run.prompt(run.slot_key(head_id, sampler, slot))
    return completion([*run.tokenizer.encode(run.contract.answer(prompt)), END])


def group(run: Run, head_id: bytes, sampler: Identity, slot: int, completions=None) -> TrajectoryGroup:
    """What an honest sampler with a perfect model would say."""
    _, ids = run.prompt(run.slot_key(head_id, sampler.public, slot))
    size = run.manifest.sampling.group_size
    return TrajectoryGroup.of(
        prompt=ids,
        completions=completions or [right_answer(run, head_id, sampler.public, slot)] * size,
        engine=ENGINE,
        heads=(head_id,),
        slot=slot,
        vocabulary=run.manifest.model.vocab_size,
    )


def sealed_group(
    run: Run, head_id: bytes, sampler: Identity, slot: int, completions=None, **changes
) -> bytes:
    """An honest group with these fields changed after the fact, under the sampler's own seal."""
    made = group(run, head_id, sampler, slot, completions)
    return seal(dataclasses.replace(made, **changes), sampler, run.id)


def envelope(*args, **changes) -> Envelope:
    return Envelope.parse(sealed_group(*args, **changes))


def forged(sealed: bytes) -> bytes:
    """The same message under a signature that is not its signer's."""
    return sealed[:-1] + bytes([sealed[-1] ^ 1])
