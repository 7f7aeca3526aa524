"""Jailed contracts: a pool of isolated processes per contract and parameters.

    with Sandbox("digits-reverse", "1", {}) as sandbox:
        [prompt] = sandbox.prompts([key])
        right, failed = sandbox.scores([(prompt, "31284"), (prompt, hostile)])

An item on which the contract fails is one `Failed` with its reason; the others of the batch are
scored. `JailedContract` offers the same as an ordinary contract. The layers of the jail are in
`jail`. Code of a plug-in sees each text in a process that has seen no other. Built-in contracts
keep nothing of a text, and one process answers for many; `renew` replaces the processes.
"""

from __future__ import annotations

import math
import queue
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Final, Self, TypeVar, final

import msgpack

from echo_node.contract.api import REPLY_BYTES, Contract, Prompt, Reply, Score, Turn
from echo_node.contract.code_folder import CodeFolder
from echo_node.contract.jail import Layer
from echo_node.contract.jail.serde import (
    TEMPLATE,
    TEXT_BYTES,
    pack_prompt,
    pack_turns,
    prompt_bytes,
    turns_bytes,
    unpack_prompt,
)
from echo_node.contract.jail.worker import DataFile, Failed, JailWorker, Ready, WorkerLimits
from echo_node.contract.registry import is_built_in
from echo_node.errors import ConfigError, ContractError, boundary
from echo_node.runtime.ipc import PipeError

_CPU_SECONDS: Final = 3600  # of one process in its life; then a fresh one takes over
_BATCH_ITEMS: Final = 256
_BATCH_BYTES: Final = 4 * 2**20
_WORKER_SECONDS: Final = 600.0  # how long a caller waits for a free process
_CLOSE_SECONDS: Final = 30.0

T = TypeVar("T")
Item = tuple[list[Any], int | str]
"""Fields of a request, and its size in bytes or the reason why it cannot be sent."""


