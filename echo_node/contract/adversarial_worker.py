"""Worker of the adversarial test, run as a module with `python -m`.

Reads an order as JSON on standard input, encloses itself in the node's jail, loads the contract,
runs the steps and prints each result as a line of JSON. `adversarial_test` judges them.
"""

from __future__ import annotations

import functools
import gc
import hashlib
import json
import os
import sys
import time
import tracemalloc
from collections.abc import Callable, Mapping
from typing import Any, Final, TextIO

from echo_node.contract import hostile_texts, purity_watch
from echo_node.contract.api import (
    Contract,
    Prompt,
    Turn,
    own_answer,
    play,
    prompt_of,
    reply_of,
    score_of,
    script_of,
)
from echo_node.contract.jail.enclosure import Bounds, Enclosure, code_paths
from echo_node.contract.registry import find, find_only
from echo_node.errors import ContractError, EchoError, boundary

MEMORY: Final = 4 * 2**30
_FILLER: Final = 16 * 1024  # characters of each completion while memory is watched


def main() -> None:
    order = json.load(sys.stdin)
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)  # what the contract prints is no result
    os.dup2(nothing, 2)
    _report(out, doing="load")
    try:
        contract, enclosure = _set_up(order)
    except EchoError as error:
        _report(out, did="load", error=str(error))
        return
    _report(
        out,
        did="load",
        name=contract.name,
        version=contract.version,
        low=contract.low,
        high=contract.high,
        about=(type(contract).__doc__ or "").strip(),
        layers=[layer.name for layer in enclosure.layers if layer.active],
    )
    for step in order["steps"]:
        _report(out, doing=step["name"])
        try:
            _report(out, did=step["name"], **_ACTS[step["act"]](contract, step))
        except EchoError as error:
            _report(out, did=step["name"], error=str(error))


def _set_up(order: Mapping[str, Any]) -> tuple[Contract, Enclosure]:
    """Enclose this process as the node does, then load the contract."""
    cpu_seconds = 2 * int(order["seconds"]) + 5  # the deadline that counts is the parent's
    enclosure = Enclosure(Bounds(os.getppid(), MEMORY, cpu_seconds))
    enclosure.close(code_paths())
    name, version = order["name"], order["version"]
    found = find(name, version) if version else find_only(name)
    contract = _made(found, order["params"])
    with boundary(ContractError, f"enclosing the contract {found.name} {found.version}"):
        enclosure.limit()
    return contract, enclosure


def _made(found: type[Contract], params: Mapping[str, object]) -> Contract:
    with boundary(ContractError, f"setting up the contract {found.name} {found.version}"):
        return found(params)


def _report(out: TextIO, **line: Any) -> None:
    out.write(json.dumps(line) + "\n")
    out.flush()


def _key(number: int) -> bytes:
    return hashlib.blake2b(number.to_bytes(8, "big"), digest_size=32).digest()


def _digest(prompt: Prompt) -> str:
    content = json.dumps([prompt.text, sorted(prompt.data.items()), prompt.system, prompt.chat])
    return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()


def _scored(contract: Contract, prompt: Prompt, text: str) -> dict[str, Any]:
    start, busy = time.perf_counter(), time.process_time()
    score = _judged(contract, prompt, text)
    return {**score, "seconds": time.perf_counter() - start, "work": time.process_time() - busy}


def _judged(contract: Contract, prompt: Prompt, text: str) -> dict[str, Any]:
    try:
        score = score_of(contract, prompt, text)
    except ContractError as error:
        return {"error": str(error)}
    return {"value": score.value, "reason": score.reason}


def _answers(contract: Contract, step: dict[str, Any]) -> dict[str, Any]:
    """Return prompts and scores of some keys, scored twice within the budget."""
    rows: dict[int, dict[str, Any]] = {}
    began = time.perf_counter()
    for number in step["keys"]:
        start = time.perf_counter()
        if start - began > step["budget"]:
            break
        prompt = prompt_of(contract, _key(number))
        seconds = time.perf_counter() - start
        other = own_answer(contract, prompt_of(contract, _key(number + 1)))
        texts = {
            "its own": own_answer(contract, prompt),
            "another's": other,
            "empty": "",
            "a word": "perhaps",
        }
        scores = {name: _scored(contract, prompt, text) for name, text in texts.items()}
        again = {name: _scored(contract, prompt, text) for name, text in texts.items()}
        same_prompt = _digest(prompt) == _digest(prompt_of(contract, _key(number)))
        rows[number] = {
            "prompt": _digest(prompt),
            "seconds": seconds,
            "own": texts["its own"] != "",
            "scores": scores,
            "replies": {name: _replies(contract, prompt, text) for name, text in texts.items()},
            "repeats": same_prompt and all(_plain(again[name]) == _plain(scores[name]) for name in texts),
        }
    return {"rows": rows}


