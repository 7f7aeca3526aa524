"""A person and a node that runs: real sockets, and callers that do not behave."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import stat
import subprocess
import sys
import threading
from contextlib import suppress

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from echo_node.control import client, server
from echo_node.control.client import NobodyRunsError, answers, ask, wait_until_ended
from echo_node.control.server import NodeControl, serve_control, under_control
from echo_node.control.socket import CALLERS, NAME, connect, listen
from echo_node.errors import StoreError
from echo_node.runtime.pause_gate import LEAVING, PERSON, PauseGate
from echo_node.storage import state_dir
from echo_node.telemetry.snapshot import Snapshot


class RecordingTarget:
    """A control target that records the calls."""

    def __init__(self):
        self.calls = []

    def pause(self, reason):
        self.calls.append(("pause", reason))

    def resume(self, reason):
        self.calls.append(("resume", reason))

    def leave(self):
        self.calls.append(("leave",))


@pytest.fixture
def board():
    board = Snapshot()
    board.record("started", "sampler of a run", {"role": "sampler", "peer_id": "12D3", "state": "/x"})
    return board


@pytest.fixture
async def target(tmp_path, board, nursery):
    target = RecordingTarget()
    await nursery.start(serve_control, tmp_path, board, target)
    return target


async def in_thread(work, *words, **more):
    """Callers block, and the node must go on meanwhile."""
    return await trio.to_thread.run_sync(lambda: work(*words, **more))


def raw(folder, data, *, end=False):
    """All that a node says to these bytes."""
    with connect(folder, 30) as connection:
        connection.sendall(data)
        if end:
            connection.shutdown(socket.SHUT_WR)
        said = b""
        with suppress(ConnectionResetError):  # it hung up on what was not read
            while part := connection.recv(65536):
                said += part
        return said


async def test_it_says_how_it_goes(tmp_path, board, target):
    said = await in_thread(ask, tmp_path, "status")
    assert said | {"at": 0} == board.snapshot() | {"at": 0}
    for number in range(100):
        board.record("step", "", {"step": number})
    said = await in_thread(ask, tmp_path, "status", steps=3, lines=0)
    assert ([step["step"] for step in said["steps"]], said["log"]) == ([97, 98, 99], [])
    assert target.calls == []


async def test_it_does_what_the_person_says(tmp_path, target):
    assert await in_thread(ask, tmp_path, "pause") == {"done": "paused"}
    assert await in_thread(ask, tmp_path, "resume") == {"done": "resumed"}
    assert await in_thread(ask, tmp_path, "leave") == {"done": "leaving"}
    await wait_all_tasks_blocked()
    assert target.calls == [("pause", PERSON), ("resume", PERSON), ("leave",)]


async def test_only_its_owner_can_call(tmp_path, target):
    assert stat.S_IMODE((tmp_path / NAME).stat().st_mode) == 0o600
    assert target.calls == []


async def test_who_watches_hears_of_each_change_and_of_a_burst_only_the_last(tmp_path, board, target):
    seen, first, second, stop = [], threading.Event(), threading.Event(), threading.Event()

    def watch():
        for snapshot in answers(tmp_path, "watch"):
            seen.append(snapshot["sequence"])
            (second if first.is_set() else first).set()
            if stop.is_set():
                return

    async with trio.open_nursery() as nursery:
        nursery.start_soon(in_thread, watch)
        assert await in_thread(first.wait, 30)
        for number in range(50):
            board.record("progress", "", {"accepted": number})
        assert await in_thread(second.wait, 30)
        assert seen == [1, 51]
        stop.set()
        board.record("progress", "", {"accepted": 51})
    assert seen == [1, 51, 52]
    await wait_all_tasks_blocked()
    assert (await in_thread(ask, tmp_path, "status"))["sequence"] == 52, "it answers others afterwards"
    assert target.calls == []


async def test_without_news_it_says_the_same_again_so_that_one_knows_that_it_lives(
    tmp_path, target, monkeypatch
):
    monkeypatch.setattr(server, "STILL_SECONDS", 0.01)
    seen = await in_thread(
        lambda: [s["sequence"] for s, _ in zip(answers(tmp_path, "watch"), "ab", strict=False)]
    )
    assert seen == [1, 1]
    assert target.calls == []


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"what?\n", "a line of JSON"),
        (b"[1]\n", "a JSON object"),
        (b'{"ask": "dance\\u001b[2J"}\n', r"does not know the question"),
        (b'{"ask": ["status"]}\n', "does not know the question"),
        (b"{}\n", "does not know the question"),
        (b"\xff\xfe\n", "a line of JSON"),
        (b"[" * 60_000 + b"\n", "a line of JSON"),
        (b"x" * 70_000, "at most 65536 bytes"),
    ],
)
async def test_what_is_no_question_is_answered_in_words(tmp_path, target, data, says):
    said = json.loads(await in_thread(raw, tmp_path, data))
    assert says in said["error"]
    assert said["error"].isprintable()
    assert target.calls == []


async def test_half_a_question_is_none(tmp_path, target):
    assert "one line" in json.loads(await in_thread(raw, tmp_path, b'{"ask"', end=True))["error"]
    assert target.calls == []


@pytest.mark.parametrize("told", ['"many"', "-1", "null", "1e99", "true"])
async def test_odd_numbers_do_no_harm(tmp_path, target, told):
    question = f'{{"ask": "status", "steps": {told}, "lines": {told}}}\n'
    assert "snapshot" in json.loads(await in_thread(raw, tmp_path, question.encode()))
    assert target.calls == []


async def test_a_caller_that_says_nothing_is_hung_up_on(tmp_path, target, monkeypatch):
    monkeypatch.setattr(server, "QUESTION_SECONDS", 0.05)
    with trio.fail_after(30):
        assert await in_thread(raw, tmp_path, b"") == b""
    assert target.calls == []


async def test_a_caller_that_does_not_listen_is_hung_up_on(tmp_path, board, target, monkeypatch):
    monkeypatch.setattr(server, "ANSWER_SECONDS", 0.05)
    for number in range(2000):
        board.record("step", "", {"step": number, "text": "x" * 1000})
    with connect(tmp_path, 30) as deaf:
        deaf.sendall(b'{"ask": "status", "steps": 2000}\n')
        hung_up = select.poll()
        hung_up.register(deaf, 0)
        assert await in_thread(hung_up.poll, 30_000)
        heard = sum(len(part) for part in iter(lambda: deaf.recv(65536), b""))
    assert heard < 2_000_000, "the rest was never sent"
    assert target.calls == []
    assert (await in_thread(ask, tmp_path, "status"))["sequence"] == board.sequence


async def test_too_many_callers_are_told_so_and_the_others_stay(tmp_path, target):
    async with trio.open_nursery() as nursery:
        callers = [connect(tmp_path, 30) for _ in range(CALLERS)]
        await wait_all_tasks_blocked(0.01)
        with pytest.raises(StoreError, match="16 callers talk to this node already"):
            await in_thread(ask, tmp_path, "status")
        callers.pop().close()
        await wait_all_tasks_blocked(0.01)
        assert await in_thread(ask, tmp_path, "pause") == {"done": "paused"}
        for caller in callers:
            caller.close()
        nursery.cancel_scope.cancel()
    assert target.calls == [("pause", PERSON)]


@pytest.mark.parametrize("temporary", ["short", "long"])
async def test_the_path_of_the_folder_may_be_as_long_as_it_likes(
    tmp_path, board, nursery, temporary, monkeypatch
):
    folder = tmp_path.joinpath(*["a folder with a long name" * 4] * 4)
    folder.mkdir(parents=True)
    if temporary == "long":
        monkeypatch.setattr("tempfile.tempdir", str(folder.parent))
    assert len(str(folder)) > 400
    await nursery.start(serve_control, folder, board, RecordingTarget())
    assert (await in_thread(ask, folder, "status"))["sequence"] == 1
    assert [each.name for each in folder.iterdir()] == [NAME]
    nursery.cancel_scope.cancel()


async def test_what_a_killed_node_left_is_replaced_and_an_end_in_order_leaves_nothing(tmp_path, board):
    with listen(tmp_path):
        os.link(tmp_path / NAME, tmp_path / "kept")
    (tmp_path / "kept").rename(tmp_path / NAME)
    with pytest.raises(NobodyRunsError, match="no node runs on"):
        ask(tmp_path, "status")
    async with trio.open_nursery() as nursery:
        await nursery.start(serve_control, tmp_path, board, RecordingTarget())
        assert (await in_thread(ask, tmp_path, "status"))["sequence"] == 1
        nursery.cancel_scope.cancel()
    assert list(tmp_path.iterdir()) == []


async def test_a_folder_in_which_it_cannot_listen_is_said_in_words(tmp_path, board):
    (tmp_path / NAME).mkdir()
    with pytest.raises(StoreError, match="listening on"):
        await serve_control(tmp_path, board, RecordingTarget())


# The person's end


@pytest.mark.parametrize("where", [".", "nowhere", "file"])
def test_that_nobody_runs_is_said_with_what_to_do(tmp_path, where):
    (tmp_path / "file").touch()
    with pytest.raises(NobodyRunsError, match="start one with echo-node join"):
        ask(tmp_path / where, "status")


def test_a_node_that_only_just_starts_is_not_said_to_be_missing(tmp_path):
    with state_dir.opened(tmp_path), pytest.raises(StoreError, match="does not listen yet"):
        ask(tmp_path, "status")


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (b"hello\n", "is not a node"),
        (b"[]\n", "is not a node"),
        (b"{}\n", "is not a node"),
        (b'{"snapshot": null}\n', "is not a node"),
        (b"[" * 50_000 + b"\n", "is not a node"),
        (b'{"snapshot": {"format": 99}}\n', "another version of echo-node"),
        (b'{"snapshot": {"for', "closed the connection"),
        (b"", "closed the connection"),
        (b'{"error": "no\\u001b[2J"}\n', r"refuses: no\\x1b"),
    ],
)
def test_whatever_listens_there_the_person_gets_one_line(tmp_path, answer, says):
    def play():
        connection, _ = caught.accept()
        with connection:
            connection.recv(4096)
            connection.sendall(answer)

    with listen(tmp_path) as caught:
        player = threading.Thread(target=play)
        player.start()
        with pytest.raises(StoreError, match=says) as failed:
            ask(tmp_path, "status")
        player.join()
    assert "\n" not in str(failed.value)


def test_a_node_that_hangs_is_said_to_hang(tmp_path):
    with listen(tmp_path), pytest.raises(StoreError, match="does not answer within 0 s"):
        ask(tmp_path, "status", seconds=0.05)
    with state_dir.opened(tmp_path), pytest.raises(StoreError, match="still runs after 0 s"):
        wait_until_ended(tmp_path, seconds=0.1)
    wait_until_ended(tmp_path, seconds=0.1)


# Leaving


async def test_asked_to_leave_it_begins_nothing_new_delivers_what_waits_and_ends(tmp_path, board):
    gate, waiting, seen = PauseGate(), [1, 2], []

    def deliver_the_next():
        seen.append(gate.reasons)
        return len(waiting) and waiting.pop()

    with trio.fail_after(30):
        async with under_control(tmp_path, board, gate, waiting=deliver_the_next, battery=False) as control:
            assert isinstance(control, NodeControl)
            assert await in_thread(ask, tmp_path, "leave") == {"done": "leaving"}
            await trio.sleep_forever()
    assert (waiting, seen) == ([], [(LEAVING,)] * 3)
    assert list(tmp_path.iterdir()) == []


async def test_what_cannot_be_delivered_keeps_it_only_for_a_while(tmp_path, board):
    with trio.fail_after(30):
        async with under_control(tmp_path, board, PauseGate(), waiting=lambda: 1, drain=0.05) as control:
            control.leave()
            await trio.sleep_forever()


async def test_a_node_whose_work_is_done_ends_without_being_asked(tmp_path, board):
    gate = PauseGate()
    with trio.fail_after(30):
        async with under_control(tmp_path, board, gate) as control:
            control.pause()
            assert gate.reasons == (PERSON,)
            control.resume()
    assert gate.is_open


NODE = """
import sys, trio
from functools import partial
from pathlib import Path
from echo_node.control.server import under_control
from echo_node.runtime import exit_codes
from echo_node.runtime.pause_gate import PauseGate
from echo_node.storage import state_dir
from echo_node.telemetry.snapshot import Snapshot

