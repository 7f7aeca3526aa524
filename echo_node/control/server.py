"""Server of a node's control socket; questions and answers are lines of JSON.

    {"ask": "status"}     one snapshot
    {"ask": "watch"}      a snapshot at each change, until the caller disconnects
    {"ask": "pause"}      begin nothing, until "resume"
    {"ask": "leave"}      deliver what is made, then end

Callers, question sizes and times are bounded.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import trio

from echo_node.control.socket import CALLERS, listen
from echo_node.errors import one_line
from echo_node.runtime.pause_gate import LEAVING, PERSON, PauseGate, watch_battery
from echo_node.telemetry.snapshot import Snapshot

if TYPE_CHECKING:
    from trio_typing import TaskStatus  # libp2p brings it, with stubs of trio that lack this name

QUESTION_BYTES: Final = 65_536
"""Bytes of a question."""
QUESTION_SECONDS: Final = 5.0
"""Seconds for a question to arrive."""
ANSWER_SECONDS: Final = 10.0
"""Seconds for an answer to be read; a slower caller is disconnected."""
PAUSE_SECONDS: Final = 0.25
"""Shortest time, in seconds, between two snapshots for a watching caller."""
STILL_SECONDS: Final = 10.0
"""Seconds without news after which the snapshot is repeated, as a sign of life."""
DRAIN_SECONDS: Final = 20.0
"""Seconds for delivering groups before a leaving node ends."""
_LOOK_SECONDS: Final = 0.1
"""Seconds between two checks whether all groups are delivered."""
_MANY: Final = 10_000
"""Steps or lines that a caller may ask for."""
_GONE: Final = (trio.BrokenResourceError, trio.ClosedResourceError, trio.TooSlowError)


class ControlTarget(Protocol):
    """Actions of a node's owner; none blocks."""

    def pause(self, reason: str) -> None: ...
    def resume(self, reason: str) -> None: ...
    def leave(self) -> None: ...


class Waiting(Protocol):
    """Returns the number of groups that are not delivered yet."""

    def __call__(self) -> int: ...


class NodeControl:
    """Control of a node whose loops wait on a pause gate."""

    def __init__(self, gate: PauseGate) -> None:
        self._gate = gate
        self.left = trio.Event()

    def pause(self, reason: str = PERSON) -> None:
        self._gate.close(reason)

    def resume(self, reason: str = PERSON) -> None:
        self._gate.open(reason)

    def leave(self) -> None:
        self._gate.close(LEAVING)
        self.left.set()


def _nothing() -> int:
    return 0


@asynccontextmanager
async def under_control(
    folder: Path,
    board: Snapshot,
    gate: PauseGate,
    *,
    waiting: Waiting = _nothing,
    drain: float = DRAIN_SECONDS,
    battery: bool = True,
) -> AsyncGenerator[NodeControl]:
    """Serve the control socket during the block, and yield its control.

    On `leave` nothing new is made, waiting groups have `drain` seconds to be delivered, and then
    the block is cancelled. With `battery` the node pauses while the machine runs on battery.
    """
    control = NodeControl(gate)

    async def end_when_left() -> None:
        await control.left.wait()
        with trio.move_on_after(drain):
            while waiting():  # noqa: ASYNC110 - a number that can only be polled
                await trio.sleep(_LOOK_SECONDS)
        block.cancel()

    async with trio.open_nursery() as nursery:
        with trio.CancelScope() as block:
            await nursery.start(serve_control, folder, board, control)
            nursery.start_soon(end_when_left)
            if battery:
                nursery.start_soon(watch_battery, gate)
            yield control
        nursery.cancel_scope.cancel()


