"""The node's end: it answers its person. A question is one line of JSON, and so is each answer:

    {"ask": "status"}     one snapshot of the board
    {"ask": "watch"}      a snapshot at each change, until the caller leaves
    {"ask": "pause"}      begin nothing, until "resume"
    {"ask": "leave"}      say goodbye and end

It is bounded, like everything that listens: in callers, in what they say, and in how long they may take. It reads the
board and moves the hand; it knows neither what a node does nor how it ends.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import trio

from echo_node.board import Board
from echo_node.control.place import CALLERS, listening
from echo_node.errors import one_line
from echo_node.pausing import LEAVING, PERSON, Gate, watch_battery

if TYPE_CHECKING:
    from trio_typing import TaskStatus  # libp2p brings it, with stubs of trio that lack this name

QUESTION_BYTES: Final = 65_536
QUESTION_SECONDS: Final = 5.0
ANSWER_SECONDS: Final = 10.0
"""For an answer to be taken. Who takes longer is hung up on."""
PAUSE_SECONDS: Final = 0.25
"""Between two snapshots for one who watches."""
STILL_SECONDS: Final = 10.0
"""Without news, after which the same is said again, so that a caller knows that somebody is there."""
DRAIN_SECONDS: Final = 20.0
"""For delivering what is made, before a node ends that was asked to leave."""
_LOOK_SECONDS: Final = 0.1
_MANY: Final = 10_000
_GONE: Final = (trio.BrokenResourceError, trio.ClosedResourceError, trio.TooSlowError)


class Hand(Protocol):
    """What a person can do to a node. None of it waits."""

    def pause(self, reason: str) -> None: ...
    def resume(self, reason: str) -> None: ...
    def leave(self) -> None: ...


class Waiting(Protocol):
    """How many things a node has made that nobody has taken yet."""

    def __call__(self) -> int: ...


class NodeHand:
    """The hand of a node whose loops ask a gate."""

    def __init__(self, gate: Gate) -> None:
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
    board: Board,
    gate: Gate,
    *,
    waiting: Waiting = _nothing,
    drain: float = DRAIN_SECONDS,
    battery: bool = True,
) -> AsyncGenerator[NodeHand]:
    """A person can talk to the node for as long as the block lasts, which is given the same hand. Asked to leave, it makes
    nothing new, has a while to deliver what waits, and then the block is cancelled. On battery it pauses, unless told not to.
    """
    hand = NodeHand(gate)

    async def end_when_left() -> None:
        await hand.left.wait()
        with trio.move_on_after(drain):
            while waiting():  # noqa: ASYNC110 - a number that is looked at, and tells nobody
                await trio.sleep(_LOOK_SECONDS)
        block.cancel()

    async with trio.open_nursery() as nursery:
        with trio.CancelScope() as block:
            await nursery.start(serve_control, folder, board, hand)
            nursery.start_soon(end_when_left)
            if battery:
                nursery.start_soon(watch_battery, gate)
            yield hand
        nursery.cancel_scope.cancel()


async def serve_control(
    folder: Path, board: Board, hand: Hand, *, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    """Answer whoever calls, until cancelled. The lock of the folder must be ours."""
    with listening(folder) as caught:
        listener = trio.SocketListener(trio.socket.from_stdlib_socket(caught))
        desk = _Desk(board, hand)
        await trio.serve_listeners(desk.take, [listener], task_status=_Ready(task_status))


class _Ready:
    """`serve_listeners` says with what it is ready; who starts us need not know."""

    def __init__(self, status: TaskStatus[None]) -> None:
        self._status = status

    def started(self, _listeners: object = None) -> None:
        self._status.started()


class _Desk:
    def __init__(self, board: Board, hand: Hand) -> None:
        self._board = board
        self._hand = hand
        self._callers = 0

    async def take(self, caller: trio.SocketStream) -> None:
        self._callers += 1
        try:
            async with caller:
                await self._serve(caller)
        except _GONE:
            return  # it left, or was hung up on: its own business
        finally:
            self._callers -= 1

    async def _serve(self, caller: trio.SocketStream) -> None:
        if self._callers > CALLERS:
            with trio.move_on_after(1.0):  # whoever is hung up on with words unread may never see the answer
                await caller.receive_some(4096)
            await _say(caller, {"error": f"{CALLERS} callers talk to this node already; try again later"})
            return
        question = await _hear(caller)
        if isinstance(question, str):
            await _say(caller, {"error": question})
            return
        match question.get("ask"):
            case "status":
                await _say(caller, {"snapshot": self._snapshot(question)})
            case "watch":
                await self._watch(caller, question)
            case "pause":
                self._hand.pause(PERSON)
                await _say(caller, {"done": "paused"})
            case "resume":
                self._hand.resume(PERSON)
                await _say(caller, {"done": "resumed"})
            case "leave":
                await _say(caller, {"done": "leaving"})
                self._hand.leave()
                with trio.move_on_after(DRAIN_SECONDS + ANSWER_SECONDS):
                    await caller.receive_some()  # the end of the connection tells the caller that it is over
            case other:
                await _say(
                    caller, {"error": f"this node does not know the question {one_line(str(other))[:80]!r}"}
                )

    def _snapshot(self, question: dict[str, Any]) -> dict[str, Any]:
        return self._board.snapshot(steps=_count(question, "steps"), lines=_count(question, "lines"))

    async def _watch(self, caller: trio.SocketStream, question: dict[str, Any]) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_hear_the_end, caller, nursery.cancel_scope)
            with suppress(*_GONE):
                while True:
                    seen = self._board.sequence
                    await _say(caller, {"snapshot": self._snapshot(question)})
                    await trio.sleep(PAUSE_SECONDS)
                    with trio.move_on_after(STILL_SECONDS):
                        await self._board.wait_for_news(seen)
            nursery.cancel_scope.cancel()


async def _hear_the_end(caller: trio.SocketStream, scope: trio.CancelScope) -> None:
    """Whoever watches has said everything. More, or the end, is the end."""
    with suppress(*_GONE):
        await caller.receive_some(1)
    scope.cancel()


async def _hear(caller: trio.SocketStream) -> dict[str, Any] | str:
    """The question, or in words why it is none."""
    heard = bytearray()
    with trio.fail_after(QUESTION_SECONDS):
        while not heard.endswith(b"\n"):
            part = await caller.receive_some(4096)
            heard += part
            if len(heard) > QUESTION_BYTES:
                return f"a question has at most {QUESTION_BYTES} bytes"
            if not part:
                return "a question is one line"
    try:
        question = json.loads(heard)
    except (ValueError, RecursionError):
        return "a question is a line of JSON"
    return question if isinstance(question, dict) else "a question is a JSON object"


async def _say(caller: trio.SocketStream, answer: dict[str, Any]) -> None:
    with trio.fail_after(ANSWER_SECONDS):
        await caller.send_all(json.dumps(answer).encode() + b"\n")


def _count(question: dict[str, Any], name: str) -> int:
    told = question.get(name, 50)
    return max(0, min(told, _MANY)) if isinstance(told, int) else 50
