"""Contracts in their jail, as the node uses them: a pool of processes per contract and parameters.

    with Sandbox("digits-reverse", "1", {}) as sandbox:
        [prompt] = sandbox.prompts([key])
        right, failed = sandbox.scores([(prompt, "31284"), (prompt, hostile)])

What a contract does wrong, or a text does to it, is one `Failed` with its reason; the others of the batch are scored.
`JailedContract` is the same as an ordinary contract. What the jail is made of stands in `jail`. A text that its scorer
executes can colour later scores of the same process, never those of another: `renew` between two strangers.
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
from typing import Any, Final, Self, TypeVar, final

import msgpack

from echo_node.contract.api import Contract, Prompt, Score
from echo_node.contract.jail.layer import Layer
from echo_node.contract.jail.parcels import TEXT_BYTES, pack_prompt, prompt_bytes, unpack_prompt
from echo_node.contract.jail.pipe import PipeError
from echo_node.contract.jail.seat import Failed, Seat, Terms
from echo_node.errors import ConfigError, ContractError, boundary

_CPU_SECONDS: Final = 3600  # of one process in all its life; then a fresh one goes on
_BATCH_ITEMS: Final = 256
_BATCH_BYTES: Final = 4 * 2**20
_SEAT_SECONDS: Final = 600.0  # how long a caller waits for others to leave
_CLOSE_SECONDS: Final = 30.0

T = TypeVar("T")
Item = tuple[list[Any], int | str]
"""What is to be asked, and its bytes or why it cannot be asked."""


@final
class Sandbox:
    """A contract in a jail, with so many processes. Calls may come from any thread; each takes one process."""

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
        _without: Iterable[str] = (),
    ) -> None:
        """`seconds` and `memory_bytes` are those of one score and one process; `require` names layers without which
        nothing runs; in `folders`, besides the usual places, packages are looked for.
        """
        if workers < 1:
            raise ConfigError(f"a jail has at least one process, not {workers}")
        terms = Terms(
            name=name,
            version=version,
            params=dict(params or {}),
            seconds=seconds,
            start_seconds=start_seconds,
            memory_bytes=memory_bytes,
            cpu_seconds=_CPU_SECONDS,
            require=tuple(require),
            folders=tuple(folders),
            off=frozenset(_without),
        )
        self._what = terms.contract
        with boundary(ContractError, f"{self._what}: handing its parameters on"):
            msgpack.packb(terms.params)
        starter = ThreadPoolExecutor(1, thread_name_prefix="jail starter")
        self._seats = [Seat(terms, starter) for _ in range(workers)]
        self._free: queue.LifoQueue[Seat] = queue.LifoQueue()
        for seat in self._seats:
            self._free.put(seat)
        self._finish = weakref.finalize(self, _finish, self._seats, self._free, starter)

    def prompts(self, keys: Sequence[bytes]) -> list[Prompt]:
        """The prompts of these keys; an error if one cannot be made."""
        asked = self._ask(
            "prompt", "making a prompt", [([bytes(key)], len(key)) for key in keys], _read_prompt
        )
        return [_or_raise(made) for made in asked]

    def scores(self, texts: Sequence[tuple[Prompt, str]]) -> list[Score | Failed]:
        """What each text is worth as an answer to its prompt, or why that cannot be told."""
        low, high = self.range

        def read(fields: list[Any]) -> Score:
            match fields:
                case [float(value), str(reason)] if math.isfinite(value) and low <= value <= high:
                    return Score(value, reason)
            raise PipeError("a score out of range")

        items = [([pack_prompt(prompt), text], _size(prompt, text)) for prompt, text in texts]
        return self._ask("score", "scoring a completion", items, read)

    def answers(self, prompts: Sequence[Prompt]) -> list[str | Failed]:
        """The contract's own answers to these prompts, where it has any."""
        items = [([pack_prompt(prompt)], _size(prompt, "")) for prompt in prompts]
        return self._ask("answer", "answering its own prompt", items, _read_answer)

    @property
    def range(self) -> tuple[float, float]:
        """From where to where its scores go."""
        with self._seat() as seat:
            ready = seat.ready()
            return ready.low, ready.high

    def layers(self) -> list[Layer]:
        """The layers of this jail, as a process of it has measured them on itself."""
        with self._seat() as seat:
            return list(seat.ready().layers)

    def renew(self) -> None:
        """Whoever asks next gets processes that have seen no text yet."""
        for seat in self._seats:
            seat.stale = True

    def close(self) -> None:
        """End every process. Whoever is waiting for an answer gets an error."""
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
        """The answers to these items, each of a size that may be sent or with a reason why it may not."""
        answers: list[T | Failed | None] = [
            Failed(f"{self._what}: {doing}: {size}") if isinstance(size, str) else None for _, size in items
        ]
        for batch in _batches([size for _, size in items]):
            with self._seat() as seat:
                said = seat.ask(asked, doing, [items[index][0] for index in batch], read)
            for index, one in zip(batch, said, strict=True):
                answers[index] = one
        return [one for one in answers if one is not None]

    @contextmanager
    def _seat(self) -> Iterator[Seat]:
        if not self._finish.alive:
            raise ContractError(f"{self._what}: its jail was closed")
        try:
            seat = self._free.get(timeout=_SEAT_SECONDS)
        except queue.Empty as error:
            raise ContractError(
                f"{self._what}: every process of its jail is taken", advice="give it more workers"
            ) from error
        try:
            yield seat
        finally:
            self._free.put(seat)


