"""Status of the demo's nodes from their events: who is up, verdicts, caught cheats, bytes."""

import dataclasses
import io
import json

import pytest
from rich.console import Console

from echo_node.config import DemoConfig
from echo_node.demo.node_status import NodeStatus, bytes_out, caught, verdicts
from echo_node.demo.processes import SwarmDemo, check_together
from echo_node.demo.summary import outcome, summary
from echo_node.demo.view import line, panel
from echo_node.errors import ConfigError
from echo_node.telemetry.metrics import Records, StepRecord, TrainedGroup
from protocol import Identity

TRAINER, HONEST, CHEAT, STRANGER = (Identity(bytes([n]) * 32) for n in range(1, 5))


def member(name: str, role: str, identity: Identity, **more: str) -> NodeStatus:
    return NodeStatus(name, role, identity.public, identity.peer_id, **more)


def a_step(number: int, *samplers: Identity, age: int = 1, size: int = 1000) -> StepRecord:
    groups = tuple(
        TrainedGroup(bytes([n]) * 32, each.public, n, bytes(32), number - 1 - age)
        for n, each in enumerate(samplers)
    )
    figures = {field.name: 0.0 for field in dataclasses.fields(StepRecord) if field.type == "float"}
    return StepRecord(
        **figures | {"reward": 0.5, "at_seconds": float(number)},
        step=number,
        policy_step=number - 1,
        version=number,
        head=bytes(32),
        tokens=100,
        groups=groups,
        dropped={},
        number=number,
        bytes_out=size,
    )


@pytest.fixture
def demo(tmp_path) -> SwarmDemo:
    """A demo of a trainer, a verifier, a sampler and one that cheats, after three steps."""
    made = SwarmDemo(DemoConfig(hostile=True, samplers=1, steps=3), Records(), tmp_path)
    made.members += [
        member("trainer", "trainer", TRAINER),
        member("verifier", "verifier", STRANGER),
        member("sampler-1", "sampler", HONEST, engine="torch/f32"),
        member("cheat-1", "sampler", CHEAT, cheat="luck"),
    ]
    made.records.add(a_step(1, HONEST, CHEAT))
    made.records.add(a_step(2, HONEST, HONEST))
    made.records.add(a_step(3, HONEST, HONEST, age=2))
    return made


def shown(demo: SwarmDemo) -> str:
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(panel(demo))
    return console.export_text()


def test_a_sampler_is_up_when_the_roster_has_it_and_others_when_they_can_be_reached():
    sampler, trainer = member("sampler-1", "sampler", HONEST), member("trainer", "trainer", TRAINER)
    for each in (sampler, trainer):
        assert not each.is_up
        each.update({"event": "listening", "addresses": ["/ip4/127.0.0.1/tcp/1"]})
    assert trainer.is_up
    assert not sampler.is_up
    sampler.update({"event": "joined", "version": 0})
    assert sampler.is_up


def test_what_is_not_told_anew_stays_as_it_was():
    trainer = member("trainer", "trainer", TRAINER)
    trainer.update({"event": "progress", "peers": 4, "version": 7, "muted": {CHEAT.peer_id: "wrong-reward"}})
    trainer.update({"event": "progress", "peers": 3, "version": None})
    trainer.update({"event": "something newer", "peers": 9})
    assert (trainer.peers, trainer.version) == (3, 7)
    assert trainer.muted == {CHEAT.peer_id: "wrong-reward"}, "who was caught once is not forgotten"


def test_who_is_muted_is_caught_with_its_name_its_reason_and_what_was_learnt_from_it(demo):
    demo.members[0].update({"event": "progress", "muted": {CHEAT.peer_id: "luck-not-its-own"}})
    (found,) = caught(demo)
    assert (found.member.name, found.trained) == ("cheat-1", 1)
    assert "did not draw with the slot's seed" in found.words
    assert "caught" in shown(demo)
    told = summary(demo, None)
    assert "Caught: cheat-1" in told
    assert "Not caught" not in told
    assert outcome(demo)["caught"] == outcome(demo)["cheats"] == 1
    assert outcome(demo)["honest_muted"] == 0


def test_a_cheat_that_is_not_caught_is_said_so_and_an_honest_one_that_is_muted_counts(demo):
    demo.members[0].update({"event": "progress", "muted": {HONEST.peer_id: "some new reason"}})
    assert "Not caught so far: cheat-1" in summary(demo, None)
    assert caught(demo)[0].words == "some new reason"
    assert (outcome(demo)["caught"], outcome(demo)["honest_muted"]) == (0, 1)
    json.dumps(outcome(demo))


def test_verdicts_and_bytes_are_counted_over_everybody_and_every_step(demo):
    demo.members[1].update({"event": "progress", "verdicts": {"honest": 30, "wrong-reward": 2}})
    assert verdicts(demo) == {"honest": 30, "wrong-reward": 2}
    demo.records.add(a_step(4, HONEST, size=0))
    assert bytes_out(demo) == (3000, 3 * demo.model_bytes), "a step without a version sent nothing"
    assert demo.model_bytes > 500_000
    assert "32 groups: 30 honest, 2 wrong-reward" in summary(demo, None)
    assert "verdicts 30 honest, 2 wrong-reward" in line(demo)


def test_every_line_but_the_longest_fits_80_columns(demo):
    found = {"honest": 30_000, "luck-not-its-own": 40, "token-out-of-reach": 50}
    demo.members[1].update({"event": "progress", "verdicts": found})
    demo.members[0].update({"event": "progress", "peers": 99, "muted": {CHEAT.peer_id: "token-out-of-reach"}})
    for row in (*line(demo).splitlines(), *summary(demo, "p.png").splitlines()):
        assert len(row) <= 80 or row.startswith(("In ", "1 samplers")), row
    assert all(len(row) <= 80 for row in shown(demo).splitlines())


def test_cheats_need_a_verifier_and_so_processes():
    check_together(DemoConfig(hostile=True))
    with pytest.raises(ConfigError, match="has no verifier"):
        check_together(DemoConfig(hostile=True, in_memory=True))