async def work(folder):
    board = Snapshot()
    gate = PauseGate(lambda event, words, /, **more: board.record(event, words, more))
    board.record("started", "", {"role": "bootstrap", "peer_id": "12D3", "state": str(folder)})
    board.record("listening", "", {"addresses": []})
    async with exit_codes.until_stop_signal(), under_control(folder, board, gate):
        print("ready", flush=True)
        await trio.sleep_forever()

with state_dir.opened(Path(sys.argv[1])):
    trio.run(work, Path(sys.argv[1]))
"""


def node(folder):
    process = subprocess.Popen([sys.executable, "-c", NODE, str(folder)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    return process


def test_processes_talk_and_one_that_was_killed_is_followed_by_another(tmp_path):
    with node(tmp_path) as first:
        assert ask(tmp_path, "status")["node"]["pid"] == first.pid
        first.send_signal(signal.SIGKILL)
    with pytest.raises(NobodyRunsError):
        ask(tmp_path, "status")
    with node(tmp_path) as second:
        ask(tmp_path, "pause")
        assert ask(tmp_path, "status")["phase"] == "paused"
        watching = answers(tmp_path, "watch")
        assert next(watching)["node"]["pid"] == second.pid
        ask(tmp_path, "leave")
        wait_until_ended(tmp_path)
        assert all(each["node"]["pid"] == second.pid for each in watching), "and then it is over"
        assert second.wait(timeout=30) == 0
    assert not (tmp_path / NAME).exists()
    assert client.SECONDS > server.STILL_SECONDS
