"""One worker of a jail's pool: starts the jailed process and sends batches to it.

The process starts when it is needed, and again after it has ended. Every item has its own deadline.
Code of a plug-in answers each item in a fresh child, or where this system cannot fork safely in a
fresh process: no text affects another's score. An item that kills a process which had answered
others before, as a built-in contract's may, is tried once more in a fresh one.
"""

from __future__ import annotations

import math
import random
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

from echo_node.contract.code_folder import CodeFolder
from echo_node.contract.data_rows import Part
from echo_node.contract.jail import Layer
from echo_node.contract.jail.process import JailedProcess, cause_of
from echo_node.errors import ContractError, one_line
from echo_node.runtime.ipc import Message, MessageError, PipeEndedError, PipeError, PipeSilentError, decode
from echo_node.runtime.ipc import field as message_field

_STARTS: Final = 3  # attempts to start a process before giving up
_PAUSE_SECONDS: Final = 0.02  # first pause after repeated deaths; doubles with each
_MAX_PAUSE_SECONDS: Final = 0.5
LONG_TEXT: Final = 65_536
"""Characters of an item for which it has its deadline once more: a score takes time by its text."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Failed:
    """An item without an answer, and why, in one printable line."""

    reason: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "reason", one_line(self.reason))


@dataclass(frozen=True, slots=True)
class DataFile:
    """File of a run's data set, and which part of it a contract may read."""

    path: Path
    rows: int
    held_out: int
    part: Part = "train"

    def packed(self) -> list[Any]:
        return [str(self.path.resolve()), self.rows, self.held_out, self.part]


@dataclass(frozen=True)
class WorkerLimits:
    """Which contract runs in a jail, and with which limits."""

    name: str
    version: str
    params: dict[str, Any]
    seconds: float
    start_seconds: float
    memory_bytes: int
    cpu_seconds: int
    require: tuple[str, ...]
    folders: tuple[Path, ...]
    apart: bool
    """Whether each item is answered by a process that has seen no other."""
    code: CodeFolder | None = None
    """Code that travels with the run; None for an installed contract."""
    data: DataFile | None = None
    off: frozenset[str] = frozenset()

    @property
    def contract(self) -> str:
        """Name and version, for errors."""
        return f"{self.name} {self.version}"


@dataclass(frozen=True, slots=True)
class Ready:
    """Report of a started process: the contract's score range and the jail's layers."""

    low: float
    high: float
    layers: tuple[Layer, ...]
    forks: bool
    """Whether the process answers each item in a child of its own."""
    has_environment: bool = False
    role: str = "user"
    replayable: bool = True


