"""The outbox: an item stays until it is settled, whatever happens to process, clock or file."""

from __future__ import annotations

import sqlite3
import tempfile
from pathlib import Path

import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st

from echo_node.errors import DefectError, StoreError
from echo_node.net.outbox import outbox as outbox_room
from echo_node.net.outbox.outbox import LONGEST, Item, OutboxFullError, open_outbox
from tests.net.crash_points import run_and_kill, start
from tests.net.delivery_fixtures import GROUPS, ids, item, items, sized


async def test_what_is_put_is_pending_in_its_order_and_after_reopening(tmp_path):
    async with open_outbox(tmp_path / "outbox") as outbox:
        assert await outbox.put(items(3)) == 3
        assert await outbox.put([item(2), item(3)]) == 1
        assert outbox.pending == 4
    async with open_outbox(tmp_path / "outbox") as outbox:
        waiting, _ = outbox.since(0)
        assert await outbox.read(waiting) == items(4)


async def test_the_first_answer_counts_and_unknown_ids_are_nobodys(tmp_path):
    async with open_outbox(tmp_path / "outbox") as outbox:
        await outbox.put(items(4))
        assert await outbox.acknowledge([item(0).id, item(0).id, item(9).id]) == [item(0).id]
        assert await outbox.refuse({item(0).id: "stale", item(1).id: "stale\x1b[2J"}) == [item(1).id]
        assert await outbox.acknowledge([item(0).id, item(1).id]) == []
        assert (outbox.pending, outbox.kept) == (2, 1)
        assert await outbox.put(items(4)) == 0, "what was settled is not sent again"
    async with open_outbox(tmp_path / "outbox") as outbox:
        assert outbox.since(0)[0] == ids(items(4)[2:])
        (refusal,) = await outbox.refusals()
        assert (refusal.id, refusal.topic, refusal.reason) == (item(1).id, GROUPS, "stale\\x1b[2J")


async def test_a_new_term_revives_what_was_acknowledged_and_not_forgotten(tmp_path):
    async with open_outbox(tmp_path / "outbox") as outbox:
        await outbox.put(items(6))
        await outbox.acknowledge(ids(items(4)))
        assert await outbox.forget([item(0).id, item(5).id]) == 1, (
            "only what was acknowledged can be forgotten"
        )
        _, mark = outbox.since(0)
        assert await outbox.revive([item(1).id, item(4).id]) == [item(1).id]
        assert await outbox.revive() == [item(2).id, item(3).id]
        assert outbox.since(mark)[0] == ids(items(4)[1:])
        assert await outbox.read(ids(items(6))) == items(6)[1:]


async def test_waiting_ends_when_something_becomes_pending_and_not_before(tmp_path):
    woken = []

    async def wait(mark):
        await outbox.wait(mark)
        woken.append(mark)

    async with open_outbox(tmp_path / "outbox") as outbox, trio.open_nursery() as nursery:
        nursery.start_soon(wait, 0)
        await outbox.put([])
        await trio.testing.wait_all_tasks_blocked()
        assert woken == []
        await outbox.put(items(2))
        _, mark = outbox.since(0)
        nursery.start_soon(wait, mark)
        await outbox.acknowledge(ids(items(2)))
        await trio.testing.wait_all_tasks_blocked()
        assert woken == [0]
        await outbox.revive()
    assert woken == [0, mark]


@pytest.mark.parametrize("bounds", [{"items": 3}, {"most_bytes": 650}])
async def test_a_full_outbox_says_so_takes_nothing_and_goes_on_when_there_is_room(tmp_path, bounds):
    async with open_outbox(tmp_path / "outbox", **bounds) as outbox, trio.open_nursery() as nursery:
        await outbox.put(items(2))
        with pytest.raises(OutboxFullError, match="2 items wait for a receipt and 0 are kept") as caught:
            await outbox.put([item(2), item(3)])
        assert "produce no more" in caught.value.advice
        assert outbox.since(0)[0] == ids(items(2))
        assert await outbox.put([*items(3), item(2)]) == 1, "what is known takes no room"
        room = trio.Event()

        async def produce():
            await outbox.wait_for_room(1, 200)
            room.set()
            await outbox.put([item(3)])

        nursery.start_soon(produce)
        await outbox.acknowledge([item(0).id])
        await trio.testing.wait_all_tasks_blocked()
        assert not room.is_set(), "what is kept for another term still takes its room"
        await outbox.forget()
        with trio.fail_after(5):
            await room.wait()
    async with open_outbox(tmp_path / "outbox", **bounds) as outbox:
        assert outbox.since(0)[0] == ids(items(4)[1:])
        with pytest.raises(OutboxFullError):
            await outbox.put([item(4)])
        await outbox.refuse({item(1).id: "stale"})
        assert await outbox.put([item(4)]) == 1, "what is refused takes no room"


