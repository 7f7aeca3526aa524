"""The engine's process: `python -m echo_node.engine.worker.main`.

Its arguments are PIPE_FD and PARENT_PID. Started by `worker.process` only. One thread decodes and
reads the pipe between two tokens; `watchdog` is the other. Every call has a number; messages of a
finished call are ignored.
"""

from __future__ import annotations

import faulthandler
import importlib
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from echo_node.engine.base import Change, TensorBytes, Update
from echo_node.engine.continuous_batching import Batch
from echo_node.engine.engine_classes import EngineSpec, check_class, make_engine
from echo_node.engine.local import LocalEngine
from echo_node.engine.worker.serde import (
    pack_description,
    pack_finished,
    pack_prefix,
    pack_scores,
    pack_turn,
    unpack_change,
    unpack_claim,
    unpack_limits,
    unpack_reply,
    unpack_request,
    unpack_shape,
)
from echo_node.engine.worker.watchdog import Watchdog, die_with, limit_memory, out_of_memory
from echo_node.errors import EchoError, EngineError, boundary
from echo_node.runtime.ipc import Message, Pipe, PipeEndedError, PipeError, field

_REPORT_SECONDS: Final = 0.05
_PARTIAL_SECONDS: Final = 1.0
"""Seconds between two messages with what running completions have drawn."""
_KEPT_BYTES: Final = 256 * 2**20
"""Weights up to this many bytes are fetched once; larger ones tensor by tensor, on each use."""
_LIBRARIES: Final = {"torch": ("torch", "torch"), "llama": ("llama.cpp", "llama_cpp")}


class EngineServer:
    """Engine's side of the pipe, within one call."""

    def __init__(self, pipe: Pipe, call: int) -> None:
        self._pipe = pipe
        self._call = call

    def say(self, kind: str, **fields: Any) -> None:
        """Send a message of this call."""
        self._pipe.send({"kind": kind, "call": self._call, **fields})

    def hear(self, seconds: float | None = None) -> Message | None:
        """Return the next message of this call, or None if it does not come in time."""
        while (message := self._pipe.receive(seconds)) is not None:
            if field(message, "call", int) == self._call:
                return message
        return None

    def expect(self, *kinds: str) -> Message:
        """Return the next message, which must be of one of these kinds."""
        message = self.hear()
        if message is None or message["kind"] not in kinds:
            raise PipeError(f"a message {message and message['kind']!r} instead of {' or '.join(kinds)}")
        return message

    def items(self, kind: str) -> Iterator[Message]:
        """Messages of a kind, up to the word that they are over.

        The other side may break off.
        """
        while (message := self.expect(kind, "over", "end"))["kind"] != "over":
            if message["kind"] == "end":
                raise EngineError("what was being sent broke off")
            yield message

    def update(self, message: Message) -> Update:
        """Return an update whose changes are fetched when the engine opens it."""

        @contextmanager
        def changes(granule: int) -> Generator[Iterator[Change]]:
            self.say("changes?", granule=granule)
            coming = map(unpack_change, self.items("change"))
            yield coming
            for _ in coming:
                pass  # what nobody looked at must not be taken for something else

        return Update(field(message, "since", bytes), field(message, "head_id", bytes), changes)


class Weights(Mapping[str, TensorBytes]):
    """The weights of a head at the parent, fetched on access."""

    def __init__(self, conversation: EngineServer, table: list[Any]) -> None:
        self._conversation = conversation
        self._table = dict(map(unpack_shape, table))
        self._keeps = sum(size for _, _, size in self._table.values()) <= _KEPT_BYTES
        self._kept: dict[str, TensorBytes] = {}

    def __getitem__(self, name: str) -> TensorBytes:
        if name in self._kept:
            return self._kept[name]
        dtype, shape, size = self._table[name]
        self._conversation.say("tensor?", name=name)
        data = bytearray(size)
        at = 0
        for message in self._conversation.items("piece"):
            piece = field(message, "data", bytes)
            if at + len(piece) > size:
                raise PipeError(f"more of {name} than was announced")
            data[at : at + len(piece)] = piece
            at += len(piece)
        if at != size:
            raise PipeError(f"{at} bytes of {name}, and {size} were announced")
        tensor = TensorBytes(dtype, shape, memoryview(data))
        if self._keeps:
            self._kept[name] = tensor
        return tensor

    def __contains__(self, name: object) -> bool:
        return name in self._table  # without fetching it

    def __iter__(self) -> Iterator[str]:
        return iter(self._table)

    def __len__(self) -> int:
        return len(self._table)


def generate(engine: LocalEngine, conversation: EngineServer, message: Message) -> None:
    """Decode until the parent sends `end`.

    When there is room it asks for requests, and waits for the answer. So the same list of requests
    makes the same batches every time, and the same as those of an engine in the parent's process.
    """
    with engine.batch() as batch:
        if field(message, "listed", bool):
            batch.check(map(unpack_request, conversation.items("request")))
        more, asked, reported, told = True, False, 0.0, time.monotonic()
        while True:
            if more and batch.room and not asked:
                conversation.say("room", room=batch.room)
                asked = True
            finished = batch.idle and not more
            if finished:
                conversation.say("idle")
            elif time.monotonic() >= reported + _REPORT_SECONDS:
                conversation.say("going", updatable=batch.updatable)
                reported = time.monotonic()
            found = conversation.hear(None if asked or finished or batch.waits else 0)
            if found is None:
                told = _step(batch, conversation, told)
            elif found["kind"] == "end":
                return
            elif found["kind"] == "go":
                more, asked = field(found, "more", bool), False
            else:
                _take(found, batch, engine, conversation)


