"""Sealed groups are parsed once in a node, whatever its role."""

from __future__ import annotations

from collections import Counter

import pytest
import trio

from echo_node.config import DemoConfig
from echo_node.demo.swarm import Demo
from echo_node.net.base import ACCEPT, Message
from echo_node.rollouts.admission import Admission
from echo_node.rollouts.gossip_validation import GossipValidator
from echo_node.telemetry.metrics import Records
from protocol import Envelope, TrajectoryGroup, envelope, topics, write_batch
from tests.crafting import SAMPLERS, Chain, open_run, roster, sealed_group

ANN, BOB = SAMPLERS[:2]


@pytest.fixture
def parses(monkeypatch) -> Counter[bytes]:
    """How many times each sealed group was parsed."""
    count: Counter[bytes] = Counter()
    parse = Envelope.parse.__func__

    def counted(cls, sealed):
        found = parse(cls, sealed)
        if found.kind == TrajectoryGroup.KIND:
            count[sealed] += 1
        return found

    monkeypatch.setattr(envelope.Envelope, "parse", classmethod(counted))
    return count


@pytest.mark.parametrize("mode", ["async", "sequential"])
def test_a_sampler_parses_none_of_its_groups_and_a_trainer_each_of_them_once(mode, parses, monkeypatch):
    config = DemoConfig(steps=2, samplers=1, batch_groups=4, group_size=4, mode=mode, engine="torch/f32")
    demo = Demo(config, Records())
    monkeypatch.setattr(demo, "_open_run", lambda: Demo._open_run(demo, jailed=False))
    trio.run(demo.play)
    assert len(demo.records.steps) == 2
    assert set(parses.values()) == {1}, "one node received them, and the other made them"


def test_what_a_verifier_or_a_standby_takes_was_parsed_by_its_gossip_validator(parses):
    run = open_run()
    head = Chain(run).next(ANN, BOB)
    admission = Admission(run)
    admission.published(head, roster(ANN, BOB))
    validator = GossipValidator(run, admission)
    sealed = [sealed_group(run, head.id, ANN, slot) for slot in range(3)]
    message = Message(topics.topic(run.id, topics.GROUPS), write_batch(sealed), BOB.public)
    validation, _ = validator.validate(message)
    assert validation is ACCEPT
    assert [group.sealed for group in validator.take(message.data)] == sealed
    assert parses == dict.fromkeys(sealed, 1)
    assert [group.sealed for group in validator.take(message.data)] == sealed, "one that was not kept"
    assert set(parses.values()) == {2}
