"""Runs of `guess-number` with the embedded model that plays it, without a network."""

from __future__ import annotations

import functools
import hashlib

from echo_node.engine.engine_classes import EngineSpec, make_engine
from echo_node.engine.local import LocalEngine
from echo_node.models import embedded
from echo_node.runs.run import Run, read_model
from echo_node.runs.spec import RunSpec, SamplingTable, SyncTable, new_run
from echo_node.sampler.rollout import Rollout
from protocol import Envelope, Identity, TrajectoryGroup, seal
from tests.crafting import Chain

TRAINER = Identity(hashlib.sha256(b"trainer of games").digest())
SAMPLER = Identity(hashlib.sha256(b"sampler of games").digest())
GROUP = 4


@functools.cache
def open_game(*, in_flight: bool = False) -> Run:
    spec = RunSpec(
        name="a game",
        model="embedded-guess",
        contract="guess-number@1",
        trainers=[TRAINER.peer_id],
        sampling=SamplingTable(group_size=GROUP),
        sync=SyncTable(in_flight=in_flight),
    )
    made = new_run(spec, TRAINER, nonce=bytes(32), pure=True)
    return Run.open(made.sealed, embedded.guess_folder(), jailed=False)


def first_head(run: Run):
    """The head of the weights that the run begins with, by the trainer of other tests."""
    return Chain(run).next(SAMPLER)


def engine_of(run: Run, head_id: bytes, engine_class: str = "torch/f32", rows: int = 64) -> LocalEngine:
    engine = make_engine(EngineSpec(engine_class, run.folder, rows=rows, threads=1))
    engine.load(head_id, read_model(run.folder))
    return engine


def drawn_records(run: Run, head, engine, slots: int):
    return Rollout(run, SAMPLER, engine).fill(head, range(slots), lambda: False)


def with_completions(run: Run, record, completions):
    """The same slot with other completions."""
    old = record.message
    made = TrajectoryGroup.of(
        prompt=old.prompt_ids(),
        completions=completions,
        engine=old.engine,
        heads=old.heads,
        slot=old.slot,
        vocabulary=run.manifest.model.vocab_size,
    )
    envelope = Envelope.parse(seal(made, SAMPLER, run.id))
    return type(record).of(envelope, made, record.step, record.prompt)
