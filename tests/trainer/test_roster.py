"""The roster: each key once, with one allowed engine class, and never too many."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest
import trio
import trio.testing

from echo_node.errors import PeerError
from echo_node.net.base import BusyError, Message, RequestError
from echo_node.net.memory import MemorySwarm
from echo_node.net.outbox.direct_delivery import deliver, serve_deliveries
from echo_node.trainer.journal import open_journal
from echo_node.trainer.roster import CHANGE_SECONDS, RosterBuilder
from protocol import Join, Member, Opened, Roster, decode, encode, limits, open_sealed, seal, topics
from protocol.digest import ZERO
from protocol.manifest import Joins
from tests.crafting import ENGINE, SAMPLERS, TRAINER, changed_run, identity, open_run

RUN = open_run()
OTHER = "llama/f16"


def join(sampler, engine: str = ENGINE, name: str = "", run=RUN) -> Opened[Join]:
    message = Join(agent="test", engine=engine, head=ZERO, name=name)
    return open_sealed(seal(message, sampler, run.id), Join, run.id)


def test_samplers_are_in_the_roster_by_the_order_of_their_keys():
    builder = RosterBuilder(RUN)
    assert builder.roster() == Roster(())
    joins = [join(sampler) for sampler in reversed(SAMPLERS)]
    assert all(builder.add(each) for each in joins)
    roster = builder.roster()
    assert roster.members == tuple(
        Member(each.signer, ENGINE, each.id) for each in sorted(joins, key=lambda each: each.signer)
    )
    assert decode(Roster, encode(roster)) == roster


def test_the_first_join_of_a_key_counts_as_long_as_its_engine_is_the_same():
    builder = RosterBuilder(RUN)
    first = join(SAMPLERS[0])
    assert builder.add(first)
    assert not builder.add(first)
    assert not builder.add(join(SAMPLERS[0], name="again"))
    assert builder.roster().members == (Member(SAMPLERS[0].public, ENGINE, first.id),)


@pytest.mark.parametrize("engine", ["llama/q4_0", "torch/bf16"])
def test_an_engine_that_the_run_does_not_take_is_not_let_in(engine):
    builder = RosterBuilder(RUN)
    assert not builder.add(join(SAMPLERS[0], engine))
    assert builder.roster() == Roster(())
    assert builder.add(join(SAMPLERS[0])), "and may come back with one that it does"


def test_a_full_roster_lets_nobody_in_and_still_fits_its_message(monkeypatch):
    monkeypatch.setattr(limits, "ROSTER", 2)
    builder = RosterBuilder(RUN)
    assert [builder.add(join(sampler)) for sampler in SAMPLERS[:3]] == [True, True, False]
    assert len(builder.roster().members) == 2


def test_who_is_in_the_newest_heads_roster_has_joined_and_an_own_join_stands():
    builder = RosterBuilder(RUN)
    own = join(SAMPLERS[0])
    builder.add(own)
    theirs = Roster(tuple(Member(each.public, ENGINE, b"j" * 32) for each in SAMPLERS[:2]))
    builder.take_over(theirs)
    assert builder.roster().members == (Member(SAMPLERS[0].public, ENGINE, own.id), theirs.members[1])
    assert builder.refusal(join(SAMPLERS[1])) is None, "it is in already"
    assert (
        builder.refusal(join(SAMPLERS[2], "torch/bf16"))
        == "this run does not take the engine class torch/bf16"
    )


def test_a_sampler_that_comes_back_with_another_engine_is_in_the_next_roster_with_it():
    builder = RosterBuilder(RUN)
    builder.add(join(SAMPLERS[0]))
    later = join(SAMPLERS[0], OTHER)
    assert builder.add(later)
    assert builder.roster().members == (Member(SAMPLERS[0].public, OTHER, later.id),)
    assert not builder.add(join(SAMPLERS[0], "torch/bf16"))
    assert builder.roster().members == (Member(SAMPLERS[0].public, OTHER, later.id),)


def test_an_engine_is_not_changed_again_and_again():
    now = 0.0
    builder = RosterBuilder(RUN, lambda: now)
    builder.add(join(SAMPLERS[0]))
    assert builder.add(join(SAMPLERS[0], OTHER))
    now = CHANGE_SECONDS / 2
    assert "may change again in 300 s" in builder.refusal(join(SAMPLERS[0]))
    assert not builder.add(join(SAMPLERS[0]))
    assert builder.refusal(join(SAMPLERS[0], OTHER)) is None
    now = CHANGE_SECONDS
    assert builder.add(join(SAMPLERS[0]))


@pytest.mark.parametrize(("first", "then"), [(ENGINE, OTHER), (OTHER, ENGINE)])
def test_nobody_goes_over_to_a_class_that_a_cheat_could_hide_in_or_away_from_it(first, then):
    engines = [
        dataclasses.replace(each, share=0.25) if each.engine == OTHER else each
        for each in RUN.manifest.engines
    ]
    run = changed_run(RUN, engines=tuple(engines))
    builder = RosterBuilder(run)
    assert builder.add(join(SAMPLERS[0], first, run=run))
    assert f"may not go over to {then}" in builder.refusal(join(SAMPLERS[0], then, run=run))
    assert not builder.add(join(SAMPLERS[0], then, run=run))
    assert [each.engine for each in builder.roster().members] == [first]


def test_who_could_never_be_used_since_its_share_of_a_batch_is_less_than_a_group_is_told_so():
    """A batch of this run has four groups."""
    engines = [
        dataclasses.replace(each, share=0.2) if each.engine == OTHER else each
        for each in RUN.manifest.engines
    ]
    run = changed_run(RUN, engines=tuple(engines))
    assert "less than a group" in RosterBuilder(run).refusal(join(SAMPLERS[0], OTHER, run=run))
    assert RosterBuilder(run).refusal(join(SAMPLERS[0], run=run)) is None


async def test_a_join_is_on_disk_before_it_is_acknowledged_and_the_last_one_counts_after_a_restart(tmp_path):
    builder = RosterBuilder(RUN)
    async with open_journal(tmp_path / "journal", RUN.id) as journal:
        taker = builder.taker(journal)
        for engine in (ENGINE, OTHER, OTHER):
            opened_join = join(SAMPLERS[0], engine, name=engine)
            await taker.take(Message("", opened_join.sealed, SAMPLERS[0].public))
        with pytest.raises(PeerError, match="may change again"):
            await taker.take(Message("", join(SAMPLERS[0]).sealed, SAMPLERS[0].public))
    again = RosterBuilder(RUN)
    async with open_journal(tmp_path / "journal", RUN.id) as journal:
        for sealed in await journal.joins():
            again.add(open_sealed(sealed, Join, RUN.id))
    assert again.roster() == builder.roster()
    assert [each.engine for each in again.roster().members] == [OTHER]


async def test_keys_of_one_address_wait_for_its_budget_and_known_samplers_do_not():
    run = changed_run(RUN, joins=Joins(per_address=5, total=100))
    builder = RosterBuilder(run)
    strangers = [identity(f"stranger {number}") for number in range(8)]
    where = {each.public: "198.51.100.7" for each in strangers[:7]} | {strangers[7].public: "203.0.113.1"}
    async with open_journal(None, run.id) as journal:
        taker = builder.taker(journal, where.get)

        async def take(sampler):
            await taker.take(Message("", join(sampler, run=run).sealed, sampler.public))

        for each in (*strangers[:5], strangers[7]):
            await take(each)
        for each in strangers[5:7]:
            with pytest.raises(BusyError, match="try again in"):
                await take(each)
        again = Message("", join(strangers[0], OTHER, run=run).sealed, strangers[0].public)
        await taker.take(again)
    assert len(builder.roster().members) == 6


async def test_waiting_for_samplers_ends_with_the_last_of_them():
    builder = RosterBuilder(RUN)
    done = trio.Event()

    async def wait():
        await builder.wait_for(2)
        done.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        builder.add(join(SAMPLERS[0]))
        builder.add(join(SAMPLERS[0]))
        await trio.testing.wait_all_tasks_blocked()
        assert not done.is_set()
        builder.add(join(SAMPLERS[1]))
        with trio.fail_after(5):
            await done.wait()
    await builder.wait_for(2)
    await builder.wait_for(0)


AT_ONCE = 64
"""Newcomers that are under way at the same time."""


async def crowd_joins(folder, count: int, homes: int) -> tuple[RosterBuilder, Counter[str], int]:
    """Have newcomers of so many addresses deliver their joins, each over a connection of its own.

    Return the roster, what became of the joins, and how many are on disk.
    """
    topic, outcomes = topics.topic(RUN.id, topics.JOINS), Counter()
    places: dict[bytes, str] = {}
    builder = RosterBuilder(RUN, clock=lambda: 0.0)  # no budget refills meanwhile
    room = trio.CapacityLimiter(AT_ONCE)
    async with (
        MemorySwarm() as swarm,
        swarm.join(TRAINER) as leader,
        open_journal(folder / "journal.sqlite", RUN.id) as journal,
    ):

        async def arrive(number: int) -> None:
            newcomer = identity(f"newcomer {number}")
            home = number % homes
            places[newcomer.public] = f"203.{home % 200}.{home // 200}.1"
            async with room, swarm.join(newcomer) as network:
                try:
                    await deliver(
                        network, TRAINER.public, topic, join(newcomer).sealed, deadline=60.0, most=0
                    )
                except RequestError as error:
                    outcomes[error.reason] += 1
                else:
                    outcomes["joined"] += 1

        with serve_deliveries(leader, {topic: builder.taker(journal, places.get)}):
            async with trio.open_nursery() as nursery:
                for number in range(count):
                    nursery.start_soon(arrive, number)
        return builder, outcomes, len(await journal.joins())


async def test_a_crowd_joins_over_the_network_and_one_address_waits_for_its_budget(tmp_path):
    builder, outcomes, kept = await crowd_joins(tmp_path, 200, 200)
    assert (outcomes, kept, len(builder.roster().members)) == ({"joined": 200}, 200, 200)
    most = RUN.manifest.joins.per_address
    (tmp_path / "one").mkdir()
    _, outcomes, kept = await crowd_joins(tmp_path / "one", most + 44, 1)
    assert outcomes == {"joined": most, "busy": 44}
    assert kept == most, "who was told to wait is not in the roster"


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_four_thousand_join_over_the_network_in_ten_minutes(tmp_path):
    """It takes half a minute to a minute on two busy cores."""
    with trio.fail_after(600):
        builder, outcomes, kept = await crowd_joins(tmp_path, 4000, 1000)
    assert (outcomes, kept, len(builder.roster().members)) == ({"joined": 4000}, 4000, 4000)
