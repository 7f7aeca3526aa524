"""The jailed program: `python -P -m echo_node.contract.jail.main`.

Its arguments are PIPE_FD, CONTROL_FD and PARENT_PID. Started by `jail.process` only. The process
isolates itself before it imports the contract's code. It answers each item of a request as soon as
it can, so that the node knows which item killed it. Code that is no part of this program sees each
text in a child of its own (`child`).
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from echo_node.contract.api import Contract, prompt_of, score_of
from echo_node.contract.code_folder import check_tree
from echo_node.contract.data_rows import read_rows
from echo_node.contract.jail.child import answer_in_child
from echo_node.contract.jail.enclosure import Bounds, Enclosure, TooLargeError, code_paths
from echo_node.contract.jail.episode_cache import EpisodeCache
from echo_node.contract.jail.import_guard import guard_imports
from echo_node.contract.jail.process import MAX_MESSAGE_BYTES, OUT_OF_MEMORY
from echo_node.contract.jail.required import ADVICE_NO_LAYER
from echo_node.contract.jail.serde import (
    TEMPLATE,
    TEXT_BYTES,
    pack_prompt,
    prompt_bytes,
    unpack_prompt,
    unpack_turns,
)
from echo_node.contract.registry import load
from echo_node.errors import ContractError, EchoError, boundary
from echo_node.runtime.ipc import Message, MessageError, Pipe, PipeEndedError, PipeError

if TYPE_CHECKING:
    from echo_node.contract.jail.chat_template import ChatTemplate


def answer(task: Contract | ChatTemplate, asked: str, item: list[Any]) -> Message:
    """Return the answer to one item: its result, or why there is none."""
    try:
        return {"kind": "result", "fields": _ANSWERS[asked](task, *item)}
    except ContractError as error:
        out_of_memory = isinstance(error.__cause__, MemoryError)
        return {"kind": "failed", "reason": str(error), "out_of_memory": out_of_memory}


def _prompt(contract: Contract, key: bytes, *, held_out: bool = False) -> list[Any]:
    prompt = prompt_of(contract, key, held_out=held_out)
    with boundary(ContractError, f"{contract.name} {contract.version}: making a prompt"):
        prompt = unpack_prompt(pack_prompt(prompt))
        size = prompt_bytes(prompt)
        if size > TEXT_BYTES:
            raise ValueError(f"it has {size} bytes, where {TEXT_BYTES} are allowed")
        return pack_prompt(prompt)


def _score(contract: Contract, prompt: list[Any], completion: str | list[Any]) -> list[Any]:
    answer = completion if isinstance(completion, str) else unpack_turns(completion)
    score = score_of(contract, unpack_prompt(prompt), answer)
    return [score.value, score.reason]


def _reply(contract: Contract, prompt: list[Any], turns: list[Any]) -> list[Any]:
    reply = _EPISODES.reply(contract, unpack_prompt(prompt), unpack_turns(turns))
    return [reply.text, reply.done]


def _own_answer(contract: Contract, prompt: list[Any]) -> list[Any]:
    with boundary(ContractError, f"{contract.name} {contract.version}: answering its own prompt"):
        text: object = contract.answer(unpack_prompt(prompt))
        if type(text) is not str or len(text.encode()) > TEXT_BYTES:
            raise TypeError(f"it gave no text of at most {TEXT_BYTES} bytes")
        return [text]


def _render(template: ChatTemplate, variables: dict[str, Any]) -> list[Any]:
    return [template.render(variables)]


_EPISODES: Final = EpisodeCache()

_ANSWERS: Final[dict[str, Callable[..., list[Any]]]] = {
    "prompt": _prompt,
    "held_out": partial(_prompt, held_out=True),
    "score": _score,
    "reply": _reply,
    "answer": _own_answer,
    "render": _render,
}


def set_up(
    start: Message, parent: int, control: socket.socket
) -> tuple[Contract | ChatTemplate, Enclosure, bool]:
    """Isolate this process, then load the contract.

    A missing layer that is required is refused. Return the contract or chat template, the layers,
    and whether each item is to be answered in a child.
    """
    name, version, memory_bytes = start["name"], start["version"], start["memory_bytes"]
    rows = _read_data(start["data"])
    bounds = Bounds(parent, memory_bytes, start["cpu_seconds"], frozenset(start["off"]))
    enclosure = Enclosure(bounds)
    folders = [Path(folder) for folder in start["folders"]]
    code, digest, modules = start["code"] or (None, b"", [])
    folders += [Path(code)] if code else []
    forks = enclosure.close(
        [*code_paths(), *folders], partial(_hand_over, control) if start["apart"] else None
    )
    control.close()
    missing = enclosure.missing(start["require"])
    if missing:
        raise ContractError(
            f"the jail of {name} {version} lacks a layer that must hold: {missing}", advice=ADVICE_NO_LAYER
        )
    # Last, and only now: a module of theirs must neither shadow another nor run before.
    sys.path.extend(start["folders"])
    if code is not None:
        check_tree(Path(code), digest)
        guard_imports(Path(code), modules)
    task = (
        _template(start["params"])
        if name == TEMPLATE
        else load(name, version, start["params"], rows, folder=code)
    )
    try:
        threaded = enclosure.limit()
    except TooLargeError as error:
        what = f"{name} {version} {error}, and may have {memory_bytes >> 20} MiB"
        raise ContractError(what, advice="allow it more memory") from error
    return task, enclosure, forks and not threaded


def _template(params: Mapping[str, str]) -> ChatTemplate:
    # Imported by those alone who render: jinja would double the time that a jail takes to start.
    from echo_node.contract.jail.chat_template import ChatTemplate  # noqa: PLC0415

    return ChatTemplate(params["template"])


def _read_data(data: list[Any] | None) -> Sequence[Mapping[str, str]]:
    """Read the rows that the node names, before this process loses its sight of files."""
    if data is None:
        return ()
    path, rows, held_out, part = data
    return read_rows(Path(path), rows, held_out, part)


def _hand_over(control: socket.socket, listener: int) -> None:
    """Give the node the descriptor at which it answers forks of this process."""
    socket.send_fds(control, [b"f"], [listener])
    os.close(listener)


def serve(pipe: Pipe, control: socket.socket, parent: int) -> None:
    """Start what the first message names, then answer until the pipe ends."""
    start = pipe.expect(None)
    try:
        task, enclosure, forks = set_up(start, parent, control)
    except EchoError as error:
        pipe.send({"kind": "refused", "what": error.what, "advice": error.advice})
        return
    layers = [[layer.name, layer.active, layer.why_not] for layer in enclosure.layers]
    low, high = (task.low, task.high) if isinstance(task, Contract) else (0.0, 1.0)
    score_range = {"low": float(low), "high": float(high)}
    facts = [task.has_environment, task.role, task.replayable] if isinstance(task, Contract) else None
    pipe.send({"kind": "ready", **score_range, "environment": facts, "layers": layers, "forks": forks})
    if forks:
        gc.collect()
        gc.freeze()  # children then write to fewer pages that they share with this process
    while True:
        request = pipe.expect(None)
        token, asked = request["token"], request["kind"]
        for index, item in enumerate(request["items"]):
            work = partial(answer, task, asked, item)
            pipe.send({"token": token, "index": index, **(answer_in_child(work) if forks else work())})


def main(arguments: list[str]) -> int:
    """Serve the parent over the inherited socket; return the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the node decides when this process ends
    pipe, control, parent = (int(argument) for argument in arguments)
    end = socket.socket(fileno=pipe)
    try:
        serve(Pipe(end, max_bytes=MAX_MESSAGE_BYTES), socket.socket(fileno=control), parent)
    except PipeEndedError:
        return 0
    except (PipeError, MessageError):
        return 1
    except MemoryError:  # too little was left to report it
        return OUT_OF_MEMORY
    return 0


if __name__ == "__main__":
    os._exit(main(sys.argv[1:]))  # skip slow cleanup; the kernel frees all of it