async def test_refusals_are_kept_in_a_bounded_number(tmp_path, monkeypatch):
    monkeypatch.setattr(outbox_room, "REFUSALS", 2)
    async with open_outbox(tmp_path / "outbox") as outbox:
        await outbox.put(items(5))
        for n in range(4):
            await outbox.refuse({item(n).id: f"reason {n}"})
        assert [each.reason for each in await outbox.refusals()] == ["reason 3", "reason 2"]
        assert outbox.pending == 1


@pytest.mark.parametrize("jump", [-1e9, 1e9])
async def test_a_clock_that_jumps_freezes_nothing(tmp_path, monkeypatch, jump):
    now = [2e9]
    monkeypatch.setattr(outbox_room.time, "time", lambda: now[0])
    async with open_outbox(tmp_path / "outbox") as outbox:
        await outbox.put(items(2))
        await outbox.acknowledge([item(0).id])
    now[0] += jump
    async with open_outbox(tmp_path / "outbox") as outbox:
        assert outbox.since(0)[0] == [item(1).id], "pending is pending, whatever the time"
        await outbox.forget(older_than=60)
        now[0] += 61
        await outbox.forget(older_than=60)
        assert outbox.kept == 0, "what was acknowledged in the future grows old too"


async def test_nothing_is_forgotten_before_its_time(tmp_path, monkeypatch):
    now = [2e9]
    monkeypatch.setattr(outbox_room.time, "time", lambda: now[0])
    async with open_outbox(tmp_path / "outbox") as outbox:
        await outbox.put(items(2))
        await outbox.acknowledge([item(0).id])
        now[0] += 50
        await outbox.acknowledge([item(1).id])
        now[0] += 20
        assert await outbox.forget(older_than=60) == 1
        assert await outbox.revive() == [item(1).id]


@pytest.mark.parametrize(
    "wrong", [(b"short", b"x"), (bytes(33), b"x"), (bytes(32), b""), (bytes(32), bytes(LONGEST + 1))]
)
def test_an_item_that_could_never_be_sent_is_a_bug_of_whoever_makes_it(wrong):
    name, data = wrong
    with pytest.raises(DefectError):
        Item(name, GROUPS, data)
    with pytest.raises(DefectError, match="topic"):
        Item(bytes(32), "/elsewhere", b"x")


# The file


async def test_every_commit_is_synced(tmp_path):
    async with open_outbox(tmp_path / "outbox") as outbox:

        def ask(file):
            return [file.execute(f"PRAGMA {name}").fetchone()[0] for name in ("journal_mode", "synchronous")]

        assert await outbox._file.transact(ask) == ["wal", 2]


async def test_a_transaction_that_fails_leaves_nothing_behind(tmp_path):
    async with open_outbox(tmp_path / "outbox") as outbox:

        def fail(file):
            file.execute("DELETE FROM items")
            raise KeyError("half-way")

        await outbox.put(items(2))
        with pytest.raises(KeyError):
            await outbox._file.transact(fail)
        assert await outbox.read(ids(items(2))) == items(2)


async def test_a_cancelled_put_is_wholly_there_or_not_at_all(tmp_path):
    async with open_outbox(tmp_path / "outbox") as outbox:
        with trio.CancelScope() as scope:
            scope.cancel()
            await outbox.put(items(3))
        assert scope.cancelled_caught
        assert outbox.pending == 0
        async with trio.open_nursery() as nursery:
            nursery.start_soon(outbox.put, items(3))
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
        assert outbox.pending in {0, 3}
        known = outbox.pending
    async with open_outbox(tmp_path / "outbox") as outbox:
        assert outbox.pending == known


