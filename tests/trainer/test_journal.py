"""The training journal: a crash loses nothing, and a group has one state."""

from __future__ import annotations

import sqlite3
import subprocess
import sys

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from echo_node.errors import StoreError
from echo_node.rollouts.record import RolloutRecord
from echo_node.trainer import journal as room
from echo_node.trainer.journal import Batch, Finding, open_journal
from protocol import TrajectoryGroup, open_sealed
from protocol.digest import context
from protocol.identity import verify
from tests.crafting import SAMPLERS, open_run, sealed_group
from tests.records import record_of

RUN = bytes(32)


def kept(n: int, step: int = 0, rewards=None) -> RolloutRecord:
    return RolloutRecord(n.to_bytes(32), b"s" * 32, n, bytes([step]) * 32, step, b"sealed %d" % n, rewards)


def scored(*numbers: int) -> tuple[RolloutRecord, ...]:
    return tuple(kept(n, rewards=(0.5, float(n))) for n in numbers)


async def test_what_is_kept_waits_in_the_order_in_which_it_came_even_after_a_restart(tmp_path):
    async with open_journal(tmp_path / "j", RUN) as journal:
        await journal.keep([kept(3), kept(1)])
        await journal.keep([kept(2), kept(3)])
    async with open_journal(tmp_path / "j", RUN) as journal:
        assert await journal.waiting() == [kept(3), kept(1), kept(2)]


async def test_a_batch_comes_back_in_its_order_with_its_rewards_to_the_last_bit(tmp_path):
    batch = Batch(1, 0, 1, (kept(2, rewards=(0.1, 1 / 3)), kept(7, rewards=(-0.0, 5e-324))))
    async with open_journal(tmp_path / "j", RUN) as journal:
        await journal.keep([kept(n) for n in (7, 5, 2)])
        await journal.draw(batch)
    async with open_journal(tmp_path / "j", RUN) as journal:
        assert await journal.batches() == [batch]
        assert batch.is_whole
        assert await journal.waiting() == [kept(5)]
        assert await journal.last_number() == 1


def facts(*numbers: int) -> tuple[RolloutRecord, ...]:
    """Groups as another trainer tells of them: without their bytes."""
    return tuple(
        RolloutRecord(n.to_bytes(32), b"s" * 32, n, bytes(32), 0, None, (0.5, float(n)), b"g" * 64)
        for n in numbers
    )


async def test_what_another_trainer_has_used_is_used_whatever_was_thought_of_it_here():
    async with open_journal(None, RUN) as journal:
        await journal.keep([kept(1), kept(2), kept(3)])
        await journal.drop({kept(2).id: "forked-head"})
        assert await journal.follow([Batch(7, 6, 3, facts(1, 2, 9), b"tip")]) == frozenset()
        assert await journal.waiting() == [kept(3)]
        assert await journal.keep([kept(9), kept(3), kept(4)]) == {kept(9).id}
        (batch,) = await journal.batches(version=3)
        assert (batch.number, batch.policy_step, batch.tip) == (7, 6, b"tip")
        assert [group.sealed for group in batch.groups] == [kept(1).sealed, None, None]
        assert [group.rewards for group in batch.groups] == [(0.5, float(n)) for n in (1, 2, 9)]
        with pytest.raises(StoreError, match="used before"):
            await journal.draw(Batch(8, 7, 4, scored(9)))


async def test_batches_of_another_trainer_get_numbers_of_this_journals_own():
    async with open_journal(None, RUN) as journal:
        await journal.draw(Batch(9, 3, 4, scored(1)))
        await journal.follow([Batch(5, 4, 5, facts(2)), Batch(6, 5, 5, facts(3))])
        assert [(batch.number, batch.policy_step) for batch in await journal.batches(after=9)] == [
            (10, 4),
            (11, 5),
        ]
        assert (await journal.last_number(4), await journal.last_number(5)) == (9, 11)


async def test_what_was_used_already_is_not_written_down_as_used_again():
    async with open_journal(None, RUN) as journal:
        await journal.draw(Batch(1, 0, 1, scored(1)))
        before = await journal.states()
        assert await journal.follow([Batch(2, 1, 2, facts(2, 1))]) == {kept(1).id}
        assert (await journal.states(), await journal.last_number()) == (before, 1)


