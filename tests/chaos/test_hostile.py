"""The hostile peer does what it says, and a node that it does it to serves others all the same."""

from __future__ import annotations

import json
import random
import secrets
import signal
import subprocess
import sys
from contextlib import ExitStack, closing
from functools import partial

import pytest
import trio

from echo_node.engine.engine_classes import EngineSpec, make_engine
from echo_node.models import embedded
from echo_node.net.base import ACCEPT
from echo_node.net.libp2p import join_swarm
from echo_node.net.swarm_settings import SwarmSettings
from echo_node.rollouts.admission import Admission
from echo_node.rollouts.record import RolloutRecord
from echo_node.runs.spec import MANIFEST
from echo_node.verifier.replay_check import ReplayCheck
from echo_node.weights.open_store import read_folder
from protocol import (
    Envelope,
    Figures,
    Heartbeat,
    Inventory,
    Join,
    Member,
    Receipt,
    Roster,
    TermGrant,
    TrajectoryGroup,
    Verdict,
    WeightsHead,
    decode,
    open_sealed,
    read_batch,
    seal,
    topics,
    write_batch,
)
from protocol.errors import BadSignatureError
from tests.chaos.hostile import KINDS
from tests.chaos.lies import Heard, Liar
from tests.chaos.small_place import HEIR, JUDGE, small_run
from tests.crafting import SAMPLERS, Chain, sealed_group
from tests.swarm.processes import ROOT

LOOPBACK = "/ip4/127.0.0.1/tcp/0"
ANN, BOB = SAMPLERS[:2]
SIGNED = {
    kind.KIND: kind for kind in (TrajectoryGroup, WeightsHead, Verdict, Receipt, Heartbeat, Inventory, Join)
}
DOES = {
    "flood": "gossip sent",
    "forge": "gossip sent",
    "make_up": "groups made up",
    "replay": "gossip sent",
    "half_message": "halves sent",
    "many_streams": "streams never closed",
    "crowd": "idle keys",
    "misdirect": "false addresses pushed",
}


def heard_in(run, count=3):
    """What an honest swarm has said: a chain of heads, and a group under each."""
    chain, said = Chain(run), Heard()
    for slot in range(count):
        head = chain.next(ANN)
        said.hear(topics.HEADS, head.sealed)
        said.hear(topics.GROUPS, write_batch([sealed_group(run, head.id, ANN, slot)]))
    return said


def test_forgeries_are_of_every_cargo_and_not_one_is_properly_signed():
    run = small_run()
    liar = Liar(run, BOB, heard_in(run), random.Random(3))
    made = [liar.forgery() for _ in range(300)]
    assert {cargo for cargo, _ in made} == set(topics.CARGOES)
    for cargo, data in made:
        if cargo == topics.GRANTS:  # nobody signs one as a whole
            with pytest.raises(BadSignatureError):
                decode(TermGrant, data).verify(run.id)
            continue
        sealed = read_batch(data) if cargo in {topics.GROUPS, topics.VERDICTS} else [Envelope.parse(data)]
        for each in sealed:
            assert each.signer != BOB.public, "it is in somebody else's name"
            with pytest.raises(BadSignatureError):
                each.open(SIGNED[each.kind], run.id)


def test_what_it_makes_up_is_let_in_as_a_members_and_condemned_by_whoever_draws_it_again():
    run = small_run()
    head, heard = Chain(run).next(BOB), Heard()
    heard.hear(topics.HEADS, head.sealed)
    liar = Liar(run, BOB, heard, random.Random(3))
    join = open_sealed(liar.join(), Join, run.id)
    admission = Admission(run)
    admission.published(head, Roster((Member(join.signer, join.message.engine, join.id),)))
    made = [each for _ in range(4) for each in read_batch(liar.made_up()[1])]
    admitted = [admission.judge(each) for each in made]
    assert all(isinstance(each, RolloutRecord) for each in admitted), admitted
    with closing(make_engine(EngineSpec("torch/f32", embedded.folder(), "cpu", 16, 1))) as engine:
        engine.load(head.id, read_folder(embedded.folder()))
        judge = ReplayCheck(run, lambda _: engine)
        breaches = [judge.check(each).breach for each in admitted]
    assert all(breach.sure for breach in breaches), breaches


