"""The process in which a contract runs: `python -P -m echo_node.contract.jail.serving PIPE PARENT`, started by `process`
and by nobody else.

It encloses itself around the contract's code before it reads the first request, and answers every item of a request as
soon as it can, so that the node knows which one it died of. It knows nothing of tokens, peers or scores' use.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

from echo_node.contract.api import Contract, prompt_of, score_of
from echo_node.contract.jail.enclosing import Bounds, Enclosure, TooLargeError, code_paths
from echo_node.contract.jail.parcels import TEXT_BYTES, pack_prompt, prompt_bytes, unpack_prompt
from echo_node.contract.jail.pipe import Pipe, PipeEndedError, PipeError
from echo_node.contract.jail.process import OUT_OF_MEMORY
from echo_node.contract.registry import load
from echo_node.errors import ContractError, EchoError, boundary


def answer(contract: Contract, asked: str, item: list[Any]) -> list[Any]:
    """What is said to one item: true and the result, or false, why, and whether memory has run out."""
    try:
        return [True, *_ANSWERS[asked](contract, *item)]
    except ContractError as error:
        return [False, str(error), isinstance(error.__cause__, MemoryError)]


def _prompt(contract: Contract, key: bytes) -> list[Any]:
    prompt = prompt_of(contract, key)
    with boundary(ContractError, f"{contract.name} {contract.version}: making a prompt"):
        prompt = unpack_prompt(pack_prompt(prompt))
        size = prompt_bytes(prompt)
        if size > TEXT_BYTES:
            raise ValueError(f"it has {size} bytes, where {TEXT_BYTES} are allowed")
        return pack_prompt(prompt)


def _score(contract: Contract, prompt: list[Any], completion: str) -> list[Any]:
    score = score_of(contract, unpack_prompt(prompt), completion)
    return [score.value, score.reason]


def _own_answer(contract: Contract, prompt: list[Any]) -> list[Any]:
    with boundary(ContractError, f"{contract.name} {contract.version}: answering its own prompt"):
        given: object = contract.answer(unpack_prompt(prompt))
        if type(given) is not str or len(given.encode()) > TEXT_BYTES:
            raise TypeError(f"it gave no text of at most {TEXT_BYTES} bytes")
        return [given]


_ANSWERS: Final[dict[str, Callable[..., list[Any]]]] = {
    "prompt": _prompt,
    "score": _score,
    "answer": _own_answer,
}


def set_up(start: list[Any], parent: int) -> tuple[Contract, Enclosure]:
    """The contract, enclosed; an error if it cannot be had or a layer is missing that somebody insists on."""
    name, version, params, memory_bytes, cpu_seconds, require, off = start
    bounds = Bounds(parent, memory_bytes, cpu_seconds, frozenset(off))
    enclosure = Enclosure(bounds)
    enclosure.before_import()
    contract = load(name, version, params)
    try:
        enclosure.after_import([*code_paths(), *declared(contract)])
    except TooLargeError as error:
        what = f"{name} {version} {error}, and may have {memory_bytes >> 20} MiB"
        raise ContractError(what, advice="allow it more memory") from error
    missing = enclosure.missing(require)
    if missing:
        raise ContractError(
            f"the jail of {name} {version} lacks a layer that must hold: {missing}",
            advice="run on a system that has it, or take it out of those that are required",
        )
    return contract, enclosure


def declared(contract: Contract) -> list[Path]:
    """Files and folders that a contract names in `reads` because it opens them late: it may read them, and no others."""
    with boundary(ContractError, f"{contract.name} {contract.version}: naming the files that it reads"):
        named: Iterable[str | Path] = getattr(contract, "reads", ())
        return [Path(one).resolve() for one in named]


def serve(pipe: Pipe, parent: int) -> None:
    """Answer until the pipe ends."""
    try:
        contract, enclosure = set_up(pipe.receive(), parent)
    except EchoError as error:
        pipe.send(["refused", error.what, error.advice])
        return
    layers = [[layer.name, layer.active, layer.why_not] for layer in enclosure.layers]
    pipe.send(["ready", float(contract.low), float(contract.high), layers])
    while True:
        token, asked, *items = pipe.receive()
        for index, item in enumerate(items):
            pipe.send([token, index, *answer(contract, asked, item)])


def main(arguments: list[str]) -> int:
    """Serve the parent through the socket that it has given."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the node decides what ends
    if sys.platform == "win32":
        end = socket.fromshare(sys.stdin.buffer.read())
    else:
        end = socket.socket(fileno=int(arguments[0]))
    try:
        serve(Pipe(end), int(arguments[1]))
    except PipeEndedError:
        return 0
    except PipeError:
        return 1
    except MemoryError:  # there was not even enough left to say so
        return OUT_OF_MEMORY
    return 0


if __name__ == "__main__":
    os._exit(main(sys.argv[1:]))  # libraries take long to tidy up what the kernel takes back anyway
