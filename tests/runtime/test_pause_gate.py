"""When a node works and when it waits."""

from __future__ import annotations

import hashlib
import logging

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from echo_node.contract import load
from echo_node.engine.engine_classes import EngineSpec, make_engine
from echo_node.models import embedded
from echo_node.net.memory import MemorySwarm
from echo_node.node import Node
from echo_node.runs.run import Run, draft
from echo_node.runtime import pause_gate
from echo_node.runtime.pause_gate import BATTERY, PERSON, PauseGate, is_on_battery, watch_battery
from echo_node.telemetry.metrics import Records
from echo_node.telemetry.snapshot import Snapshot
from protocol import Identity
from protocol.manifest import Sampling, Sync


async def test_it_is_open_once_nobody_has_a_reason_against_it():
    gate, passed = PauseGate(), []

    async def pass_through():
        await gate.wait_open()
        passed.append(gate.reasons)

    async with trio.open_nursery() as nursery:
        gate.close(PERSON)
        gate.close(BATTERY)
        gate.close(PERSON)
        nursery.start_soon(pass_through)
        await wait_all_tasks_blocked()
        gate.open(PERSON)
        await wait_all_tasks_blocked()
        assert (passed, gate.is_open, gate.reasons) == ([], False, (BATTERY,))
        gate.open(BATTERY)
    assert passed == [()]
    assert gate.is_open
    await gate.wait_open()


async def test_who_was_let_through_and_comes_again_waits_again():
    gate = PauseGate()
    gate.close(PERSON)
    gate.open(PERSON)
    gate.close(PERSON)
    with trio.move_on_after(0) as waiting:
        await gate.wait_open()
    assert waiting.cancelled_caught


def test_the_board_hears_of_it_once_for_each_change():
    board = Snapshot()
    gate = PauseGate(lambda event, words, /, **more: board.record(event, words, more))
    gate.close("a reason\x1b[2J of somebody's")
    assert board.snapshot()["phase"] == "paused"
    gate.close(BATTERY)
    gate.open("never given")
    gate.open("a reason\x1b[2J of somebody's")
    assert board.snapshot()["phase"] == "paused"
    gate.open(BATTERY)
    assert board.snapshot()["phase"] == "working"
    said = [line["words"] for line in board.snapshot()["log"]]
    assert said == [
        r"paused (a reason\x1b[2J of somebody's)",
        r"paused (a reason\x1b[2J of somebody's, battery)",
        "still paused (battery)",
        "resumed",
    ]


def test_reasons_do_not_pile_up_without_end():
    gate = PauseGate()
    for number in range(1000):
        gate.close(str(number))
    assert len(gate.reasons) == pause_gate.MOST_REASONS


# Power


def supply(folder, name, **told):
    (folder / name).mkdir(parents=True, exist_ok=True)
    for file, text in told.items():
        (folder / name / file).write_text(text + "\n")


@pytest.mark.parametrize(
    ("supplies", "on_battery"),
    [
        ({}, False),
        ({"AC": {"type": "Mains", "online": "1"}}, False),
        ({"AC": {"type": "Mains", "online": "0"}}, False),
        ({"BAT0": {"type": "Battery", "status": "Discharging"}}, True),
        ({"BAT0": {"type": "Battery", "status": "Full"}}, False),
        (
            {"BAT0": {"type": "Battery", "status": "Discharging"}, "AC": {"type": "Mains", "online": "1"}},
            False,
        ),
        ({"BAT0": {"type": "Battery", "status": "Unknown"}, "AC": {"type": "Mains", "online": "0"}}, True),
        ({"BAT0": {"type": "Battery", "status": "Charging"}, "usb": {"type": "USB", "online": "1"}}, False),
        ({"mouse": {"type": "Battery", "status": "Discharging", "scope": "Device"}}, False),
        ({"BAT0": {"type": "Battery"}}, False),
        ({"odd": {}}, False),
    ],
)
def test_whether_it_lives_on_its_battery(tmp_path, supplies, on_battery):
    for name, told in supplies.items():
        supply(tmp_path, name, **told)
    assert is_on_battery(tmp_path) is on_battery


def test_a_machine_that_says_nothing_of_its_power_has_enough(tmp_path):
    assert not is_on_battery(tmp_path / "nowhere")


async def test_it_pauses_on_battery_and_goes_on_when_it_is_plugged_in(tmp_path):
    told, heard = trio.open_memory_channel(10)
    gate = PauseGate(lambda event, _words, /, **_more: told.send_nowait(event))
    supply(tmp_path, "BAT0", type="Battery", status="Discharging")
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: watch_battery(gate, folder=tmp_path, every=0.01))
            assert (await heard.receive(), gate.reasons) == ("paused", (BATTERY,))
            supply(tmp_path, "AC", type="Mains", online="1")
            assert (await heard.receive(), gate.reasons) == ("resumed", ())
            nursery.cancel_scope.cancel()


