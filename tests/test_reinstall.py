"""A lost machine: the paper backup alone restores identity and credit."""

from __future__ import annotations

import shutil

import pytest
import trio
from typer.testing import CliRunner

from echo_node.cli.keys import app
from echo_node.control import formatting
from echo_node.credit import statement_server
from echo_node.credit.ledger import Ledger
from echo_node.engine.engine_classes import EngineSpec, make_engine
from echo_node.models import embedded
from echo_node.net.memory import MemorySwarm
from echo_node.node import Node
from echo_node.runtime.pause_gate import PERSON, PauseGate
from echo_node.storage.state_dir import prepared
from echo_node.telemetry.metrics import Records
from echo_node.telemetry.snapshot import Snapshot
from tests.crafting import TRAINER, changed_run, identity, open_run

VERIFIER = identity("verifier")
RUN = changed_run(open_run(), verifiers=(VERIFIER.public,))


def keys(*said):
    done = CliRunner().invoke(app, [str(word) for word in said])
    assert done.exit_code == 0, done.output


def engine():
    return make_engine(EngineSpec("torch/f32", embedded.folder(), "cpu", 64, 1))


async def until(holds, seconds=200):
    with trio.fail_after(seconds):
        while not holds():  # noqa: ASYNC110 - a status is plain data and has no event
            await trio.sleep(0.02)


def credit_row(node) -> str:
    snapshot = Snapshot().snapshot() | {"phase": "working", "progress": dict(node.status())}
    return dict(formatting.rows(snapshot))["credit"]


@pytest.mark.timeout(500)
async def test_a_reinstall_with_the_backup_keeps_identity_and_credit(tmp_path, monkeypatch):
    monkeypatch.setattr(statement_server, "SAME_SECONDS", 0.0)  # nobody reinstalls a machine within seconds
    home, paper, secret = tmp_path / "home", tmp_path / "paper", tmp_path / "secret"
    secret.write_text("four words of mine\n")
    keys("show", "--state", home)
    keys("backup", "--state", home, "--out", paper, "--passphrase-file", secret)
    drawing, judging = engine(), engine()
    with Ledger(tmp_path / "ledger") as ledger:
        async with MemorySwarm() as swarm, trio.open_nursery() as others:
            trainer = Node(RUN, TRAINER, swarm.join)
            others.start_soon(lambda: trainer.train(10_000, records=Records()))
            others.start_soon(lambda: Node(RUN, VERIFIER, swarm.join).verify(engine=judging, ledger=ledger))

            me = prepared(home).identity()
            node = Node(RUN, me, swarm.join, folder=prepared(home).run(RUN.id))
            async with trio.open_nursery() as life:
                life.start_soon(lambda: node.sample(slots_per_call=4, engine=drawing))
                await until(lambda: node.status().get("credit", {}).get("tokens"))
                await until(lambda: trainer.status().get("batches"))
                life.cancel_scope.cancel()
            earned = ledger.credit(me.public, RUN.id)
            assert earned.tokens >= node.status()["credit"]["tokens"] > 0

            shutil.rmtree(home)
            keys("restore", paper, "--state", home, "--passphrase-file", secret)
            gate = PauseGate()
            gate.close(PERSON)  # so that nothing new is earned, and what is shown is what was
            again = Node(
                RUN, prepared(home).identity(), swarm.join, folder=prepared(home).run(RUN.id), gate=gate
            )
            async with trio.open_nursery() as life:
                life.start_soon(lambda: again.sample(slots_per_call=4, engine=drawing))
                await until(lambda: again.status().get("credit", {}).get("attested", {}).get("tokens"))
                await until(lambda: again.status()["credit"]["attested"]["learnt"])
                told = again.status()["credit"]
                assert again.peer_id == node.peer_id
                assert told["tokens"] == told["groups"] == 0, "its own count begins anew"
                assert told["attested"]["tokens"] >= earned.tokens
                said = (
                    f"{told['attested']['tokens']:,} verified tokens in {told['attested']['groups']:,} groups"
                )
                assert credit_row(again).startswith(f"{said}, as a verifier attests")
                life.cancel_scope.cancel()
            others.cancel_scope.cancel()

        async with MemorySwarm() as empty, trio.open_nursery() as life:
            alone = Node(RUN, me, empty.join, folder=prepared(home).run(RUN.id))
            life.start_soon(lambda: alone.sample(slots_per_call=4, engine=drawing))
            await until(lambda: "credit" in alone.status())
            assert alone.status()["credit"]["attested"] == told["attested"], "a restart needs nobody for it"
            life.cancel_scope.cancel()
    for each in (drawing, judging):
        each.close()