@dataclass
class JailWorker:
    """One jailed process and its restarts.

    One caller at a time asks; any thread may close.
    """

    terms: WorkerLimits
    starter: Executor
    """Starts processes in a thread that outlives all callers: the kernel kills a process with the
    thread that started it.
    """
    stale: bool = False
    """Whether the next request gets a fresh process."""
    _process: JailedProcess | None = None
    _ready: Ready | None = None
    _deaths: int = 0  # since the last answer
    _closed: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def ready(self) -> Ready:
        """Return the process's report, starting one if there has been none."""
        self._running()
        if self._ready is None:
            raise ContractError(f"{self.terms.contract}: its process has sent no report")
        return self._ready

    @property
    def pid(self) -> int | None:
        """The process id, if a process runs."""
        return None if self._process is None else self._process.pid

    def ask(
        self, asked: str, doing: str, items: Sequence[list[Any]], read: Callable[[list[Any]], T]
    ) -> list[T | Failed]:
        """Return the answers to a request that fits into one message, in order."""
        done: list[T | Failed] = []
        if self.stale:
            self.stale = False
            self._retire()
        while len(done) < len(items):
            process = self._running()
            forks = self.ready().forks
            process.resume()
            alone = self.terms.apart and not forks  # then a process answers one item
            try:
                with self._retire_on_interrupt():
                    some = items[len(done) : len(done) + 1] if alone else items[len(done) :]
                    self._exchange(process, asked, doing, some, read, done)
            except PipeError as error:
                reason = self._discard(process, error, self.terms.seconds)
                if forks or not process.served:
                    done.append(self._failed(doing, reason))
            if alone:
                self._retire()
        if self._process is not None:
            self._process.suspend()
        return done

    def close(self) -> None:
        """Kill the process, permanently. A caller that is waiting gets an error."""
        with self._lock:
            self._closed.set()
            if self._process is not None:
                self._process.kill()

    def reap(self) -> None:
        """Reap the process. No request may be running."""
        self._retire()

    def _exchange(
        self,
        process: JailedProcess,
        asked: str,
        doing: str,
        items: Sequence[list[Any]],
        read: Callable[[list[Any]], T],
        done: list[T | Failed],
    ) -> None:
        # Every answer repeats the token, so that one written before the request is refused.
        token = secrets.token_bytes(8)
        request = {"kind": asked, "token": token, "items": list(items)}
        _send(process, request, self.terms.seconds)
        for index, item in enumerate(items):
            message = process.receive(self.terms.seconds * longer_by(item), forks=1)
            if message["kind"] == "child":
                done.append(self._read_child(message, token, index, doing, read))
            else:
                done.append(_read_answer(message, token, index, read))
            process.served += 1
            self._deaths = 0

    def _read_child(
        self, message: Message, token: bytes, index: int, doing: str, read: Callable[[list[Any]], T]
    ) -> T | Failed:
        """Return a child's answer, or the failure of its item alone."""
        _check_asked(message, token, index)
        match message:
            case {"body": bytes(body), "status": 0} if body:
                try:
                    answer = decode(body)
                    return _read_answer({**answer, "token": token, "index": index}, token, index, read)
                except _OutOfMemoryError as error:
                    return Failed(str(error))
                except PipeError as error:
                    return self._failed(doing, f"it sent an invalid message to the node: {error}")
            case {"status": int(status)}:
                return self._failed(doing, cause_of(status))
            case {"status": None}:
                raise _ChildError("it closed its pipe to the node")
        raise PipeError("an answer that is malformed")

    def _failed(self, doing: str, reason: str) -> Failed:
        return Failed(f"{self.terms.contract}: {doing}: {reason}")

    def _running(self) -> JailedProcess:
        """Return the process, starting it if need be."""
        reason = ""
        for _ in range(_STARTS):
            if self._process is not None:
                return self._process
            self._pause()
            with self._lock:
                self._stop_if_closed()
                process = self._process = self.starter.submit(JailedProcess).result()
            try:
                with self._retire_on_interrupt():
                    self._ready = self._start(process)
            except PipeError as error:
                reason = self._discard(process, error, self.terms.start_seconds)
                if isinstance(error, PipeSilentError):
                    break
        if self._process is None:
            raise ContractError(f"{self.terms.contract}: its jail cannot be started: {reason}")
        return self._process

    def _start(self, process: JailedProcess) -> Ready:
        """Send a new process the contract to run; return its report."""
        terms = self.terms
        start = {
            "kind": "start",
            "name": terms.name,
            "version": terms.version,
            "params": terms.params,
            "data": terms.data.packed() if terms.data else None,
            "memory_bytes": terms.memory_bytes,
            "cpu_seconds": terms.cpu_seconds,
            "require": list(terms.require),
            "apart": terms.apart,
            "folders": [str(folder.resolve()) for folder in terms.folders],
            "code": terms.code.packed() if terms.code else None,
            "off": sorted(terms.off),
        }
        _send(process, start, terms.start_seconds)
        match process.receive(terms.start_seconds):
            case {
                "kind": "ready",
                "low": float(low),
                "high": float(high),
                "layers": [*layers],
                "forks": bool(forks),
                "environment": facts,
            } if math.isfinite(low) and low < high < math.inf:
                found = tuple(_read_layer(layer) for layer in layers)
                return Ready(low, high, found, forks, *_read_facts(facts))
            case {"kind": "refused", "what": str(what), "advice": str(advice)}:
                raise ContractError(what, advice=advice)
        raise PipeError("it did not report that it is ready")

    def _discard(self, process: JailedProcess, error: PipeError, seconds: float) -> str:
        """End a process after a failure; return the cause in words."""
        self._deaths += 1
        match error:
            case PipeSilentError():
                reason = f"it took longer than {seconds:g} seconds"
            case PipeEndedError():
                reason = process.cause()
            case _OutOfMemoryError() | _ChildError():
                reason = str(error)
            case _:
                reason = f"it sent an invalid message to the node: {error}"
        self._retire()
        self._stop_if_closed()
        return reason

    @contextmanager
    def _retire_on_interrupt(self) -> Iterator[None]:
        """End the process if the exchange is interrupted.

        Its pipe may hold stale answers then.
        """
        settled = False
        try:
            yield
            settled = True
        except PipeError:
            settled = True  # the caller ends the process and reports why
            raise
        finally:
            if not settled:
                self._retire()

    def _retire(self) -> None:
        with self._lock:
            process, self._process = self._process, None
        if process is not None:
            process.end()

    def _pause(self) -> None:
        """Wait after repeated deaths, so that restarts do not keep the machine busy."""
        if self._deaths > 2:
            seconds = min(_MAX_PAUSE_SECONDS, _PAUSE_SECONDS * 2 ** min(self._deaths - 2, 10))
            self._closed.wait(random.uniform(seconds / 2, seconds))  # noqa: S311 -- no secret

    def _stop_if_closed(self) -> None:
        if self._closed.is_set():
            raise ContractError(f"{self.terms.contract}: its jail was closed")


class _OutOfMemoryError(PipeError):
    """The process still runs and has no memory left."""


class _ChildError(PipeError):
    """A child has closed its pipe and still runs."""


def longer_by(item: Sequence[Any]) -> float:
    """Return the factor of the deadline for an item, by the characters of its texts."""
    return 1.0 + sum(len(part) for part in item if isinstance(part, str)) / LONG_TEXT


def _send(process: JailedProcess, message: Message, seconds: float) -> None:
    try:
        process.pipe.send(message, seconds=seconds)
    except MessageError as error:  # the item fails like one that kills the process
        raise PipeError(error.what) from error


def _read_layer(entry: object) -> Layer:
    match entry:
        case [str(name), bool(active), str(why_not)]:
            return Layer(name, active, why_not)
    raise PipeError("a layer that is malformed")


def _read_facts(facts: object) -> tuple[bool, str, bool]:
    match facts:
        case None:
            return False, "user", True
        case [bool(has_environment), "user" | "tool" as role, bool(replayable)]:
            return has_environment, str(role), replayable
    raise PipeError("facts about an environment that are malformed")


def _check_asked(message: Message, token: bytes, index: int) -> None:
    if (message_field(message, "token", bytes), message_field(message, "index", int)) != (token, index):
        raise PipeError("an answer to something that was not asked")


def _read_answer(message: Message, token: bytes, index: int, read: Callable[[list[Any]], T]) -> T | Failed:
    _check_asked(message, token, index)
    match message:
        case {"kind": "result", "fields": [*fields]}:
            return read(fields)
        case {"kind": "failed", "reason": str(reason), "out_of_memory": bool(out_of_memory)}:
            if out_of_memory:
                raise _OutOfMemoryError(reason)
            return Failed(reason)
    raise PipeError("an answer that is malformed")