@final
class Sandbox:
    """A contract in a pool of jailed processes.

    Thread-safe; each call takes one process.
    """

    def __init__(
        self,
        name: str,
        version: str,
        params: Mapping[str, object] | None = None,
        *,
        workers: int = 1,
        seconds: float = 5.0,
        memory_bytes: int = 2**30,
        start_seconds: float = 60.0,
        require: Iterable[str] = (),
        folders: Iterable[Path] = (),
        code: CodeFolder | None = None,
        data: DataFile | None = None,
        _without: Iterable[str] = (),
    ) -> None:
        """Prepare the pool; processes start with the first call.

        `seconds` bounds one score and `memory_bytes` one process; `require` names layers without
        which nothing runs, as `jail.required` does; `folders` are searched for packages after the
        usual places. `code` is the code that travels with a run, and `data` its data set.
        """
        if workers < 1:
            raise ConfigError(f"a jail has at least one process, not {workers}")
        terms = WorkerLimits(
            name=name,
            version=version,
            params=dict(params or {}),
            seconds=seconds,
            start_seconds=start_seconds,
            memory_bytes=memory_bytes,
            cpu_seconds=_CPU_SECONDS,
            require=tuple(require),
            folders=tuple(folders),
            code=code,
            apart=name != TEMPLATE and (code is not None or not is_built_in(name, version)),
            data=data,
            off=frozenset(_without),
        )
        self._what = terms.contract
        with boundary(ContractError, f"{self._what}: handing its parameters on"):
            msgpack.packb(terms.params)
        starter = ThreadPoolExecutor(1, thread_name_prefix="jail starter")
        self._workers = [JailWorker(terms, starter) for _ in range(workers)]
        self._free: queue.LifoQueue[JailWorker] = queue.LifoQueue()
        for worker in self._workers:
            self._free.put(worker)
        self._finish = weakref.finalize(self, _finish, self._workers, self._free, starter)

    def prompts(self, keys: Sequence[bytes], *, held_out: bool = False) -> list[Prompt]:
        """Return the prompts of these keys; raise `ContractError` if one cannot be made."""
        asked = self._ask(
            "held_out" if held_out else "prompt",
            "making a prompt",
            [([bytes(key)], len(key)) for key in keys],
            _read_prompt,
        )
        return [_or_raise(made) for made in asked]

    def scores(self, texts: Sequence[tuple[Prompt, str | Sequence[Turn]]]) -> list[Score | Failed]:
        """Return the score of each completion of its prompt, or why there is none.

        A completion is its text, or with an environment its turns.
        """
        low, high = self.range

        def read(fields: list[Any]) -> Score:
            match fields:
                case [float(value), str(reason)] if math.isfinite(value) and low <= value <= high:
                    return Score(value, reason)
            raise PipeError("a score out of range")

        items: list[Item] = [
            (
                [pack_prompt(prompt), text if isinstance(text, str) else pack_turns(text)],
                _size(prompt, text),
            )
            for prompt, text in texts
        ]
        return self._ask("score", "scoring a completion", items, read)

    def replies(self, episodes: Sequence[tuple[Prompt, Sequence[Turn]]]) -> list[Reply | Failed]:
        """Return the environment's answer to the last turn of each, or why there is none."""
        items: list[Item] = [
            ([pack_prompt(prompt), pack_turns(turns)], _size(prompt, turns)) for prompt, turns in episodes
        ]
        return self._ask("reply", "answering a turn", items, _read_reply)

    def answers(self, prompts: Sequence[Prompt]) -> list[str | Failed]:
        """Return the contract's own answers to these prompts, where it has any."""
        items = [([pack_prompt(prompt)], _size(prompt, "")) for prompt in prompts]
        return self._ask("answer", "answering its own prompt", items, _read_answer)

    def renders(self, variables: Sequence[Mapping[str, object]]) -> list[str]:
        """Return the texts of the sandbox's chat template for these variables."""
        doing = "rendering the model's chat template"
        with boundary(ContractError, doing):
            items: list[Item] = [([dict(each)], len(msgpack.packb(dict(each)))) for each in variables]
        return [_or_raise(made) for made in self._ask("render", doing, items, _read_answer)]

    @property
    def range(self) -> tuple[float, float]:
        """Lowest and highest score."""
        ready = self.ready()
        return ready.low, ready.high

    def ready(self) -> Ready:
        """Return what a process says of the contract."""
        with self._worker() as worker:
            return worker.ready()

    def layers(self) -> list[Layer]:
        """Return the layers of this jail as one of its processes measured them on itself."""
        with self._worker() as worker:
            return list(worker.ready().layers)

    def renew(self) -> None:
        """Make later calls use processes that have seen no text yet."""
        for worker in self._workers:
            worker.stale = True

    def close(self) -> None:
        """End every process. Callers that are waiting get an error."""
        self._finish()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _ask(
        self, asked: str, doing: str, items: Sequence[Item], read: Callable[[list[Any]], T]
    ) -> list[T | Failed]:
        """Return the answers to items; those that may not be sent fail with a reason."""
        answers: list[T | Failed | None] = [
            Failed(f"{self._what}: {doing}: {size}") if isinstance(size, str) else None for _, size in items
        ]
        for batch in _batches([size for _, size in items]):
            with self._worker() as worker:
                results = worker.ask(asked, doing, [items[index][0] for index in batch], read)
            for index, one in zip(batch, results, strict=True):
                answers[index] = one
        return [one for one in answers if one is not None]

    @contextmanager
    def _worker(self) -> Iterator[JailWorker]:
        if not self._finish.alive:
            raise ContractError(f"{self._what}: its jail was closed")
        try:
            worker = self._free.get(timeout=_WORKER_SECONDS)
        except queue.Empty as error:
            raise ContractError(
                f"{self._what}: every process of its jail is taken", advice="give it more workers"
            ) from error
        try:
            yield worker
        finally:
            self._free.put(worker)