async def serve_control(
    folder: Path,
    board: Snapshot,
    target: ControlTarget,
    *,
    task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Answer callers until cancelled; the caller must hold the folder's lock."""
    with listen(folder) as listening:
        listener = trio.SocketListener(trio.socket.from_stdlib_socket(listening))
        server = _ControlServer(board, target)
        await trio.serve_listeners(server.take, [listener], task_status=_Ready(task_status))


class _Ready:
    """Task status that drops the listeners which `serve_listeners` reports."""

    def __init__(self, status: TaskStatus[None]) -> None:
        self._status = status

    def started(self, _listeners: object = None) -> None:
        self._status.started()


class _ControlServer:
    def __init__(self, board: Snapshot, target: ControlTarget) -> None:
        self._board = board
        self._target = target
        self._callers = 0

    async def take(self, caller: trio.SocketStream) -> None:
        self._callers += 1
        try:
            async with caller:
                await self._serve(caller)
        except _GONE:
            return  # the caller left, or was too slow
        finally:
            self._callers -= 1

    async def _serve(self, caller: trio.SocketStream) -> None:
        if self._callers > CALLERS:
            with trio.move_on_after(1.0):  # a close with unread data may discard the answer
                await caller.receive_some(4096)
            await _send(caller, {"error": f"{CALLERS} callers talk to this node already; try again later"})
            return
        question = await _receive(caller)
        if isinstance(question, str):
            await _send(caller, {"error": question})
            return
        match question.get("ask"):
            case "status":
                await _send(caller, {"snapshot": self._snapshot(question)})
            case "watch":
                await self._watch(caller, question)
            case "pause":
                self._target.pause(PERSON)
                await _send(caller, {"done": "paused"})
            case "resume":
                self._target.resume(PERSON)
                await _send(caller, {"done": "resumed"})
            case "leave":
                await _send(caller, {"done": "leaving"})
                self._target.leave()
                with trio.move_on_after(DRAIN_SECONDS + ANSWER_SECONDS):
                    await caller.receive_some()  # the end of the connection tells the caller
            case other:
                await _send(
                    caller, {"error": f"this node does not know the question {one_line(str(other))[:80]!r}"}
                )

    def _snapshot(self, question: dict[str, Any]) -> dict[str, Any]:
        return self._board.snapshot(steps=_count(question, "steps"), lines=_count(question, "lines"))

    async def _watch(self, caller: trio.SocketStream, question: dict[str, Any]) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_cancel_on_close, caller, nursery.cancel_scope)
            with suppress(*_GONE):
                while True:
                    seen = self._board.sequence
                    await _send(caller, {"snapshot": self._snapshot(question)})
                    await trio.sleep(PAUSE_SECONDS)
                    with trio.move_on_after(STILL_SECONDS):
                        await self._board.wait_for_news(seen)
            nursery.cancel_scope.cancel()


async def _cancel_on_close(caller: trio.SocketStream, scope: trio.CancelScope) -> None:
    """Cancel when a watching caller disconnects, or sends anything more."""
    with suppress(*_GONE):
        await caller.receive_some(1)
    scope.cancel()


async def _receive(caller: trio.SocketStream) -> dict[str, Any] | str:
    """Return the question, or a sentence why it is invalid."""
    received = bytearray()
    with trio.fail_after(QUESTION_SECONDS):
        while not received.endswith(b"\n"):
            part = await caller.receive_some(4096)
            received += part
            if len(received) > QUESTION_BYTES:
                return f"a question has at most {QUESTION_BYTES} bytes"
            if not part:
                return "a question is one line"
    try:
        question = json.loads(received)
    except (ValueError, RecursionError):
        return "a question is a line of JSON"
    return question if isinstance(question, dict) else "a question is a JSON object"


async def _send(caller: trio.SocketStream, answer: dict[str, Any]) -> None:
    with trio.fail_after(ANSWER_SECONDS):
        await caller.send_all(json.dumps(answer).encode() + b"\n")


def _count(question: dict[str, Any], name: str) -> int:
    count = question.get(name, 50)
    return max(0, min(count, _MANY)) if isinstance(count, int) else 50
