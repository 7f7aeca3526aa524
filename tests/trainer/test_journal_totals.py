"""Totals of each sampler: the same as the journal's rows, and kept after pruning."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import replace

from echo_node.credit.statement_server import Sums
from echo_node.rollouts.record import RolloutRecord
from echo_node.trainer.journal import Batch, open_journal

RUN = bytes(32)
ANN, BOB = b"a" * 32, b"b" * 32


def kept(n: int, sampler: bytes = ANN, step: int = 0) -> RolloutRecord:
    return RolloutRecord(n.to_bytes(32), sampler, n, bytes([step]) * 32, step, b"sealed %d" % n, (0.5, 1.0))


async def counted(journal, sampler=ANN) -> Sums:
    return replace(await journal.sums(sampler), since=None)


async def test_groups_are_counted_by_what_became_of_them_and_for_their_own_sampler():
    async with open_journal(None, RUN) as journal:
        await journal.keep([kept(n) for n in range(1, 7)] + [kept(7, BOB)])
        assert await journal.sums(ANN) == Sums(), "what waits has come to nothing yet"
        await journal.draw(Batch(1, 0, 1, (kept(1), kept(2), kept(7, BOB), kept(8))))
        await journal.drop({kept(3).id: "condemned", kept(4).id: "muted", kept(1).id: "muted"})
        await journal.expire(1)
        for _again in range(2):
            await journal.keep([kept(n) for n in range(1, 9)])
            await journal.drop({kept(3).id: "stale"})
        assert await counted(journal) == Sums(learnt=3, condemned=1, refused={"muted": 1, "stale": 2})
        assert await counted(journal, BOB) == Sums(learnt=1)
        assert (await journal.sums(ANN)).since > 1_700_000_000


async def test_a_branch_that_was_left_and_another_trainers_account_move_what_was_counted():
    async with open_journal(None, RUN) as journal:
        await journal.keep([kept(n) for n in (1, 2, 3)])
        await journal.draw(Batch(1, 0, 1, (kept(1), kept(2))))
        await journal.drop({kept(3).id: "full"})
        await journal.disown([1])
        assert await counted(journal) == Sums(refused={"forked-head": 2, "full": 1})
        groups = tuple(replace(kept(n), sealed=None, stored_signature=b"g" * 64) for n in (1, 3, 9))
        await journal.follow([Batch(5, 4, 3, groups, b"tip")])
        assert await counted(journal) == Sums(learnt=3, refused={"forked-head": 1})


async def test_a_restart_and_pruning_forget_none_of_it(tmp_path):
    async with open_journal(tmp_path / "j", RUN) as journal:
        for number in (1, 2, 3):
            await journal.draw(Batch(number, number - 1, number, (kept(number),)))
        await journal.settle(3, step=3, kept=1)
    async with open_journal(tmp_path / "j", RUN) as journal:
        assert len(await journal.batches()) == 1
        assert await counted(journal) == Sums(learnt=3)


async def test_a_journal_of_an_earlier_program_is_counted_once(tmp_path):
    async with open_journal(tmp_path / "j", RUN) as journal:
        await journal.keep([kept(n) for n in (1, 2, 3)])
        await journal.draw(Batch(1, 0, 1, (kept(1),)))
        await journal.drop({kept(2).id: "stale"})
    with closing(sqlite3.connect(tmp_path / "j")) as file:
        for thing in ("TABLE tallies", "TRIGGER groups_counted", "TRIGGER groups_taken_back"):
            file.execute(f"DROP {thing}")
        file.commit()
    for _start in range(2):
        async with open_journal(tmp_path / "j", RUN) as journal:
            assert await counted(journal) == Sums(learnt=1, refused={"stale": 1})
    async with open_journal(tmp_path / "j", RUN) as journal:
        await journal.draw(Batch(2, 1, 2, (kept(3),)))
        assert await counted(journal) == Sums(learnt=2, refused={"stale": 1})