async def test_what_waits_and_is_too_stale_is_dropped():
    async with open_journal(None, RUN) as journal:
        await journal.keep([kept(1, step=1), kept(2, step=2), kept(3, step=3)])
        assert await journal.expire(3) == 1
        assert sorted((await journal.states()).values()) == ["stale", "stale", "waiting"]


async def test_a_group_is_drawn_once_and_a_batch_that_has_it_again_is_not_written_at_all():
    async with open_journal(None, RUN) as journal:
        await journal.draw(Batch(1, 0, 1, scored(1, 2)))
        with pytest.raises(StoreError, match="used before"):
            await journal.draw(Batch(2, 1, 2, scored(3, 2)))
        assert [batch.number for batch in await journal.batches()] == [1]
        assert await journal.states() == {kept(1).id: "drawn", kept(2).id: "drawn"}


async def test_what_was_dropped_is_neither_waiting_nor_drawn_and_what_was_drawn_cannot_be_dropped():
    async with open_journal(None, RUN) as journal:
        await journal.keep([kept(n) for n in range(4)])
        await journal.drop({kept(0).id: "stale"})
        await journal.draw(Batch(1, 0, 1, scored(1)), {kept(2).id: "contract-failed"})
        await journal.drop({kept(1).id: "condemned"})
        assert await journal.states() == {
            kept(0).id: "stale",
            kept(1).id: "drawn",
            kept(2).id: "contract-failed",
            kept(3).id: "waiting",
        }
        with pytest.raises(StoreError):
            await journal.draw(Batch(2, 0, 2, scored(0)))


async def test_once_a_checkpoint_covers_a_batch_its_facts_stay_and_its_bytes_go():
    async with open_journal(None, RUN) as journal:
        await journal.draw(Batch(1, 0, 1, scored(1, 2)))
        await journal.draw(Batch(2, 1, 2, scored(3)))
        await journal.keep([kept(4), kept(5, step=1)])
        await journal.drop({kept(4).id: "stale", kept(5).id: "stale"})
        await journal.settle(1, step=1)
        first, second = await journal.batches()
        assert (first.is_whole, second.is_whole) == (False, True)
        assert [(group.id, group.slot, group.sealed) for group in first.groups] == [
            (kept(1).id, 1, None),
            (kept(2).id, 2, None),
        ]
        assert await journal.batches(version=1) == [first]
        assert (await journal.states())[kept(4).id] == "stale"
        assert (await journal.states())[kept(5).id] == "stale"


