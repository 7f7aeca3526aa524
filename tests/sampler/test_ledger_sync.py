"""A sampler's own ledger: groups, receipts and verdicts are recorded and survive a restart."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from echo_node.credit.ledger import Ledger
from echo_node.engine.engine_classes import EngineSpec, make_engine
from echo_node.models import embedded
from echo_node.net.memory import MemorySwarm
from echo_node.node import Node
from echo_node.sampler import ledger_sync as room
from echo_node.sampler.ledger_sync import LedgerSync
from echo_node.telemetry.metrics import Records
from protocol import Envelope, Figures, Receipt, Refusal, Verdict, seal, topics, write_batch
from protocol.verdict import sign_draw
from tests.crafting import (
    SAMPLERS,
    STRANGER,
    TRAINER,
    Chain,
    changed_run,
    group,
    identity,
    open_run,
    sealed_group,
)
from tests.records import sealed_record

VERIFIERS = tuple(identity(f"verifier {n}") for n in range(2))
RUN = changed_run(open_run(), verifiers=tuple(each.public for each in VERIFIERS))
ANN, BOB = SAMPLERS[:2]
FIGURES = Figures(
    contrast=0.0, d_mean=0.0, d_most=0.0, logprob_gap=0.0, reward=None, tokens=8, z_mean=0.0, z_most=0.0
)


def verdict(about: bytes, verifier, result="honest") -> bytes:
    reason = "honest" if result == "honest" else "own-luck"
    draw = sign_draw(verifier, RUN.id, about)
    return seal(Verdict(draw, FIGURES, about, "", reason, result), verifier, RUN.id)


async def until(holds, seconds=100):
    with trio.fail_after(seconds):
        while not holds():  # noqa: ASYNC110 - sums are plain data and have no event
            await trio.sleep(0.02)


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr(room, "SUM_SECONDS", 0.0)


async def test_what_was_made_taken_refused_and_judged_is_summed_and_kept(tmp_path):
    head = Chain(RUN).next(ANN, BOB)
    mine = [sealed_group(RUN, head.id, ANN, slot) for slot in range(5)]
    ids = [Envelope.parse(each).id for each in mine]
    others = Envelope.parse(sealed_group(RUN, head.id, BOB, 0)).id
    each = group(RUN, head.id, ANN, 0).token_count
    receipt = Receipt(
        accepted=b"".join((*ids[:3], others)),
        head=head.id,
        rate=None,
        refused=(Refusal("stale", ids[4]),),
        term=1,
        version=0,
    )
    one = VERIFIERS[0]
    told = {"tokens": each, "groups": 1, "condemned": 1, "refused": {"stale": 1}, "admitted": 1}
    with Ledger(tmp_path / "ledger") as ledger:
        account = LedgerSync(RUN, ANN, ledger)
        async with (
            MemorySwarm() as swarm,
            swarm.join(ANN) as network,
            swarm.join(one) as verifier,
            swarm.join(STRANGER) as stranger,
            trio.open_nursery() as nursery,
        ):
            await account.record([sealed_record(each) for each in mine], head)
            await account.receipt(receipt)
            nursery.start_soon(account.work, network)
            await trio.testing.wait_all_tasks_blocked()
            topic = topics.topic(RUN.id, topics.VERDICTS)
            await stranger.publish(topic, write_batch([verdict(ids[2], STRANGER)]))
            found = [verdict(ids[1], who, "dishonest") for who in VERIFIERS]
            for said in (verdict(others, one), verdict(ids[0], one), *found):
                await verifier.publish(topic, write_batch([said]))
            await until(lambda: account.status() == told)
            nursery.cancel_scope.cancel()
        assert ledger.state(others) is None, "what others made is theirs to count"
    with Ledger(tmp_path / "ledger") as ledger:
        assert LedgerSync(RUN, ANN, ledger).status() == told
        assert LedgerSync(RUN, BOB, ledger).status()["groups"] == 0, "it belongs to the key"


@pytest.mark.parametrize("mode", ["sequential", "async"])
@pytest.mark.timeout(300)
async def test_a_sampler_that_is_started_again_has_the_credit_that_it_had(mode, tmp_path):
    run = open_run(mode)
    engine = make_engine(EngineSpec("torch/f32", embedded.folder(), "cpu", 64, 1))
    known = 0
    async with MemorySwarm() as swarm, trio.open_nursery() as nursery:
        nursery.start_soon(lambda: Node(run, TRAINER, swarm.join).train(10_000, records=Records()))
        for _life in range(2):
            node = Node(run, ANN, swarm.join, folder=tmp_path)
            async with trio.open_nursery() as life:
                life.start_soon(lambda node=node: node.sample(slots_per_call=4, engine=engine))
                await until(lambda node=node: node.status())
                assert node.status()["credit"]["admitted"] >= known, "before anything new is heard"
                await until(lambda node=node, known=known: node.status()["credit"]["admitted"] > known)
                known = node.status()["credit"]["admitted"]
                life.cancel_scope.cancel()
        nursery.cancel_scope.cancel()
    engine.close()
