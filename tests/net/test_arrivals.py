"""Arrivals: what may be acknowledged is there after any end of the process, each item once."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from echo_node.errors import StoreError
from echo_node.net.outbox.arrivals import ArrivalsFullError, open_arrivals
from echo_node.net.outbox.outbox import open_outbox
from tests.net.dying import run_and_kill
from tests.net.post import ids, item, items, sized


async def test_what_comes_again_is_not_new_even_after_a_restart(tmp_path):
    async with open_arrivals(tmp_path / "arrivals") as arrivals:
        assert await arrivals.take([item(0), item(1), item(0)]) == items(2)
        assert await arrivals.take([item(1), item(2)]) == [item(2)]
    async with open_arrivals(tmp_path / "arrivals") as arrivals:
        assert await arrivals.take(items(4)) == [item(3)]
        assert await arrivals.waiting() == items(4)


async def test_what_is_done_with_does_not_wait_and_is_still_known(tmp_path):
    async with open_arrivals(tmp_path / "arrivals") as arrivals:
        await arrivals.take(items(3))
        await arrivals.done([item(1).id, item(1).id, item(9).id])
        await arrivals.done([item(1).id])
        assert len(arrivals) == 2
    async with open_arrivals(tmp_path / "arrivals") as arrivals:
        assert await arrivals.waiting() == [item(0), item(2)]
        assert await arrivals.take([item(1)]) == []
        assert await arrivals.take([item(9)]) == [item(9)], "what is done with before it came was not here"


async def test_two_copies_at_once_are_taken_once(tmp_path):
    new = []

    async def take():
        new.extend(await arrivals.take(items(5)))

    async with open_arrivals(tmp_path / "arrivals") as arrivals, trio.open_nursery() as nursery:
        for _ in range(4):
            nursery.start_soon(take)
    assert new == items(5)


async def test_the_oldest_names_are_forgotten_and_what_waits_is_not(tmp_path):
    async with open_arrivals(tmp_path / "arrivals", names=3) as arrivals:
        await arrivals.take(items(8))
        await arrivals.done(ids(items(8)[2:7]))
        await arrivals.done([item(7).id])
    async with open_arrivals(tmp_path / "arrivals", names=3) as arrivals:
        assert await arrivals.waiting() == items(2)
        assert await arrivals.take(items(8)) == items(5)[2:], "the names of 5, 6 and 7 are left"
        await arrivals.done(ids(items(8)))
        await arrivals.take([item(8)])
        await arrivals.done([item(8).id])

        def count(file):
            return file.execute("SELECT count(*) FROM arrivals").fetchone()[0]

        assert await arrivals._file.transact(count) == 3


@pytest.mark.parametrize("bounds", [{"items": 3}, {"most_bytes": 650}])
async def test_when_too_much_waits_nothing_is_taken_until_some_is_done_with(tmp_path, bounds):
    async with open_arrivals(tmp_path / "arrivals", **bounds) as arrivals:
        await arrivals.take(items(2))
        with pytest.raises(ArrivalsFullError, match="2 of 400 bytes wait"):
            await arrivals.take([item(2), item(3)])
        assert await arrivals.waiting() == items(2)
        assert await arrivals.take(items(3)) == [item(2)]
    async with open_arrivals(tmp_path / "arrivals", **bounds) as arrivals:
        with pytest.raises(ArrivalsFullError):
            await arrivals.take([item(3)])
        await arrivals.done([item(0).id])
        assert await arrivals.take([item(3)]) == [item(3)]


async def test_an_outbox_is_not_taken_for_arrivals(tmp_path):
    async with open_outbox(tmp_path / "file"):
        pass
    with pytest.raises(StoreError, match="another program's file"):
        async with open_arrivals(tmp_path / "file"):
            pass


def check_kills(path, kills: int) -> None:
    """Each printed line is a promise: `take` or `done` had returned."""
    said = {"new": [], "known": [], "finishing": [], "finished": []}
    for life in range(kills):
        for word, n in run_and_kill("arrivals", path, life, after=life * 7 % 40 + 1):
            said[word].append(n)

    async def look():
        async with open_arrivals(path) as arrivals:
            return await arrivals.waiting(), await arrivals.take([sized(n) for n in said["new"]])

    waiting, news = trio.run(look)
    there = {each.id: each for each in waiting}
    assert len(there) == len(waiting), "each once"
    assert len(set(said["new"])) == len(said["new"]), "each once"
    assert len(said["new"]) > kills
    assert news == [], "what was taken is known, whether or not it still waits"
    for n in set(said["new"]) - set(said["finishing"]):
        assert there[sized(n).id] == sized(n)
    for n in said["finished"]:
        assert sized(n).id not in there


def test_what_take_has_returned_for_survives_kill_9_and_waits_once(tmp_path):
    check_kills(tmp_path / "arrivals", kills=4)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_what_take_has_returned_for_survives_a_hundred_kills(tmp_path):
    check_kills(tmp_path / "arrivals", kills=100)


NUMBERS = st.lists(st.integers(0, 9), max_size=5)


@given(st.lists(st.tuples(st.sampled_from(("take", "done", "reopen")), NUMBERS), max_size=25))
@settings(max_examples=60)
def test_any_order_of_calls_and_restarts_takes_each_item_once(calls):
    taken: list[int] = []
    finished: set[int] = set()

    async def play(path):
        waiting = list(calls)
        while waiting:
            async with open_arrivals(path) as arrivals:
                while waiting:
                    call, numbers = waiting.pop(0)
                    if call == "reopen":
                        break
                    if call == "take":
                        new = [n for n in dict.fromkeys(numbers) if n not in taken]
                        assert await arrivals.take([item(n) for n in numbers]) == [item(n) for n in new]
                        taken.extend(new)
                    else:
                        await arrivals.done([item(n).id for n in numbers])
                        finished.update(set(numbers) & set(taken))
                left = [n for n in taken if n not in finished]
                assert await arrivals.waiting() == [item(n) for n in left]
                assert len(arrivals) == len(left)

    with tempfile.TemporaryDirectory() as folder:
        trio.run(play, Path(folder) / "arrivals")
