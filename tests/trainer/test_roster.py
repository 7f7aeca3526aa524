"""Who has joined: each key once, with one engine that the run takes, and never too many."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from echo_node.trainer.roster import JoinDesk
from protocol import Join, Member, Opened, Roster, decode, encode, limits, open_sealed, seal
from protocol.digest import ZERO
from tests.crafting import ENGINE, SAMPLERS, open_run

RUN = open_run()


def join(sampler, engine: str = ENGINE, name: str = "") -> Opened[Join]:
    message = Join(agent="test", engine=engine, head=ZERO, name=name)
    return open_sealed(seal(message, sampler, RUN.id), Join, RUN.id)


def test_samplers_are_in_the_roster_by_the_order_of_their_keys():
    desk = JoinDesk(RUN)
    assert desk.roster() == Roster(())
    joins = [join(sampler) for sampler in reversed(SAMPLERS)]
    assert all(desk.welcome(each) for each in joins)
    roster = desk.roster()
    assert roster.members == tuple(
        Member(each.signer, ENGINE, each.id) for each in sorted(joins, key=lambda each: each.signer)
    )
    assert decode(Roster, encode(roster)) == roster


def test_the_first_join_of_a_key_counts_and_no_other():
    desk = JoinDesk(RUN)
    first = join(SAMPLERS[0])
    assert desk.welcome(first)
    assert not desk.welcome(first)
    assert not desk.welcome(join(SAMPLERS[0], name="again"))
    assert desk.roster().members == (Member(SAMPLERS[0].public, ENGINE, first.id),)


@pytest.mark.parametrize("engine", ["llama/q4_0", "torch/bf16"])
def test_an_engine_that_the_run_does_not_take_is_not_let_in(engine):
    desk = JoinDesk(RUN)
    assert not desk.welcome(join(SAMPLERS[0], engine))
    assert desk.roster() == Roster(())
    assert desk.welcome(join(SAMPLERS[0])), "and may come back with one that it does"


def test_a_full_roster_lets_nobody_in_and_still_fits_its_message(monkeypatch):
    monkeypatch.setattr(limits, "ROSTER", 2)
    desk = JoinDesk(RUN)
    assert [desk.welcome(join(sampler)) for sampler in SAMPLERS[:3]] == [True, True, False]
    assert len(desk.roster().members) == 2


def test_who_is_in_the_newest_heads_roster_has_joined_and_an_own_join_stands():
    desk = JoinDesk(RUN)
    own = join(SAMPLERS[0])
    desk.welcome(own)
    theirs = Roster(tuple(Member(each.public, ENGINE, b"j" * 32) for each in SAMPLERS[:2]))
    desk.take_over(theirs)
    assert desk.roster().members == (Member(SAMPLERS[0].public, ENGINE, own.id), theirs.members[1])
    assert desk.would_welcome(join(SAMPLERS[1], "torch/bf16")), "it is in already"
    assert not desk.would_welcome(join(SAMPLERS[2], "torch/bf16"))


async def test_waiting_for_samplers_ends_with_the_last_of_them():
    desk = JoinDesk(RUN)
    done = trio.Event()

    async def wait():
        await desk.wait_for(2)
        done.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        desk.welcome(join(SAMPLERS[0]))
        desk.welcome(join(SAMPLERS[0]))
        await trio.testing.wait_all_tasks_blocked()
        assert not done.is_set()
        desk.welcome(join(SAMPLERS[1]))
        with trio.fail_after(5):
            await done.wait()
    await desk.wait_for(2)
    await desk.wait_for(0)
