"""Credit statements about a sampler: who is asked and believed, how often, and what is kept."""

from __future__ import annotations

import dataclasses
from contextlib import AsyncExitStack

import pytest
import trio
import trio.testing

from echo_node.credit import statement_client as room
from echo_node.credit.statement_client import StatementClient
from echo_node.credit.statement_server import Sums, serve_statements
from echo_node.net.base import RequestError
from echo_node.net.memory import MemorySwarm
from protocol import ZERO, CreditRefusal, CreditStatement, limits, seal, topics, write_batch
from tests.crafting import SAMPLERS, STRANGER, TRAINER, changed_run, identity, open_run
from tests.net.conftest import libp2p

VERIFIERS = tuple(identity(f"verifier {n}") for n in range(3))
ONE, TWO, THREE = VERIFIERS
RUN = changed_run(open_run(), verifiers=tuple(each.public for each in VERIFIERS))
ANN, BOB = SAMPLERS[:2]
NOTHING = {"tokens": 0, "groups": 0, "learnt": 0, "by": []}
STATEMENT = CreditStatement(
    at_ms=2_000,
    condemned=1,
    learnt=0,
    refused=(),
    sampler=ANN.public,
    since_ms=1_000,
    tokens=500,
    verified=5,
)


def statement(**changes) -> CreditStatement:
    return dataclasses.replace(STATEMENT, **changes)


class Teller:
    """A peer that answers on the stream of credit, whatever it is told to, and counts who asks."""

    def __init__(self, who, *, tells=None, sealed=None, silent=False, serves=True) -> None:
        self.who = who
        self.tells = tells
        self.sealed = sealed
        self.silent = silent
        self.serves = serves
        self.asked = 0

    async def answer(self, _peer, _asked) -> bytes:
        await trio.lowlevel.checkpoint()
        self.asked += 1
        if self.silent:
            await trio.sleep_forever()
        return self.sealed if self.sealed is not None else seal(self.tells, self.who, RUN.id)


async def status_after(*tellers, to=ANN, file, seconds=100.0):
    """What a sampler shows once these have been asked; and how it scores them."""
    account = StatementClient(RUN, to, file)
    async with AsyncExitStack() as stack:
        swarm = await stack.enter_async_context(MemorySwarm())
        for each in tellers:
            network = await stack.enter_async_context(swarm.join(each.who))
            if each.serves:
                stack.enter_context(network.serve(topics.CREDIT_STREAM, each.answer, most=32))
        me = await stack.enter_async_context(swarm.join(to))
        nursery = await stack.enter_async_context(trio.open_nursery())
        nursery.start_soon(account.work, me)
        await trio.sleep(seconds)
        scores = me.scores()
        nursery.cancel_scope.cancel()
    return account.status(), scores


async def test_the_most_that_one_verifier_attests_is_told_and_nothing_is_added_up(tmp_path, autojump_clock):  # noqa: ARG001 - it jumps
    refused = (CreditRefusal("stale", 2),)
    status, scores = await status_after(
        Teller(ONE, tells=statement()),
        Teller(TWO, tells=statement(tokens=700, verified=6)),
        Teller(TRAINER, tells=statement(tokens=0, verified=0, learnt=40, condemned=0, refused=refused)),
        file=tmp_path / "attested",
    )
    assert (status["tokens"], status["groups"], status["learnt"]) == (700, 6, 40)
    by = {each["peer_id"]: each for each in status["by"]}
    assert by[ONE.peer_id] == {
        "peer_id": ONE.peer_id,
        "role": "verifier",
        "tokens": 500,
        "groups": 5,
        "learnt": 0,
        "condemned": 1,
        "refused": {},
        "since": 1.0,
        "at": 2.0,
    }
    assert by[TRAINER.peer_id]["refused"] == {"stale": 2}
    assert set(by) == {ONE.peer_id, TWO.peer_id, TRAINER.peer_id}, "who is not there has said nothing"
    assert not scores


async def test_what_is_not_a_signers_to_say_does_not_count(tmp_path, autojump_clock):  # noqa: ARG001 - it jumps
    status, _ = await status_after(
        Teller(TRAINER, tells=statement(tokens=10**9, verified=10**6, learnt=3)),
        Teller(ONE, tells=statement(learnt=10**9)),
        file=tmp_path / "attested",
    )
    assert (status["tokens"], status["groups"], status["learnt"]) == (500, 5, 3)


async def test_a_stranger_is_neither_asked_nor_believed(tmp_path, autojump_clock):  # noqa: ARG001 - it jumps
    file = tmp_path / "attested"
    much = statement(tokens=10**9, verified=10**6)
    file.write_bytes(write_batch([seal(much, STRANGER, RUN.id), seal(statement(), ONE, RUN.id)]))
    assert StatementClient(RUN, ANN, file).status()["tokens"] == 500, (
        "nor is what it has signed, wherever it lies"
    )
    stranger = Teller(STRANGER, tells=much)
    status, _ = await status_after(stranger, file=tmp_path / "another")
    assert status == NOTHING
    assert stranger.asked == 0


LIES = {
    "of another sampler": (seal(statement(sampler=BOB.public), ONE, RUN.id), "inconsistent"),
    "of another run": (seal(statement(), ONE, ZERO), "wrong-run"),
    "by another": (seal(statement(), TWO, RUN.id), "wrong-signer"),
    "by a stranger": (seal(statement(), STRANGER, RUN.id), "wrong-signer"),
    "no statement": (seal(RUN.manifest, ONE, RUN.id), "wrong-kind"),
    "no message": (b"\xff" * 40, "trailing-bytes"),
    "nothing": (b"", "truncated"),
}