def noise(path):
    path.write_bytes(b"this is no database at all, but it is long enough to look like one" * 100)


def torn(path, where=slice(4096, 12288)):
    async def fill():
        async with open_outbox(path) as outbox:
            await outbox.put(items(200, size=5000))

    trio.run(fill)
    data = bytearray(path.read_bytes())
    data[where] = b"\xff" * len(data[where])
    path.write_bytes(data)


def bent(path):
    """Damage that shows only when the item is read: four bytes that link one page to the next."""
    torn(path, slice(-4096, -4092))


def truncated(path):
    torn(path)
    path.write_bytes(path.read_bytes()[:10_000])


@pytest.mark.parametrize("damage", [noise, torn, bent, truncated], ids=lambda damage: damage.__name__)
def test_a_damaged_file_is_named_and_comes_with_advice(tmp_path, damage):
    path = tmp_path / "outbox"
    damage(path)
    before = path.read_bytes()

    async def use():
        async with open_outbox(path):
            pass

    with pytest.raises(StoreError, match=r"outbox .* is damaged") as caught:
        trio.run(use)
    assert str(path) in str(caught.value)
    assert "move the file away" in caught.value.advice
    assert path.read_bytes() == before, "it is left as it was, for whoever can read it"


def foreign(path):
    with sqlite3.connect(path) as file:
        file.execute("CREATE TABLE photos (name TEXT)")
    file.close()


def newer(path):
    async def make():
        async with open_outbox(path):
            pass

    trio.run(make)
    with sqlite3.connect(path) as file:
        file.execute("PRAGMA user_version = 2")
    file.close()


@pytest.mark.parametrize(("kind", "said"), [(foreign, "another program's file"), (newer, "has version 2")])
def test_a_file_that_is_not_ours_is_left_alone(tmp_path, kind, said):
    path = tmp_path / "outbox"
    kind(path)
    before = path.read_bytes()

    async def use():
        async with open_outbox(path):
            pass

    with pytest.raises(StoreError, match=said) as caught:
        trio.run(use)
    assert "folder" in caught.value.advice
    assert path.read_bytes() == before


async def test_a_file_that_cannot_be_made_says_so(tmp_path):
    with pytest.raises(StoreError, match="opening the outbox"):
        async with open_outbox(tmp_path / "nowhere" / "outbox"):
            pass


async def test_an_outbox_that_was_closed_says_so(tmp_path):
    async with open_outbox(tmp_path / "outbox") as outbox:
        pass
    with pytest.raises(StoreError, match="is closed"):
        await outbox.put(items(1))


async def test_one_process_has_the_outbox_and_another_is_told(tmp_path):
    path = tmp_path / "outbox"
    with start(path, 0) as child:
        child.stdout.readline()  # it has put something, so it is there
        with pytest.raises(StoreError, match="in use by another process") as caught:
            async with open_outbox(path):
                pass
        assert "another folder" in caught.value.advice
        child.kill()
    async with open_outbox(path) as outbox:
        assert outbox.pending, "the lock went with the process"
        with pytest.raises(StoreError, match="in use"):
            async with open_outbox(path):
                pass


def check_kills(path, kills: int) -> None:
    """Each printed line is a promise: `put` or `acknowledge` had returned."""
    said = {"put": set(), "acknowledging": set(), "acknowledged": set()}
    for life in range(kills):
        for word, n in run_and_kill(path, life, after=life * 7 % 40 + 1):
            said[word].add(n)

    async def look():
        async with open_outbox(path) as outbox:
            return await outbox.read(outbox.since(0)[0])

    pending = trio.run(look)
    there = {each.id: each for each in pending}
    assert len(there) == len(pending)
    assert len(said["put"]) > kills
    for n in said["put"] - said["acknowledging"]:
        assert there[sized(n).id] == sized(n)
    for n in said["acknowledged"]:
        assert sized(n).id not in there


