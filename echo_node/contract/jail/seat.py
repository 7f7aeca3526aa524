"""One seat of a pool: a jailed process, started when it is needed and again when it has ended, and batches put to it.

Every item has its own deadline. An item that ends a process which had answered others before is tried once more in a
fresh one: something left behind by another text may have been the cause. It knows nothing of what items mean.
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

from echo_node.contract.jail.layer import Layer
from echo_node.contract.jail.pipe import PipeEndedError, PipeError, PipeSilentError
from echo_node.contract.jail.process import JailedProcess
from echo_node.errors import ContractError, one_line

_STARTS: Final = 3
_PAUSE_SECONDS: Final = 0.02
_LONGEST_PAUSE_SECONDS: Final = 0.5

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Failed:
    """What came instead of an answer, in one printable line."""

    reason: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "reason", one_line(self.reason))


@dataclass(frozen=True)
class Terms:
    """What runs in a jail, and on which terms."""

    name: str
    version: str
    params: dict[str, Any]
    seconds: float
    start_seconds: float
    memory_bytes: int
    cpu_seconds: int
    require: tuple[str, ...]
    folders: tuple[Path, ...]
    off: frozenset[str] = frozenset()

    @property
    def contract(self) -> str:
        """Who is to blame."""
        return f"{self.name} {self.version}"


@dataclass(frozen=True, slots=True)
class Ready:
    """What a process says of itself before its first request."""

    low: float
    high: float
    layers: tuple[Layer, ...]


@dataclass
class Seat:
    """A process, or the place for one. One caller at a time asks; anybody may close."""

    terms: Terms
    starter: Executor
    """Whose thread outlives all callers: the kernel ends a process with the thread that started it."""
    stale: bool = False
    """Whether the next caller gets a fresh process."""
    _process: JailedProcess | None = None
    _ready: Ready | None = None
    _deaths: int = 0  # since the last answer
    _closed: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def ready(self) -> Ready:
        """What the contract and its jail are like. Starts a process if there has been none."""
        self._running()
        if self._ready is None:
            raise ContractError(f"{self.terms.contract}: its process has said nothing of itself")
        return self._ready

    @property
    def pid(self) -> int | None:
        """The number of the process, if there is one."""
        return None if self._process is None else self._process.pid

    def ask(
        self, asked: str, doing: str, items: Sequence[list[Any]], read: Callable[[list[Any]], T]
    ) -> list[T | Failed]:
        """The answers to a request that fits into one message, in order."""
        done: list[T | Failed] = []
        if self.stale:
            self.stale = False
            self._retire()
        while len(done) < len(items):
            process = self._running()
            process.wake()
            try:
                with self._in_one_piece():
                    self._exchange(process, asked, items[len(done) :], read, done)
            except PipeError as error:
                reason = self._bury(process, error, self.terms.seconds)
                if not process.served:
                    done.append(Failed(f"{self.terms.contract}: {doing}: {reason}"))
        if self._process is not None:
            self._process.rest()
        return done

    def close(self) -> None:
        """End the process, for good. Whoever is asking gets an error."""
        with self._lock:
            self._closed.set()
            if self._process is not None:
                self._process.kill()

    def reap(self) -> None:
        """Let go of what is left of the process. Nobody may be asking."""
        self._retire()

    def _exchange(
        self,
        process: JailedProcess,
        asked: str,
        items: Sequence[list[Any]],
        read: Callable[[list[Any]], T],
        done: list[T | Failed],
    ) -> None:
        # Every answer repeats the token: one that was written before the question is none.
        token = secrets.token_bytes(8)
        process.pipe.send([token, asked, *items], self.terms.seconds)
        for index in range(len(items)):
            message = process.pipe.receive(self.terms.seconds)
            done.append(_understood(message, [token, index], read))
            process.served += 1
            self._deaths = 0

    def _running(self) -> JailedProcess:
        """The process, started if need be."""
        reason = ""
        for _ in range(_STARTS):
            if self._process is not None:
                return self._process
            self._pause()
            with self._lock:
                self._stop_if_closed()
                process = self._process = self.starter.submit(JailedProcess, self.terms.folders).result()
            try:
                with self._in_one_piece():
                    self._ready = self._greet(process)
            except PipeError as error:
                reason = self._bury(process, error, self.terms.start_seconds)
                if isinstance(error, PipeSilentError):
                    break
        if self._process is None:
            raise ContractError(f"{self.terms.contract}: its jail cannot be started: {reason}")
        return self._process

    def _greet(self, process: JailedProcess) -> Ready:
        """Tell a new process what to run. What it then is like."""
        terms = self.terms
        bounds = [terms.memory_bytes, terms.cpu_seconds, list(terms.require), sorted(terms.off)]
        process.pipe.send([terms.name, terms.version, terms.params, *bounds], terms.start_seconds)
        match process.pipe.receive(terms.start_seconds):
            case ["ready", float(low), float(high), [*layers]] if (
                math.isfinite(low) and low < high < math.inf
            ):
                return Ready(
                    low, high, tuple(Layer(str(name), bool(active), str(why)) for name, active, why in layers)
                )
            case ["refused", str(what), str(advice)]:
                raise ContractError(what, advice=advice)
        raise PipeError("it did not say that it is ready")

    def _bury(self, process: JailedProcess, error: PipeError, seconds: float) -> str:
        """End a process that something is wrong with. What that is, in words."""
        self._deaths += 1
        match error:
            case PipeSilentError():
                reason = f"it took longer than {seconds:g} seconds"
            case PipeEndedError():
                reason = process.cause()
            case _OutOfMemoryError():
                reason = str(error)
            case _:
                reason = f"it sent nonsense through the pipe to the node: {error}"
        self._retire()
        self._stop_if_closed()
        return reason

    @contextmanager
    def _in_one_piece(self) -> Iterator[None]:
        """Who breaks off, by Ctrl-C for one, leaves a pipe of which nobody knows what is in it: the process goes."""
        whole = False
        try:
            yield
            whole = True
        except PipeError:
            whole = True  # then it is looked into why
            raise
        finally:
            if not whole:
                self._retire()

    def _retire(self) -> None:
        with self._lock:
            process, self._process = self._process, None
        if process is not None:
            process.end()

    def _pause(self) -> None:
        """A text that ends its process costs a start; many in a row may not keep the machine busy with that."""
        if self._deaths > 2:
            longest = min(_LONGEST_PAUSE_SECONDS, _PAUSE_SECONDS * 2 ** min(self._deaths - 2, 10))
            self._closed.wait(random.uniform(longest / 2, longest))  # noqa: S311 -- no secret

    def _stop_if_closed(self) -> None:
        if self._closed.is_set():
            raise ContractError(f"{self.terms.contract}: its jail was closed")


class _OutOfMemoryError(PipeError):
    """The process lives, and has no memory left."""


def _understood(message: list[Any], expected: list[Any], read: Callable[[list[Any]], T]) -> T | Failed:
    if message[:2] != expected:
        raise PipeError("an answer to something that was not asked")
    match message[2:]:
        case [True, *fields]:
            return read(fields)
        case [False, str(reason), bool(spent)]:
            if spent:
                raise _OutOfMemoryError(reason)
            return Failed(reason)
    raise PipeError("an answer that says nothing")
