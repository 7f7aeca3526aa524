"""Client of an engine in a process of its own.

A crash there is an `EngineError` here, and the next call starts another process. After a crash
nothing is loaded: the caller loads again and repeats the work with the same keys, which gives the
same draws; what the process had drawn until about a second before is not drawn again. Weights are
sent in pieces from the caller's memory, which must not change until the call is over.
"""

from __future__ import annotations

import logging
import os
import random
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

from echo_node.engine.base import (
    Claim,
    Description,
    Finished,
    Ids,
    Respond,
    SamplingLimits,
    Scores,
    SlotRequest,
    TensorBytes,
    Update,
    never,
    no_environment,
    no_news,
)
from echo_node.engine.engine_classes import EngineSpec, check_class
from echo_node.engine.host_resources import available_memory, free_cores
from echo_node.engine.worker.partial_draws import PartialDraws
from echo_node.engine.worker.process import EngineProcess
from echo_node.engine.worker.rpc import RpcCall
from echo_node.engine.worker.rpc_generate import GenerateCall, send_changes
from echo_node.engine.worker.serde import (
    pack_claim,
    pack_limits,
    pack_request,
    pack_shape,
    pieces,
    unpack_description,
    unpack_scores,
)
from echo_node.errors import EngineError
from echo_node.runtime.ipc import Message, PipeEndedError, PipeError, field

_log = logging.getLogger(__name__)

_GRACE_SECONDS: Final = 5.0
"""Seconds for a process to end by itself after it closed the pipe or was asked to."""


def log_stage(stage: str) -> None:
    """Log a stage of the start: the default for `progress`."""
    _log.info("%s", stage)


@dataclass
class Backoff:
    """Restart delay: doubles with every failure, with jitter, up to a cap."""

    first_seconds: float = 0.5
    most_seconds: float = 30.0
    failures: int = 0

    def seconds(self, luck: float) -> float:
        """Return the delay in seconds, for a `luck` between 0 and 1."""
        if not self.failures:
            return 0.0
        full = min(self.most_seconds, self.first_seconds * 2.0 ** min(self.failures - 1, 30))
        return full * (0.5 + luck / 2)