def _step(batch: Batch, conversation: EngineServer, told: float) -> float:
    """Draw a token each; report the ended, and at intervals the drawn.

    Return when tokens were last reported.
    """
    for each in batch.step():
        conversation.say("finished", **pack_finished(each))
    if ended := batch.ended_turns():
        for turn in ended:
            conversation.say("turn", **pack_turn(turn))
        conversation.say("turns?")
    if time.monotonic() < told + _PARTIAL_SECONDS:
        return told
    for number, drawn in batch.news_of_draws():
        conversation.say("partial", request=number, **pack_prefix(drawn))
    return time.monotonic()


def _take(message: Message, batch: Batch, engine: LocalEngine, conversation: EngineServer) -> None:
    if message["kind"] == "request":
        batch.add(unpack_request(message))
    elif message["kind"] == "reply":
        for each in batch.respond(*unpack_reply(message)):
            conversation.say("finished", **pack_finished(each))
    elif message["kind"] == "update":
        batch.update(conversation.update(message))
        conversation.say("updated", loaded=engine.loaded)
    else:
        raise PipeError(f"a message {message['kind']!r} while generating")


def load(engine: LocalEngine, conversation: EngineServer, message: Message) -> None:
    """Take whole weights, as they come."""
    engine.load(field(message, "head_id", bytes), Weights(conversation, field(message, "tensors", list)))


def patch(engine: LocalEngine, conversation: EngineServer, message: Message) -> None:
    """Take changes, as they come."""
    engine.patch(conversation.update(message))


def score(engine: LocalEngine, conversation: EngineServer, message: Message) -> None:
    """Measure claims."""
    claims = [unpack_claim(each) for each in conversation.items("claim")]
    for scores in engine.score_many(claims, unpack_limits(message)):
        conversation.say("scores", **pack_scores(scores))


def describe(engine: LocalEngine, conversation: EngineServer, _message: Message) -> None:
    """Say what the engine is."""
    conversation.say("description", **pack_description(engine.describe()))


CALLS: Final[Mapping[str, Callable[[LocalEngine, EngineServer, Message], None]]] = {
    "load": load,
    "patch": patch,
    "generate": generate,
    "score": score,
    "describe": describe,
}


def serve(engine: LocalEngine, pipe: Pipe, pulse: Watchdog) -> None:
    """Answer one call after the other, until asked to close.

    A call that fails is an answer too.
    """
    last = 0
    while True:
        pulse.busy = False
        message = pipe.receive(None)
        if message is None or message["kind"] == "close":
            return
        number = field(message, "call", int)
        if number <= last:
            continue  # sent before the other side knew that the call was over
        call = CALLS.get(message["kind"])
        if call is None:
            raise PipeError(f"a call of {message['kind']!r}")
        last, pulse.busy = number, True
        conversation = EngineServer(pipe, number)
        try:
            with boundary(EngineError, message["kind"]):
                call(engine, conversation, message)
        except PipeError:
            raise
        except EchoError as error:
            if wants_memory(error):
                out_of_memory(error.what)
            conversation.say("failed", what=error.what, advice=error.advice, loaded=engine.loaded)
        else:
            conversation.say("done", loaded=engine.loaded)


def wants_memory(error: BaseException | None) -> bool:
    """Return whether an allocation failed underneath.

    The process is then ended: half-done work is not worth keeping.
    """
    while error is not None:
        text = str(error).lower()
        if isinstance(error, MemoryError) or (
            isinstance(error, RuntimeError) and ("out of memory" in text or "can't allocate memory" in text)
        ):
            return True
        error = error.__cause__
    return False


def build(conversation: EngineServer, start: Message) -> LocalEngine:
    """Build the engine that the parent asks for, reporting every stage."""
    engine_class = field(start, "engine_class", str)
    check_class(engine_class)
    title, library = _LIBRARIES[engine_class.partition("/")[0]]
    conversation.say("stage", text=f"importing {title}")
    with boundary(EngineError, f"importing {title}"):
        importlib.import_module(library)
    if start.get("memory_bytes") is not None:
        limit_memory(field(start, "memory_bytes", int))
    conversation.say("stage", text="building the model")
    spec = EngineSpec(
        engine_class=engine_class,
        folder=Path(field(start, "folder", str)),
        device=field(start, "device", str),
        rows=field(start, "rows", int),
        threads=field(start, "threads", int),
    )
    with boundary(EngineError, f"building the model of {spec.folder}"):
        return make_engine(spec)


def run(end: socket.socket, parent: int) -> int:
    """Be the engine that the first message names. Gives the process's exit code."""
    pipe = Pipe(end)
    conversation = EngineServer(pipe, 0)
    start = conversation.expect("start")
    ceiling = None if start.get("watched_bytes") is None else field(start, "watched_bytes", int)
    pulse = Watchdog(pipe, parent=parent, memory_bytes=ceiling)
    pulse.start()
    try:
        engine = build(conversation, start)
    except PipeError:
        raise
    except EchoError as error:
        if wants_memory(error):
            out_of_memory(error.what)
        conversation.say("failed", what=error.what, advice=error.advice)
        return 1
    conversation.say("ready")
    try:
        serve(engine, pipe, pulse)
    finally:
        engine.close()
    return 0


def main(arguments: list[str]) -> int:
    """Serve the parent through the socket that it has given."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the node decides what ends
    faulthandler.enable(all_threads=False)
    parent = int(arguments[1])
    die_with(parent)
    try:
        return run(socket.socket(fileno=int(arguments[0])), parent)
    except PipeEndedError:
        return 0
    except PipeError as error:
        sys.stderr.write(f"the pipe from the node is broken: {error}\n")
        return 1


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)  # libraries take a second to tidy up what the kernel takes back anyway
