"""What verifiers and trainers tell samplers of their accounts, on the in-memory network."""

from __future__ import annotations

from contextlib import AsyncExitStack

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from echo_node.credit import statement_server
from echo_node.credit.ledger import Entry, Ledger
from echo_node.credit.statement_server import Sums, ledger_sums, serve_statements
from echo_node.errors import StoreError
from echo_node.net.base import RequestError
from echo_node.net.memory import MemorySwarm
from protocol import Figures, Verdict, decode, encode, limits, open_sealed, open_statement, seal, topics
from protocol.credit import CreditStatement
from tests.crafting import SAMPLERS, identity

RUN, OTHER = b"r" * 32, b"o" * 32
VERIFIER, COLLEAGUE = identity("verifier"), identity("colleague")
ANN, BOB = SAMPLERS[:2]
FIGURES = Figures(
    contrast=0.0, d_mean=0.0, d_most=0.0, logprob_gap=0.0, reward=None, tokens=8, z_mean=0.0, z_most=0.0
)


async def ask(network, run=RUN, peer=VERIFIER.public):
    most = limits.SMALL_BYTES + limits.ENVELOPE_BYTES
    return await network.request(peer, topics.CREDIT_STREAM, run, deadline=5, most=most)


async def statement(network, sampler):
    return open_statement(await ask(network), RUN, signer=VERIFIER.public, sampler=sampler.public).message


def note(ledger, n, sampler, result="honest", by=VERIFIER, run=RUN):
    group = bytes([n]) * 32
    verdict = Verdict(bytes(64), FIGURES, group, "", "honest" if result == "honest" else "own-luck", result)
    entry = Entry(group, run, sampler.public, bytes(32), 1, n, 100 + n, "torch/f32")
    ledger.verdict(open_sealed(seal(verdict, by, run), Verdict, run), entry)


async def test_whoever_asks_is_told_of_its_own_account_and_of_no_other(tmp_path):
    with Ledger(tmp_path / "ledger", clock=lambda: 1_790_000_000.5) as ledger:
        for n, sampler, result in (
            (1, ANN, "honest"),
            (2, ANN, "honest"),
            (3, ANN, "dishonest"),
            (4, BOB, "honest"),
        ):
            note(ledger, n, sampler, result)
        note(ledger, 5, ANN, by=COLLEAGUE)
        note(ledger, 6, ANN, run=OTHER)
        look = ledger_sums(ledger, VERIFIER.public, RUN)
        async with (
            MemorySwarm() as swarm,
            swarm.join(VERIFIER) as verifier,
            swarm.join(ANN) as ann,
            swarm.join(BOB) as bob,
        ):
            with serve_statements(verifier, VERIFIER, RUN, look, clock=lambda: 1_790_000_600.0):
                reply = await statement(ann, ANN)
                assert (reply.tokens, reply.verified, reply.condemned) == (203, 2, 1), (
                    "by this verifier, in this run"
                )
                assert (reply.since_ms, reply.at_ms) == (1_790_000_000_500, 1_790_000_600_000)
                assert (reply.learnt, reply.refused) == (0, ()), "that is a trainer's to say"
                assert (await statement(bob, BOB)).tokens == 104


async def test_who_is_not_known_has_earned_nothing_and_other_runs_are_not_this_ones_business(tmp_path):
    with Ledger(tmp_path / "ledger") as ledger:
        async with MemorySwarm() as swarm, swarm.join(VERIFIER) as verifier, swarm.join(ANN) as ann:
            with serve_statements(
                verifier, VERIFIER, RUN, ledger_sums(ledger, VERIFIER.public, RUN), clock=lambda: 7.0
            ):
                reply = await statement(ann, ANN)
                assert (reply.tokens, reply.verified, reply.since_ms, reply.at_ms) == (0, 0, 7_000, 7_000)
                for asked in (OTHER, b"", b"r"):
                    with pytest.raises(RequestError, match="no accounts of that run"):
                        await ask(ann, asked)
                with pytest.raises(RequestError, match="at most 32"):
                    await ask(ann, RUN + ANN.public)


async def test_to_ask_again_and_again_costs_nothing(autojump_clock):  # noqa: ARG001 - it jumps
    looked = []

    async def look(sampler):
        await trio.lowlevel.checkpoint()
        looked.append(sampler)
        return Sums(tokens=len(looked), verified=1)

    async with MemorySwarm() as swarm, swarm.join(VERIFIER) as verifier, swarm.join(ANN) as ann:
        with serve_statements(verifier, VERIFIER, RUN, look):
            replies = {await ask(ann) for _ in range(20)}
            assert len(replies) == len(looked) == 1
            await trio.sleep(statement_server.SAME_SECONDS)
            assert (await statement(ann, ANN)).tokens == 2


async def test_too_many_at_once_are_asked_to_come_again(autojump_clock):  # noqa: ARG001 - it jumps
    go_on = trio.Event()
    many = [identity(f"asker {n}") for n in range(statement_server.WAITING + 4)]
    answers, turned_away = [], []

    async def look(_sampler):
        await go_on.wait()
        return Sums()

    async with AsyncExitStack() as stack:
        swarm = await stack.enter_async_context(MemorySwarm())
        verifier = await stack.enter_async_context(swarm.join(VERIFIER))
        stack.enter_context(serve_statements(verifier, VERIFIER, RUN, look))
        networks = [await stack.enter_async_context(swarm.join(each)) for each in many]
        async with trio.open_nursery() as nursery:

            async def one(network):
                try:
                    answers.append(await ask(network))
                except RequestError as error:
                    turned_away.append(error.reason)

            for network in networks:
                nursery.start_soon(one, network)
            await trio.sleep(1)
            go_on.set()
    assert turned_away == ["busy"] * 3
    assert len(answers) == statement_server.WAITING + 1


async def test_what_goes_wrong_on_this_machine_is_not_told_to_others(caplog):
    async def look(_sampler):
        await trio.lowlevel.checkpoint()
        raise StoreError("using the ledger /home/ann/secret/ledger.sqlite: disk full")

    async with MemorySwarm() as swarm, swarm.join(VERIFIER) as verifier, swarm.join(ANN) as ann:
        with serve_statements(verifier, VERIFIER, RUN, look), pytest.raises(RequestError) as caught:
            await ask(ann)
    assert caught.value.reason == "refused"
    assert "secret" not in str(caught.value)
    assert "disk full" in caplog.text


counts = st.integers(0, limits.SAFE_INTEGER)


@given(
    st.builds(
        Sums,
        tokens=st.just(0),
        verified=counts,
        condemned=counts,
        learnt=counts,
        refused=st.dictionaries(
            st.text(max_size=40) | st.from_regex(r"[a-z]{1,8}", fullmatch=True), counts, max_size=50
        ),
        since=st.none() | st.floats(-1e12, 1e12),
    ),
    st.floats(0, 1e11),
)
def test_whatever_is_kept_can_be_said(sums, now):
    statement = statement_server._statement(ANN.public, sums, now)
    assert decode(CreditStatement, encode(statement)) == statement
    assert all(sums.refused[each.reason] == each.groups for each in statement.refused)