class JailedContract(Contract):
    """A contract that runs in a jail, in place of the contract itself. `load_jailed` makes one."""

    name, version = "jailed", "0"  # those of what is in the jail stand in the class that `load_jailed` makes

    def __init__(self, sandbox: Sandbox) -> None:
        super().__init__()
        self.sandbox = sandbox

    def prompt(self, key: bytes) -> Prompt:
        """The prompt of a slot."""
        return self.sandbox.prompts([key])[0]

    def score(self, prompt: Prompt, completion: str) -> Score:
        """What the completion is worth."""
        return _or_raise(self.sandbox.scores([(prompt, completion)])[0])

    def answer(self, prompt: Prompt) -> str:
        """A completion that shows a good score off."""
        return _or_raise(self.sandbox.answers([prompt])[0])

    def close(self) -> None:
        """End its processes."""
        self.sandbox.close()


def load_jailed(
    name: str, version: str, params: Mapping[str, object] | None = None, **terms: Any
) -> JailedContract:
    """A contract with its parameters, ready for use, whose code never comes into this process.

    `terms` are those of a `Sandbox`.
    """
    sandbox = Sandbox(name, version, params, **terms)
    try:
        low, high = sandbox.range
    except ContractError:
        sandbox.close()
        raise
    facts = {"name": name, "version": version, "low": low, "high": high}
    jailed: type[JailedContract] = type("JailedContract", (JailedContract,), facts)
    return jailed(sandbox)


def score_or_zero(result: Score | Failed, low: float = 0.0) -> Score:
    """The score; for what has none the least that the contract gives, which mostly is 0, with the reason."""
    return result if isinstance(result, Score) else Score(low, result.reason)


def layers(**terms: Any) -> list[Layer]:
    """The layers of a jail on this machine, measured by a process that has put them up around itself."""
    with Sandbox("digits-reverse", "1", **terms) as probe:
        return probe.layers()


def _finish(seats: list[Seat], free: queue.LifoQueue[Seat], starter: ThreadPoolExecutor) -> None:
    for seat in seats:
        seat.close()
    for _ in seats:  # whoever sits there gets an error now, and leaves
        with suppress(queue.Empty):
            free.get(timeout=_CLOSE_SECONDS).reap()
    for seat in seats:
        free.put(seat)
    starter.shutdown()


def _size(prompt: Prompt, text: str) -> int | str:
    """Bytes of what is to be sent, or why it may not be."""
    try:
        sizes = prompt_bytes(prompt), len(text.encode())
    except UnicodeEncodeError:
        return "it is no Unicode text"
    if max(sizes) > TEXT_BYTES:
        return f"a text of {max(sizes)} bytes, where {TEXT_BYTES} are allowed"
    return sum(sizes)


def _batches(sizes: Sequence[int | str]) -> Iterator[list[int]]:
    """Those that may be sent, by their place, as many at a time as fit into one message."""
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
        raise PipeError("a prompt that is none") from error


def _read_answer(fields: list[Any]) -> str:
    match fields:
        case [str(text)]:
            return text
    raise PipeError("an answer that is no text")


def _or_raise(result: T | Failed) -> T:
    if isinstance(result, Failed):
        raise ContractError(result.reason)
    return result