def _replies(contract: Contract, prompt: Prompt, text: str) -> str | None:
    """Return the hash of an environment's replies.

    Each reply is computed from the transcript before it alone.
    """
    if not contract.has_environment:
        return None
    try:
        turns, replies = play(contract, prompt, script_of(text))
        again = [reply_of(contract, prompt, [*turns[:n], Turn(turns[n].text)]) for n in range(len(turns))]
    except ContractError as error:
        return f"an error: {error}"
    if again != replies:
        return f"another reply the second time: {again!r}, not {replies!r}"[:400]
    return hashlib.blake2b(repr(replies).encode(), digest_size=16).hexdigest()


def _plain(score: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in score.items() if name not in {"seconds", "work"}}


def _hostile(contract: Contract, step: dict[str, Any]) -> dict[str, Any]:
    """Score one hostile text in each place where a contract may look for the answer."""
    prompt = prompt_of(contract, _key(0))
    texts = hostile_texts.placed(hostile_texts.TEXTS[step["text"]](own_answer(contract, prompt)))
    return {"scores": [_scored(contract, prompt, text) for text in texts]}


def _variety(contract: Contract, step: dict[str, Any]) -> dict[str, Any]:
    """Count the different prompts among some keys, within the time budget."""
    start, seen, count = time.perf_counter(), set(), 0
    for count in range(1, step["keys"] + 1):
        seen.add(prompt_of(contract, _key(count)).text)
        if time.perf_counter() - start > step["budget"]:
            break
    return {"keys": count, "distinct": len(seen), "seconds": (time.perf_counter() - start) / count}


def _memory(contract: Contract, step: dict[str, Any]) -> dict[str, Any]:
    """Measure how much memory grows over the second half of many scores of long texts."""
    start, held, done = time.perf_counter(), [], 0
    tracemalloc.start()
    for half in range(2):
        for _ in range(step["rounds"] // 2):
            done += 1
            prompt = prompt_of(contract, _key(done))
            filler = f"{done} " * (_FILLER // len(f"{done} "))
            _scored(contract, prompt, own_answer(contract, prompt) + filler)
            _scored(contract, prompt, filler + own_answer(contract, prompt))
            if time.perf_counter() - start > (half + 1) * step["budget"] / 2:
                break
        _forget()
        held.append((done, tracemalloc.get_traced_memory()[0]))
    tracemalloc.stop()
    (before, at_half), (after, at_end) = held
    return {"scores": 2 * (after - before), "grown": at_end - at_half, "text": _FILLER}


def _forget() -> None:
    """Drop garbage and bounded caches: a cache with a bound fills up and is no leak."""
    for cache in [each for each in gc.get_objects() if isinstance(each, functools._lru_cache_wrapper)]:  # noqa: SLF001
        if cache.cache_parameters()["maxsize"] is not None:
            cache.cache_clear()
    gc.collect()


def _watched(contract: Contract, step: dict[str, Any]) -> dict[str, Any]:
    """Watch what the contract uses while it makes prompts and scores."""
    keys = [_key(number) for number in range(step["keys"])]
    for key in keys:  # what is loaded or opened once is no habit
        prompt = prompt_of(contract, key)
        _judged(contract, prompt, own_answer(contract, prompt))
    with purity_watch.watch() as seen:
        for key in keys:
            prompt = prompt_of(contract, key)
            for text in (own_answer(contract, prompt), *hostile_texts.placed(purity_watch.CODE)):
                _judged(contract, prompt, text)
    return {"seen": {kind: sorted(what) for kind, what in seen.items()}}


def _show(contract: Contract, step: dict[str, Any]) -> dict[str, Any]:
    """Return some prompts with a right and a wrong answer, and their scores."""
    samples = []
    for number in range(step["keys"]):
        prompt = prompt_of(contract, _key(number))
        own = own_answer(contract, prompt)
        wrong = own_answer(contract, prompt_of(contract, _key(number + 1)))
        wrong = wrong if wrong != own else f"{own}?"
        samples.append(
            {
                "system": prompt.system,
                "prompt": prompt.text,
                "answer": own,
                "wrong": wrong,
                "answer_score": _plain(_scored(contract, prompt, own)),
                "wrong_score": _plain(_scored(contract, prompt, wrong)),
            }
        )
    return {"samples": samples}


_ACTS: Final[dict[str, Callable[[Contract, dict[str, Any]], dict[str, Any]]]] = {
    "answers": _answers,
    "hostile": _hostile,
    "memory": _memory,
    "show": _show,
    "variety": _variety,
    "watched": _watched,
}

if __name__ == "__main__":
    main()