def test_what_put_has_returned_for_survives_kill_9(tmp_path):
    check_kills(tmp_path / "outbox", kills=4)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_what_put_has_returned_for_survives_a_hundred_kills(tmp_path):
    check_kills(tmp_path / "outbox", kills=100)


async def test_what_was_delivered_and_let_go_can_still_be_named(tmp_path, monkeypatch):
    monkeypatch.setattr(outbox_room, "DELIVERED", 3)
    async with open_outbox(tmp_path / "outbox") as outbox:
        await outbox.put(items(6))
        await outbox.acknowledge(ids(items(5)))
        assert await outbox.forget([item(n).id for n in (0, 1, 5)]) == 2, "one was never acknowledged"
        await outbox.forget(ids(items(4)))
    with sqlite3.connect(tmp_path / "outbox") as file:
        named = file.execute("SELECT id, added <= settled FROM delivered ORDER BY seq").fetchall()
    file.close()
    assert named == [(item(n).id, 1) for n in (1, 2, 3)], "the newest of them"


# Any order of calls

NAMES = st.lists(st.integers(0, 7), max_size=4)
CALLS = st.lists(
    st.tuples(st.sampled_from(("put", "acknowledge", "refuse", "revive", "forget")), NAMES)
    | st.just(("reopen", [])),
    max_size=25,
)
MOST = 5


class Model:
    """A model of the outbox: the state of each item, in the order in which they became pending."""

    def __init__(self):
        self.state: dict[int, str] = {}
        self.pending: list[int] = []

    def put(self, names):
        new = [n for n in dict.fromkeys(names) if n not in self.state]
        if sum(state != "refused" for state in self.state.values()) + len(new) > MOST and new:
            return False
        self.state |= dict.fromkeys(new, "pending")
        self.pending += new
        return True

    def settle(self, names, state):
        for n in set(names) & set(self.pending):
            self.state[n] = state
            self.pending.remove(n)

    def revive(self, names, order):
        back = [n for n in order if n in names and self.state[n] == "acknowledged"]
        self.state |= dict.fromkeys(back, "pending")
        self.pending += back

    def forget(self, names):
        self.state = {n: s for n, s in self.state.items() if not (n in names and s == "acknowledged")}


async def play(path, calls):
    model, order = Model(), []
    while True:
        async with open_outbox(path, items=MOST) as outbox:
            while calls:
                call, names = calls.pop(0)
                if call == "reopen":
                    order = sorted(model.state, key=order.index)
                    model.pending.sort(key=order.index)
                    break
                await step(outbox, model, order, call, names)
            held = [n for n, state in model.state.items() if state == "acknowledged"]
            assert outbox.since(0)[0] == [item(n).id for n in model.pending]
            assert await outbox.read([item(n).id for n in range(8)]) == [
                item(n) for n in sorted(model.pending)
            ]
            assert (outbox.pending, outbox.kept) == (len(model.pending), len(held))
            refused = {n for n, state in model.state.items() if state == "refused"}
            assert set(ids(await outbox.refusals())) == {item(n).id for n in refused}
            if not calls:
                return


async def step(outbox, model, order, call, names):
    named = [item(n).id for n in names]
    if call == "put":
        if model.put(names):
            order += [n for n in dict.fromkeys(names) if n not in order]
            await outbox.put([item(n) for n in names])
        else:
            with pytest.raises(OutboxFullError):
                await outbox.put([item(n) for n in names])
    elif call == "acknowledge":
        model.settle(names, "acknowledged")
        await outbox.acknowledge(named)
    elif call == "refuse":
        model.settle(names, "refused")
        await outbox.refuse(dict.fromkeys(named, "no"))
    elif call == "revive":
        model.revive(names, order)
        await outbox.revive(named)
    else:
        model.forget(names)
        order[:] = [n for n in order if n in model.state]
        await outbox.forget(named)


@given(CALLS)
@settings(max_examples=60)
def test_any_order_of_calls_and_restarts_gives_what_a_model_gives(calls):
    with tempfile.TemporaryDirectory() as folder:
        trio.run(play, Path(folder) / "outbox", list(calls))
