"""The board: what a node tells, as those who look at it read it."""

import json

import trio
import trio.testing

from echo_node.telemetry.snapshot import MOST_LINES, MOST_STEPS, Snapshot


def told(board: Snapshot) -> dict:
    """A snapshot as it comes out of a socket."""
    return json.loads(json.dumps(board.snapshot()))


def test_a_snapshot_has_the_newest_of_what_changes_and_the_last_of_what_piles_up():
    board = Snapshot()
    board.record("started", "sampler of a run", {"role": "sampler", "peer_id": "12D3", "state": "/x"})
    board.record("listening", "others reach it", {"addresses": ["/ip4/127.0.0.1/tcp/1"]})
    board.describe_run({"id": "ab", "name": "a run"})
    board.describe_swarm([{"peer_id": "12D3", "role": "sampler", "me": True}], "others reach it directly")
    board.record("progress", "", {"version": 1})
    board.record("progress", "version 2", {"version": 2})
    board.record("step", "step 1", {"step": 1, "reward": 0.5})
    found = told(board)
    assert found["format"] == 1
    assert found["phase"] == "working"
    assert found["node"] | {"role": "sampler", "peer_id": "12D3", "state": "/x"} == found["node"]
    assert found["run"] == {"id": "ab", "name": "a run"}
    assert found["addresses"] == ["/ip4/127.0.0.1/tcp/1"]
    assert found["reach"] == "others reach it directly"
    assert found["progress"] == {"version": 2}
    assert [step["reward"] for step in found["steps"]] == [0.5]
    assert [line["event"] for line in found["log"]] == ["started", "listening"]


def test_a_board_is_bounded_however_long_a_node_runs():
    board = Snapshot()
    for number in range(3 * MOST_STEPS):
        board.record("step", "", {"step": number})
        board.record("alone", "nobody", {})
    found = told(board)
    assert len(found["steps"]) == MOST_STEPS
    assert found["steps"][-1]["step"] == 3 * MOST_STEPS - 1
    assert len(found["log"]) == MOST_LINES
    few = board.snapshot(steps=2, lines=0)
    assert len(few["steps"]) == 2
    assert few["log"] == []


def test_the_phase_follows_what_the_node_says():
    board = Snapshot()
    phases = [told(board)["phase"]]
    for event in ("listening", "paused", "resumed", "stopped"):
        board.record(event, event, {"addresses": []})
        phases.append(told(board)["phase"])
    assert phases == ["starting", "working", "paused", "working", "stopping"]


async def test_who_waits_for_news_gets_it_once(autojump_clock):  # noqa: ARG001 - it jumps
    board = Snapshot()
    board.record("started", "", {})
    seen = board.sequence
    with trio.move_on_after(1) as nothing_new:
        await board.wait_for_news(seen)
    assert nothing_new.cancelled_caught
    async with trio.open_nursery() as nursery:
        nursery.start_soon(board.wait_for_news, seen)
        await trio.testing.wait_all_tasks_blocked()
        board.describe_swarm([{"peer_id": "a"}], "")
    newer = board.sequence
    board.describe_swarm([{"peer_id": "a"}], "")  # as before: no news
    assert board.sequence == newer