class JailedContract(Contract):
    """A contract whose code runs in a jail. `load_jailed` makes one."""

    name, version = "jailed", "0"  # `load_jailed` makes a subclass with the real ones
    answers_turns: ClassVar[bool] = False

    def __init__(self, sandbox: Sandbox) -> None:
        super().__init__()
        self.sandbox = sandbox

    def prompt(self, key: bytes) -> Prompt:
        """Return the prompt of a slot."""
        return self.sandbox.prompts([key])[0]

    def held_out(self, key: bytes) -> Prompt:
        """Return a prompt to evaluate with."""
        return self.sandbox.prompts([key], held_out=True)[0]

    @property
    def has_environment(self) -> bool:
        """Return whether it answers the model's turns."""
        return self.answers_turns

    def reply(self, prompt: Prompt, turns: Sequence[Turn]) -> Reply:
        """Return the environment's answer to the last turn."""
        return _or_raise(self.sandbox.replies([(prompt, turns)])[0])

    def score(self, prompt: Prompt, completion: str | Sequence[Turn]) -> Score:
        """Return the completion's score."""
        return _or_raise(self.sandbox.scores([(prompt, completion)])[0])

    def answer(self, prompt: Prompt) -> str:
        """Return a completion that scores well."""
        return _or_raise(self.sandbox.answers([prompt])[0])

    def close(self) -> None:
        """End the processes."""
        self.sandbox.close()


def load_jailed(
    name: str, version: str, params: Mapping[str, object] | None = None, **terms: Any
) -> JailedContract:
    """Return a configured contract whose code is never imported into this process.

    `terms` are keyword arguments of `Sandbox`.
    """
    sandbox = Sandbox(name, version, params, **terms)
    try:
        ready = sandbox.ready()
    except ContractError:
        sandbox.close()
        raise
    facts = {
        "name": name,
        "version": version,
        "low": ready.low,
        "high": ready.high,
        "answers_turns": ready.has_environment,
        "role": ready.role,
        "replayable": ready.replayable,
    }
    jailed: type[JailedContract] = type("JailedContract", (JailedContract,), facts)
    return jailed(sandbox)


def score_or_zero(result: Score | Failed, low: float = 0.0) -> Score:
    """Return the score; for a failure the contract's lowest score, with the reason."""
    return result if isinstance(result, Score) else Score(low, result.reason)


def layers(**terms: Any) -> list[Layer]:
    """Return the layers of a jail on this machine, as a jailed process measures them."""
    with Sandbox("digits-reverse", "1", **terms) as probe:
        return probe.layers()


def _finish(
    workers: list[JailWorker], free: queue.LifoQueue[JailWorker], starter: ThreadPoolExecutor
) -> None:
    for worker in workers:
        worker.close()
    for _ in workers:  # running calls get an error and return their worker
        with suppress(queue.Empty):
            free.get(timeout=_CLOSE_SECONDS).reap()
    for worker in workers:
        free.put(worker)
    starter.shutdown()


def _size(prompt: Prompt, text: str | Sequence[Turn]) -> int | str:
    """Return the bytes to be sent, or why they may not be sent."""
    try:
        sizes = (
            prompt_bytes(prompt),
            len(text.encode()) if isinstance(text, str) else turns_bytes(text),
        )
    except UnicodeEncodeError:
        return "it is no Unicode text"
    if max(sizes) > TEXT_BYTES:
        return f"a text of {max(sizes)} bytes, where {TEXT_BYTES} are allowed"
    return sum(sizes)


def _batches(sizes: Sequence[int | str]) -> Iterator[list[int]]:
    """Yield the indices of items that may be sent, as many as fit into one message."""
    batch: list[int] = []
    total = 0
    for index, size in enumerate(sizes):
        if isinstance(size, str):
            continue
        if batch and (len(batch) == _BATCH_ITEMS or total + size > _BATCH_BYTES):
            yield batch
            batch, total = [], 0
        batch.append(index)
        total += size
    if batch:
        yield batch


def _read_prompt(fields: list[Any]) -> Prompt:
    try:
        return unpack_prompt(fields)
    except ValueError as error:
        raise PipeError("a prompt that is malformed") from error


def _read_answer(fields: list[Any]) -> str:
    match fields:
        case [str(text)]:
            return text
    raise PipeError("an answer that is no text")


def _read_reply(fields: list[Any]) -> Reply:
    match fields:
        case [str(text), bool(done)] if done or 1 <= len(text.encode(errors="replace")) <= REPLY_BYTES:
            return Reply(text, done)
    raise PipeError("a reply that is malformed")


def _or_raise(result: T | Failed) -> T:
    if isinstance(result, Failed):
        raise ContractError(result.reason)
    return result