class WorkerEngine:
    """An engine in another process, started with the first call.

    `memory_bytes` is the most memory that the process may take; None means what the machine has
    free when it starts.
    """

    def __init__(
        self,
        spec: EngineSpec,
        *,
        memory_bytes: int | None = None,
        progress: Callable[[str], None] = log_stage,
        start_seconds: float = 300.0,
        silent_seconds: float = 30.0,
        backoff: Backoff | None = None,
    ) -> None:
        check_class(spec.engine_class)
        self._spec = spec
        self._memory_bytes = memory_bytes
        self._progress = progress
        self._start_seconds = start_seconds
        self._silent_seconds = silent_seconds
        self.backoff = Backoff() if backoff is None else backoff
        self._not_before = 0.0
        self._busy = threading.Lock()
        self._closed = threading.Event()
        self._process: EngineProcess | None = None
        self._finalizer: weakref.finalize[..., WorkerEngine] | None = None
        self._calls = 0
        self._loaded: bytes | None = None
        self._partial = PartialDraws()

    @property
    def engine_class(self) -> str:
        """Kind and arithmetic."""
        return self._spec.engine_class

    @property
    def loaded(self) -> bytes | None:
        """The id of the head whose weights are in."""
        return self._loaded

    @property
    def pid(self) -> int | None:
        """The process, if there is one."""
        return None if self._process is None else self._process.pid

    @property
    def memory_seen(self) -> int | None:
        """Resident bytes in the process's last heartbeat."""
        return None if self._process is None else self._process.memory_seen

    def start(self) -> None:
        """Start the process now, so that the first call need not wait for it."""
        with self._alone("starting"):
            self._running()

    def load(self, head_id: bytes, weights: Mapping[str, TensorBytes]) -> None:
        """Take these weights: all of them or, if one is wrong, none."""
        with self._call("loading weights") as call:
            call.say("load", head_id=head_id, tensors=[pack_shape(*item) for item in weights.items()])
            while (message := call.expect("tensor?", "done"))["kind"] == "tensor?":
                tensor = weights[field(message, "name", str)]
                call.send_all("piece", ({"data": piece} for piece in pieces(tensor)))

    def patch(self, update: Update) -> None:
        """Go from the weights that are loaded to those of another head."""
        with self._call("changing weights") as call:
            call.say("patch", since=update.since, head_id=update.head_id)
            while (message := call.expect("changes?", "done"))["kind"] == "changes?":
                send_changes(call, update, message)

    def generate(
        self,
        requests: Iterable[SlotRequest],
        *,
        stop: Callable[[], bool] = never,
        news: Callable[[], Update | None] = no_news,
        respond: Respond = no_environment,
    ) -> Iterator[Finished]:
        """Yield completions, each as it ends; see `Engine`.

        `stop` and `news` are called about ten times a second. The process goes on with other
        completions while `respond` runs here.
        """
        with self._call("generating") as call:
            listed = isinstance(requests, Sequence)
            call.say("generate", listed=listed)
            if listed:  # all of them are looked at before any work
                call.send_all("request", map(pack_request, requests))
            self._partial.begin(self._loaded)
            drawing = GenerateCall(call, iter(requests), news, self._take_loaded, self._partial, respond)
            try:
                for finished in drawing.until(stop):
                    self.backoff.failures = 0
                    yield finished
                call.settle()
            except PipeError:
                raise  # the process is gone, and the caller may want the same again
            except BaseException:
                self._partial.clear()
                raise
            self._partial.clear()

    def score(self, prompt: Ids, ids: Ids, limits: SamplingLimits) -> Scores:
        """Measure a claimed completion by one prefill."""
        return self.score_many([Claim(prompt, ids)], limits)[0]

    def score_many(self, claims: Sequence[Claim], limits: SamplingLimits) -> list[Scores]:
        """Measure several; see `Engine`."""
        packed = [pack_claim(claim) for claim in claims]
        with self._call("scoring") as call:
            call.say("score", **pack_limits(limits))
            call.send_all("claim", packed)
            scores = [unpack_scores(call.expect("scores")) for _ in claims]
            call.expect("done")
            self.backoff.failures = 0
            return scores

    def describe(self) -> Description:
        """Describe this engine."""
        with self._call("describing") as call:
            call.say("describe")
            description = unpack_description(call.expect("description"))
            call.expect("done")
            return description

    def close(self) -> None:
        """End the process. A call that runs in another thread fails."""
        self._closed.set()
        alone = self._busy.acquire(blocking=False)
        try:
            process = self._process
            if process is None:
                return
            if alone:
                self._part_from(process)
            else:
                process.kill()  # the call that runs sees it, and reaps it
        finally:
            if alone:
                self._busy.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @contextmanager
    def _call(self, doing: str) -> Generator[RpcCall]:
        """Run one call, starting the process if need be.

        An error says how a process was lost.
        """
        with self._alone(doing):
            process = self._running()
            self._calls += 1
            call = RpcCall(process, self._calls, self._silent_seconds)
            try:
                yield call
            except PipeError as error:
                raise self._lost(process, error, doing) from error
            except BaseException:
                self._settle(call, process, doing)
                raise
            finally:
                if call.outcome:
                    self._take_loaded(call.outcome)

    def _settle(self, call: RpcCall, process: EngineProcess, doing: str) -> None:
        """Leave a clean pipe after an interrupted call, or end the process.

        The error that interrupted the call is the one to be seen.
        """
        try:
            call.settle()
        except PipeError as error:
            _log.warning("%s", self._lost(process, error, doing))

    @contextmanager
    def _alone(self, doing: str) -> Generator[None]:
        if not self._busy.acquire(blocking=False):
            raise EngineError(f"{doing} while another call runs", advice="make one call at a time")
        try:
            if self._closed.is_set():
                raise EngineError(f"{doing} with an engine that is closed", advice="make another")
            yield
        finally:
            if self._closed.is_set() and self._process is not None:  # closed while it was starting
                self._part_from(self._process)
            self._busy.release()

    def _running(self) -> EngineProcess:
        if self._process is not None and not self._process.pipe.ended():
            return self._process
        if self._process is not None:  # it went while nobody was calling: no work is lost but the weights
            _log.warning("%s", self._lost(self._process, PipeEndedError("it has gone"), "idle"))
        self._closed.wait(max(0.0, self._not_before - time.monotonic()))
        if self._closed.is_set():
            raise EngineError(f"{self._name} was closed before it started", advice="make another")
        threads = free_cores() if self._spec.threads is None else self._spec.threads
        process = EngineProcess(_environment(threads))
        self._process = process
        # Should nobody close it, it ends with this engine or with the interpreter.
        self._finalizer = weakref.finalize(self, process.end)
        try:
            self._begin(process, threads)
        except PipeError as error:
            raise self._lost(process, error, "starting") from error
        except BaseException:
            self._give_up(process)
            raise
        return process

    def _begin(self, process: EngineProcess, threads: int) -> None:
        """Tell a new process what it is, and wait until it is that."""
        spec, until = self._spec, time.monotonic() + self._start_seconds
        # Python takes long to load on a busy machine, and sends nothing until then.
        call = RpcCall(process, 0, self._silent_seconds, first_seconds=self._start_seconds)
        call.say(
            "start",
            engine_class=spec.engine_class,
            folder=str(spec.folder),
            device=spec.device,
            rows=spec.rows,
            threads=threads,
            memory_bytes=self._memory_bytes,
            watched_bytes=available_memory() if self._memory_bytes is None else self._memory_bytes,
        )
        while True:
            message = call.hear(until - time.monotonic())
            if message is None:
                raise PipeError(f"it did not start within {self._start_seconds:g} seconds")
            if message["kind"] == "stage":
                self._progress(field(message, "text", str))
            elif message["kind"] == "failed":
                call.check(message)
            elif message["kind"] == "ready":
                self._progress("ready")
                return
            else:
                raise PipeError(f"it sent {message['kind']!r} while starting")

    def _lost(self, process: EngineProcess, error: PipeError, doing: str) -> EngineError:
        """End what is left of a process, and say what became of it."""
        ended = isinstance(error, PipeEndedError)
        gone = process.wait(_GRACE_SECONDS if ended else 0)
        self._give_up(process)
        if self._closed.is_set():
            return EngineError(f"{self._name} was closed while {doing}", advice="make another")
        what = f"{self._name} died while {doing}: "
        what += process.cause() if gone else f"{error.what}, and it was killed"
        if (lines := process.last_lines()) and lines not in what:
            what += f"; its last lines: {lines}"
        if "out of memory" in what:
            return EngineError(
                what,
                advice="load the weights and call again, once more memory is free or allowed (--max-memory), or take a smaller model",
            )
        return EngineError(what, advice="load the weights and call again: a new process starts by itself")

    def _give_up(self, process: EngineProcess) -> None:
        process.end()
        if self._finalizer is not None:
            self._finalizer.detach()
        self._process, self._loaded = None, None
        self.backoff.failures += 1
        self._not_before = time.monotonic() + self.backoff.seconds(random.random())  # noqa: S311 - jitter

    def _part_from(self, process: EngineProcess) -> None:
        self._process, self._loaded = None, None
        try:
            process.pipe.send({"kind": "close", "call": self._calls}, silent_seconds=_GRACE_SECONDS)
        except PipeError:
            process.end()
        else:
            process.end(_GRACE_SECONDS)
        if self._finalizer is not None:
            self._finalizer.detach()

    def _take_loaded(self, message: Message) -> None:
        loaded = message.get("loaded")
        self._loaded = None if loaded is None else field(message, "loaded", bytes)

    @property
    def _name(self) -> str:
        return f"the engine {self._spec.engine_class} of {self._spec.folder.name}"


def _environment(threads: int) -> dict[str, str]:
    """Return the child's environment: ours, with thread counts set.

    Libraries read those at import.
    """
    number = str(threads)
    return {
        **os.environ,
        "OMP_WAIT_POLICY": "passive",
        "OMP_NUM_THREADS": number,
        "MKL_NUM_THREADS": number,
    }
