"""The demo's cheats: their groups pass every cheap check, and one check with a model fails them."""

from contextlib import closing

import pytest

from echo_node.demo.cheat import WAYS, CheatingEngine
from echo_node.demo.processes import CHEATS
from echo_node.engine.base import never
from echo_node.engine.engine_classes import EngineSpec, make_engine
from echo_node.rollouts.admission import Admission
from echo_node.rollouts.record import RolloutRecord
from echo_node.runs.run import read_model
from echo_node.sampler.rollout import Rollout
from echo_node.verifier.replay_check import ReplayCheck
from protocol import Envelope
from tests.crafting import SAMPLERS, Chain, open_run, roster

SLOTS = 4
SAMPLER = SAMPLERS[0]


@pytest.fixture(scope="module")
def stage():
    """A run, a head of its start, and an engine that holds it."""
    run = open_run(group_size=8)
    head = Chain(run).next(SAMPLER)
    with closing(make_engine(EngineSpec("torch/f32", run.folder, rows=16, threads=1))) as engine:
        engine.load(head.id, read_model(run.folder))
        yield run, head, engine


def fill(run, head, engine):
    """Groups as a sampler with this engine sends them, and as a trainer admits them."""
    groups = Rollout(run, SAMPLER, engine).fill(head, range(SLOTS), never)
    admission = Admission(run)
    admission.published(head, roster(SAMPLER))
    return [admission.judge(Envelope.parse(group.sealed)) for group in groups]


@pytest.mark.parametrize("way", WAYS)
def test_a_cheat_is_admitted_earns_more_and_is_condemned_by_one_look(stage, way):
    run, head, honest = stage
    groups = fill(run, head, CheatingEngine(run, honest, way))
    fair = fill(run, head, honest)
    assert all(isinstance(each, RolloutRecord) for each in (*groups, *fair))

    def worth(several):
        return sum(sum(each.message.rewards) for each in several)

    assert worth(groups) > worth(fair), "which is why somebody would cheat"
    judge = ReplayCheck(run, lambda _head: honest)
    breaches = [judge.check(each).breach for each in groups]
    assert all(breach is not None and breach.sure for breach in breaches)
    assert all(judge.check(each).breach is None for each in fair)


def test_the_demo_shows_every_way():
    assert set(CHEATS.values()) == set(WAYS)