@pytest.mark.parametrize("lie", LIES)
async def test_an_answer_that_is_none_is_held_against_its_sender_and_changes_nothing(
    lie,
    tmp_path,
    autojump_clock,  # noqa: ARG001 - it jumps
):
    sealed, reason = LIES[lie]
    liar = Teller(ONE, sealed=sealed)
    status, scores = await status_after(liar, file=tmp_path / "attested", seconds=600.0)
    assert status == NOTHING
    assert scores[ONE.public] == {reason: 1}, "it is asked once, and not again for a long time"


async def test_older_silent_and_boundless_peers_cost_no_more_than_their_own_word(tmp_path, autojump_clock):  # noqa: ARG001 - it jumps
    huge = Teller(ONE, sealed=bytes(limits.SMALL_BYTES + limits.ENVELOPE_BYTES + 1))
    silent = Teller(TWO, silent=True)
    honest = Teller(THREE, tells=statement())
    older = Teller(TRAINER, serves=False)
    status, scores = await status_after(
        huge, silent, honest, older, file=tmp_path / "attested", seconds=24 * 3600.0
    )
    assert [each["peer_id"] for each in status["by"]] == [THREE.peer_id]
    assert not scores
    assert 32 <= honest.asked <= 96, "rarely"
    assert 32 <= silent.asked <= 110, "and who does not answer is not asked more often in the long run"
    assert 32 <= huge.asked <= 110


async def test_somebody_who_comes_late_or_begins_to_serve_late_is_asked_soon(tmp_path, autojump_clock):  # noqa: ARG001 - it jumps
    account, teller = StatementClient(RUN, ANN, tmp_path / "attested"), Teller(ONE, tells=statement())
    async with MemorySwarm() as swarm, swarm.join(ANN) as me, trio.open_nursery() as nursery:
        nursery.start_soon(account.work, me)
        await trio.sleep(3600)
        async with swarm.join(ONE) as network:
            await trio.sleep(1)
            with network.serve(topics.CREDIT_STREAM, teller.answer, most=32):
                await trio.sleep(30)
                assert account.status()["tokens"] == 500
        nursery.cancel_scope.cancel()


async def test_what_was_attested_outlives_a_restart_without_anybody_there(tmp_path, autojump_clock):  # noqa: ARG001 - it jumps
    file = tmp_path / "attested"
    status, _ = await status_after(
        Teller(ONE, tells=statement()),
        Teller(TRAINER, tells=statement(tokens=0, verified=0, learnt=9)),
        file=file,
    )
    assert (status["tokens"], status["learnt"]) == (500, 9)
    assert StatementClient(RUN, ANN, file).status() == status
    assert StatementClient(RUN, BOB, file).status() == NOTHING, "it belongs to the key"
    assert [each.name for each in tmp_path.iterdir()] == ["attested"], "nothing is left beside it"


@pytest.mark.parametrize("damage", [b"", b"\xff\x00", b"\x91\xc4\x01x"])
async def test_a_damaged_file_is_asked_for_again(damage, tmp_path, autojump_clock, caplog):  # noqa: ARG001 - it jumps
    file = tmp_path / "attested"
    file.write_bytes(damage)
    assert StatementClient(RUN, ANN, file).status() == NOTHING
    assert "fetching them again" in caplog.text
    await status_after(Teller(ONE, tells=statement()), file=file)
    assert StatementClient(RUN, ANN, file).status()["tokens"] == 500


async def test_a_full_disk_ends_nothing(tmp_path, autojump_clock, caplog):  # noqa: ARG001 - it jumps
    status, _ = await status_after(
        Teller(ONE, tells=statement()), file=tmp_path / "no such folder" / "attested"
    )
    assert status["tokens"] == 500
    assert "not written to disk" in caplog.text


async def test_a_signer_that_lost_its_files_takes_nothing_back_and_one_that_condemns_does(
    tmp_path,
    autojump_clock,  # noqa: ARG001 - it jumps
):
    file = tmp_path / "attested"
    known = statement(tokens=500, verified=5, condemned=1)
    for tells, tokens in (
        (known, 500),
        (statement(tokens=90, verified=1, condemned=0), 500),  # it begins anew, and what it has signed stands
        (statement(tokens=200, verified=2, condemned=4), 200),  # it thinks otherwise of three groups
        (statement(tokens=700, verified=7, condemned=4), 700),
    ):
        status, _ = await status_after(Teller(ONE, tells=tells), file=file)
        assert status["tokens"] == tokens
        assert StatementClient(RUN, ANN, file).status()["tokens"] == tokens


def test_questions_of_many_samplers_are_spread(tmp_path):
    lucks = {StatementClient(RUN, each, tmp_path / "a")._luck.random() for each in SAMPLERS}
    assert len(lucks) == len(SAMPLERS)
    assert room.EVERY_SECONDS >= 600


async def test_on_the_real_network_a_verifier_tells_and_an_older_node_costs_nothing(tmp_path):
    async def look(sampler):
        await trio.lowlevel.checkpoint()
        return Sums(tokens=500, verified=5) if sampler == ANN.public else Sums()

    account = StatementClient(RUN, ANN, tmp_path / "attested")
    async with (
        libp2p() as join,
        join(ONE) as verifier,
        join(TRAINER),
        join(ANN) as me,
        trio.open_nursery() as nursery,
    ):
        with serve_statements(verifier, ONE, RUN.id, look), trio.fail_after(60):
            nursery.start_soon(account.work, me)
            while not account.status()["tokens"]:  # noqa: ASYNC110 - a status is plain data and has no event
                await trio.sleep(0.02)
            with pytest.raises(RequestError) as caught:
                await account.ask(me, TRAINER.public)
            nursery.cancel_scope.cancel()
    assert caught.value.reason == "no-handler"
    assert [each["peer_id"] for each in account.status()["by"]] == [ONE.peer_id]