async def test_why_a_group_was_dropped_is_known_until_much_else_has_come(monkeypatch):
    monkeypatch.setattr(room, "DROPPED_KEPT", 2)
    async with open_journal(None, RUN) as journal:
        await journal.keep([kept(n, step=n // 3) for n in range(5)])
        await journal.drop({kept(n).id: "stale" for n in range(5)})
        await journal.settle(0, step=1)
        assert set(await journal.states()) == {kept(n).id for n in (3, 4)}
        await journal.keep([kept(n, step=2) for n in range(5, 9)])
        await journal.settle(0, step=1)
        states = await journal.states()
        assert states.keys() >= {kept(3).id, kept(4).id}, "somebody may still sample under its head"
        await journal.settle(0, step=2)
        assert set(await journal.states()) == {kept(n).id for n in range(5, 9)}


async def test_the_signature_of_a_settled_group_stays_and_can_be_checked():
    run = open_run()
    opened = open_sealed(sealed_group(run, b"h" * 32, SAMPLERS[0], 7), TrajectoryGroup, run.id)
    async with open_journal(None, RUN) as journal:
        await journal.draw(Batch(1, 0, 1, (record_of(opened, 0, rewards=[1.0, 0.0]),)))
        await journal.settle(1, step=0)
        ((id_, signer, sealed, signature),) = await journal._rows(
            "SELECT id, sampler, sealed, signature FROM groups"
        )
    assert sealed is None
    verify(signer, signature, context(TrajectoryGroup.KIND).encode() + b"\0" + id_)


async def test_a_batch_with_a_group_that_was_condemned_meanwhile_is_not_written():
    async with open_journal(None, RUN) as journal:
        await journal.keep([kept(1), kept(2), kept(3)])
        found = Finding(kept(2).id, b"s" * 32, b"v" * 32, "dishonest", "own-luck", 5.0)
        harmless = Finding(kept(3).id, b"s" * 32, b"v" * 32, "undecided", "own-luck", 5.0)
        await journal.find([found, harmless])
        assert await journal.draw(Batch(1, 0, 1, scored(1, 2, 3))) == {kept(2).id}
        assert await journal.batches() == []
        assert not await journal.draw(Batch(1, 0, 1, scored(1, 3)), {kept(2).id: "condemned"})
        assert (await journal.states())[kept(2).id] == "condemned"


async def test_a_finding_tells_which_batch_was_the_newest_when_it_came():
    async with open_journal(None, RUN) as journal:
        await journal.find([Finding(kept(1).id, b"s" * 32, b"v" * 32, "honest", "honest", 5.0)])
        await journal.draw(Batch(1, 0, 1, scored(1)))
        await journal.find([Finding(kept(1).id, b"s" * 32, b"w" * 32, "honest", "honest", 6.0)])
        assert await journal._rows("SELECT after FROM verdicts ORDER BY seq") == [(0,), (1,)]
        await journal.find([Finding(kept(1).id, b"s" * 32, b"v" * 32, "dishonest", "own-luck", 7.0)])
        assert await journal._rows("SELECT after FROM verdicts ORDER BY seq") == [(1,), (1,)]


async def test_a_journal_of_an_earlier_program_is_taken_over(tmp_path):
    async with open_journal(tmp_path / "j", RUN) as journal:
        await journal.keep([kept(1)])
    with sqlite3.connect(tmp_path / "j") as file:
        file.execute("ALTER TABLE groups DROP COLUMN signature")
        file.execute("ALTER TABLE verdicts DROP COLUMN after")
    file.close()
    async with open_journal(tmp_path / "j", RUN) as journal:
        await journal.draw(Batch(1, 0, 1, scored(1)))
        await journal.settle(1, step=0)
        await journal.find([Finding(kept(1).id, b"s" * 32, b"v" * 32, "honest", "honest", 5.0)])
        assert await journal.states() == {kept(1).id: "drawn"}


async def test_the_oldest_batches_are_forgotten_and_not_the_newest():
    async with open_journal(None, RUN) as journal:
        for number in range(1, 7):
            await journal.draw(Batch(number, number - 1, number, scored(number)))
        await journal.settle(6, step=0, kept=2)
        assert [batch.number for batch in await journal.batches()] == [5, 6]
        assert len(await journal.states()) == 2
        assert await journal.last_number() == 6


async def test_slots_of_a_head_are_known_as_filled_whatever_became_of_their_groups():
    async with open_journal(None, RUN) as journal:
        await journal.keep([kept(1), kept(2, step=1), kept(3)])
        await journal.draw(Batch(1, 0, 1, scored(4)))
        await journal.drop({kept(1).id: "condemned", kept(2).id: "stale"})
        heads = [bytes(32)]
        assert [group.slot for group in await journal.filled(heads)] == [1, 4]
        assert [group.slot for group in await journal.filled([*heads, bytes([1]) * 32])] == [1, 2, 4]
        assert await journal.filled([]) == []


async def test_joins_and_findings_outlive_the_process(tmp_path):
    found = Finding(kept(1).id, b"s" * 32, b"v" * 32, "dishonest", "own-luck", 5.0)
    async with open_journal(tmp_path / "j", RUN) as journal:
        await journal.join(b"b" * 32, b"first")
        await journal.join(b"a" * 32, b"other")
        await journal.join(b"b" * 32, b"second")
        await journal.find([found])
    async with open_journal(tmp_path / "j", RUN) as journal:
        assert await journal.joins() == [b"other", b"second"], "the last join of a key counts"
        assert await journal.findings() == [found]


async def test_findings_are_bounded(monkeypatch):
    monkeypatch.setattr(room, "VERDICTS_KEPT", 3)
    async with open_journal(None, RUN) as journal:
        await journal.find(
            [Finding(kept(n).id, b"s" * 32, b"v" * 32, "honest", "honest", float(n)) for n in range(9)]
        )
        await journal.settle(0, step=0)
        assert [found.at for found in await journal.findings()] == [6.0, 7.0, 8.0]


async def test_a_journal_of_another_run_is_refused(tmp_path):
    async with open_journal(tmp_path / "j", RUN):
        pass
    with pytest.raises(StoreError, match="another run"):
        async with open_journal(tmp_path / "j", b"r" * 32):
            pass


async def test_two_trainers_do_not_share_a_journal(tmp_path):
    async with open_journal(tmp_path / "j", RUN):
        with pytest.raises(StoreError, match="in use"):
            async with open_journal(tmp_path / "j", RUN):
                pass


def test_a_sealed_group_is_kept_with_its_facts():
    run = open_run()
    opened = open_sealed(sealed_group(run, b"h" * 32, SAMPLERS[0], 7), TrajectoryGroup, run.id)
    made = record_of(opened, 3, rewards=[1.0, 0.0])
    assert (made.id, made.sampler, made.slot, made.head, made.step) == (
        opened.id,
        SAMPLERS[0].public,
        7,
        b"h" * 32,
        3,
    )
    assert (made.sealed, made.rewards) == (opened.sealed, (1.0, 0.0))


WORK = """
import sys, trio
from pathlib import Path
from echo_node.rollouts.record import RolloutRecord
from echo_node.trainer.journal import Batch, open_journal

def kept(n, rewards=None):
    return RolloutRecord(n.to_bytes(32), b"s" * 32, n, bytes(32), 0, b"sealed %d" % n, rewards)

async def work():
    async with open_journal(Path(sys.argv[1]), bytes(32)) as journal:
        for n in range(1, 10_000):
            await journal.keep([kept(n)])
            print(n, flush=True)
            if n % 5 == 0:
                await journal.draw(Batch(n // 5, 0, 1, tuple(kept(m, (0.5,)) for m in range(n - 4, n + 1))))
                print(-n // 5, flush=True)

trio.run(work)
"""


def test_what_was_acknowledged_before_a_kill_is_there_after_it(tmp_path):
    """A group is printed only when `keep` or `draw` has returned.

    The process is killed in the middle of the next call.
    """
    command = [sys.executable, "-c", WORK, str(tmp_path / "j")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        printed = [int(child.stdout.readline()) for _ in range(60)]
        child.kill()
        printed += [int(line) for line in child.stdout.read().splitlines()]

    async def look():
        async with open_journal(tmp_path / "j", RUN) as journal:
            return await journal.states(), await journal.batches()

    states, batches = trio.run(look)
    assert {kept(n).id for n in printed if n > 0} <= states.keys()
    assert {-n for n in printed if n < 0} <= {batch.number for batch in batches}
    for batch in batches:
        first = 5 * batch.number - 4
        assert [group.slot for group in batch.groups] == list(range(first, first + 5)), "whole or not there"


ACTS = st.one_of(
    st.tuples(st.just("keep"), st.lists(st.integers(0, 9), max_size=4)),
    st.tuples(st.just("drop"), st.lists(st.integers(0, 9), max_size=3)),
    st.tuples(st.just("draw"), st.lists(st.integers(0, 9), min_size=1, max_size=4, unique=True)),
    st.tuples(st.just("settle"), st.just([])),
)


@given(st.lists(ACTS, max_size=12))
@settings(max_examples=40)
def test_every_group_is_waiting_drawn_or_dropped_and_what_is_settled_never_changes(acts):
    async def play():
        model, number = {}, 0
        async with open_journal(None, RUN) as journal:
            for act, numbers in acts:
                if act == "keep":
                    await journal.keep([kept(n) for n in numbers])
                    for n in numbers:
                        model.setdefault(n, "waiting")
                elif act == "drop":
                    await journal.drop({kept(n).id: "stale" for n in numbers})
                    model |= {n: "stale" for n in numbers if model.get(n) == "waiting"}
                elif act == "draw":
                    batch = Batch(number + 1, 0, number + 1, scored(*numbers))
                    if any(model.get(n, "waiting") != "waiting" for n in numbers):
                        with pytest.raises(StoreError):
                            await journal.draw(batch)
                    else:
                        await journal.draw(batch)
                        number += 1
                        model |= dict.fromkeys(numbers, "drawn")
                else:
                    await journal.settle(number, step=0)
                assert await journal.states() == {kept(n).id: state for n, state in model.items()}
            in_batches = [group.slot for batch in await journal.batches() for group in batch.groups]
            assert sorted(in_batches) == sorted(n for n, state in model.items() if state == "drawn")

    trio.run(play)