def test_it_knows_when_it_is_found_out_and_takes_nobody_elses_verdict_for_its_own():
    run = small_run()
    liar = Liar(run, BOB, heard_in(run), random.Random(3))
    made = read_batch(liar.made_up()[1])
    figures = Figures(
        contrast=0.0, d_mean=1.0, d_most=1.0, logprob_gap=9.0, reward=None, tokens=8, z_mean=9.0, z_most=9.0
    )

    def said(group, result):
        verdict = Verdict(bytes(64), figures, group, "", "own-luck", result)
        return liar.condemned(write_batch([seal(verdict, JUDGE, run.id)]))

    assert said(made[1].id, "dishonest") == 1
    assert said(made[1].id, "honest") == 0
    assert said(b"g" * 32, "dishonest") == 0
    assert liar.condemned(b"garbage") == 0


def test_the_same_luck_tells_the_same_lies():
    run = small_run()
    one, other = (Liar(run, BOB, heard_in(run), random.Random(3)) for _ in range(2))
    assert [one.garbage() for _ in range(20)] == [other.garbage() for _ in range(20)]
    assert [one.own_groups() for _ in range(3)] == [other.own_groups() for _ in range(3)]
    assert [one.made_up() for _ in range(3)] == [other.made_up() for _ in range(3)]


async def hostile_lines(kind, folder, address, enough):
    """A hostile peer's lines, from its start until it has done enough and was told to stop."""
    words = (
        kind,
        "--state",
        str(folder / kind),
        "--seed",
        address,
        "--run",
        str(folder / "run"),
        "--listen",
        LOOPBACK,
    )
    lines: list[dict] = []
    async with trio.open_nursery() as nursery:
        command = [sys.executable, "-m", "tests.chaos.hostile", *words]
        process = await nursery.start(
            partial(trio.run_process, command, cwd=ROOT, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL)
        )
        rest, told = b"", False
        with trio.fail_after(300):  # eight of them start at once, and give way to everybody
            async for chunk in process.stdout:
                *whole, rest = (rest + chunk).split(b"\n")
                lines += [json.loads(line) for line in whole]
                if enough(lines) and not told:
                    process.send_signal(signal.SIGTERM)
                    told = True  # a second time would end it at once
    assert process.returncode == 0
    return lines


@pytest.mark.timeout(400)
async def test_while_eight_of_them_do_their_worst_an_honest_peer_is_heard_and_answered(tmp_path):
    run = small_run()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / MANIFEST).write_bytes(run.sealed_manifest.sealed)
    did: dict[str, dict] = {}

    async def echo(_peer, data):
        await trio.lowlevel.checkpoint()
        return data

    def look(message):
        open_sealed(message.data, WeightsHead, run.id)
        return ACCEPT

    topic = topics.topic(run.id, topics.HEADS)
    chain = Chain(run)
    async with join_swarm(HEIR, SwarmSettings(listen=(LOOPBACK,))) as victim:
        near = SwarmSettings(listen=(LOOPBACK,), seeds=(victim.addresses[0],))
        with ExitStack() as stack:
            for each in (topics.DELIVER_STREAM, topics.VOTE_STREAM, topics.CHAIN_STREAM):
                stack.enter_context(victim.serve(each, echo, most=1 << 17))
            async with (
                join_swarm(JUDGE, near) as honest,
                victim.subscribe(topic, look) as inbox,
                trio.open_nursery() as nursery,
            ):
                await _met(honest, victim)

                async def attack(kind):
                    enough = partial(_enough, DOES[kind])
                    did[kind] = (await hostile_lines(kind, tmp_path, victim.addresses[0], enough))[-1]

                async def be_heard():
                    """Heads of the honest peer arrive, and its requests are answered."""
                    while len(did) < len(KINDS):
                        head = chain.next(ANN)
                        await honest.publish(topic, head.sealed)
                        token = secrets.token_bytes(16)
                        said = await honest.request(
                            victim.public, topics.CHAIN_STREAM, token, deadline=30, most=16
                        )
                        assert said == token
                        with trio.fail_after(30):
                            while (await inbox.receive()).data != head.sealed:
                                pass
                        await trio.sleep(0.2)
                    nursery.cancel_scope.cancel()

                for kind in KINDS:
                    nursery.start_soon(attack, kind)
                nursery.start_soon(be_heard)
            assert honest.public not in victim.mutes()
            assert victim.public not in honest.mutes()
    for kind, what in DOES.items():
        assert did[kind]["event"] == "stopped"
        assert did[kind][what] > 0, did[kind]


async def _met(one, other):
    with trio.fail_after(60):
        while other.public not in one.peers():  # noqa: ASYNC110 - once, before it begins
            await trio.sleep(0.1)


def _enough(what, lines):
    return any(line.get(what, 0) > 0 for line in lines) and len(lines) >= 4