# Nodes


def identity(name):
    return Identity(hashlib.sha256(name.encode()).digest())


TRAINER, SAMPLER, VERIFIER = map(identity, ("trainer", "sampler", "verifier"))


@pytest.fixture(params=["async", "sequential"])
def run(request):
    sealed = draft(
        name="paused",
        folder=embedded.folder(),
        contract=load("digits-reverse", "1"),
        params={},
        pure=True,
        algorithm={"batch_groups": 4},
        sampling_=Sampling(group_size=2, max_prompt=7, max_tokens=6, temperature=1.0),
        sync=Sync(
            async_from=0 if request.param == "async" else None, head_every=1, in_flight=False, staleness=4
        ),
        author=TRAINER,
        trainers=[TRAINER.public],
        verifiers=[VERIFIER.public],
        nonce=bytes(32),
    )
    opened = Run.open(sealed, embedded.folder(), jailed=False)
    yield opened
    opened.close()


class Counted:
    """An engine, and how often it was used."""

    def __init__(self):
        self._engine = make_engine(EngineSpec("torch/f32", embedded.folder(), "cpu", 64, 1))
        self.calls = 0

    def __getattr__(self, name):
        if name in {"generate", "score_many"}:
            self.calls += 1
        return getattr(self._engine, name)


class ClosingAfter:
    """A writer of records that closes a gate at a step."""

    def __init__(self, step, gate):
        self.step, self.gate, self.reached = step, gate, trio.Event()

    def write(self, record):
        if record.step == self.step:
            self.gate.close(PERSON)
            self.reached.set()

    def close(self):
        return


async def until(met):
    while not met():  # noqa: ASYNC110 - a node's status is looked at, and tells nobody
        await trio.sleep(0.01)


async def test_a_paused_sampler_stays_in_the_swarm_and_draws_nothing(run, monkeypatch, caplog):
    monkeypatch.setattr("echo_node.trainer.batch_source.NOBODY_SECONDS", 0.05)
    caplog.set_level(logging.WARNING)
    gate, engine, records = PauseGate(), Counted(), Records()
    gate.close(PERSON)
    async with MemorySwarm() as swarm, trio.open_nursery() as nursery:
        sampler, trainer = Node(run, SAMPLER, swarm.join, gate=gate), Node(run, TRAINER, swarm.join)
        nursery.start_soon(lambda: sampler.sample(slots_per_call=4, engine=engine))
        nursery.start_soon(lambda: trainer.train(2, records=records))
        with trio.fail_after(60):
            await until(lambda: sampler.status().get("joined") and sampler.status()["version"] >= 2)
            assert sampler.status()["paused"] == [PERSON]
            assert sampler.status()["engine_version"] is None
            assert sampler.status()["first"] == {}
            assert (engine.calls, records.steps) == (0, []), "heads come and go, and it draws under none"
            if run.manifest.sync.async_from is None:
                assert "this sampler is paused (person)" in caplog.text
            gate.open(PERSON)
            await until(lambda: len(records.steps) == 2)
        assert engine.calls >= 1
        assert sampler.status()["paused"] == []
        assert sampler.status()["engine_version"] is not None
        with trio.fail_after(60):
            await until(lambda: "accepted" in sampler.status()["first"])
        assert sampler.status()["first"]["weights"] <= sampler.status()["first"]["accepted"]
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("run", ["async"], indirect=True)
async def test_a_paused_trainer_takes_no_step_and_a_paused_verifier_looks_at_nothing(run):
    training, judging = PauseGate(), PauseGate()
    pausing_after_two = ClosingAfter(2, training)
    records, judge = Records(writers=[pausing_after_two]), Counted()
    judging.close(PERSON)
    async with MemorySwarm() as swarm, trio.open_nursery() as nursery:
        verifier = Node(run, VERIFIER, swarm.join, gate=judging)
        trainer = Node(run, TRAINER, swarm.join, gate=training)
        nursery.start_soon(lambda: verifier.verify(engine=judge))
        nursery.start_soon(lambda: Node(run, SAMPLER, swarm.join).sample(slots_per_call=4, engine=Counted()))
        nursery.start_soon(lambda: trainer.train(4, records=records))
        with trio.fail_after(60):
            await pausing_after_two.reached.wait()
            await until(lambda: trainer.status()["waiting"] >= 8)  # two whole batches lie there
            assert trainer.status()["paused"] == [PERSON]
            assert len(records.steps) == 2
            assert (judge.calls, verifier.status()["paused"]) == (0, [PERSON])
            judging.open(PERSON)
            training.open(PERSON)
            await until(lambda: len(records.steps) == 4 and verifier.verdicts["honest"])
        assert judge.calls
        nursery.cancel_scope.cancel()
