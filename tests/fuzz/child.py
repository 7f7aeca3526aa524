"""One target in a process of its own: `python -m tests.fuzz.child MODULE TARGET SECONDS FOLDER`.

With atheris, inputs are led by the edges of our code that they reach; without it they are changed
seeds. What it finds it leaves in the folder, and says in lines that the parent reads.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import random
import sys
import time
import traceback
from contextlib import ExitStack, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from tests.fuzz.target import Feed, Target

INSTRUMENTED: Final = ["protocol", "echo_node"]
SLOW_SECONDS: Final = 25
"""For one input, after which it counts as a hang."""
MEMORY_MB: Final = 3_000
"""Of the whole process, some of which have torch in them."""


def main() -> None:
    module, name, seconds, place = sys.argv[1:5]
    atheris: Any = importlib.import_module("atheris") if find_spec("atheris") else None
    around = atheris.instrument_imports(include=INSTRUMENTED) if atheris else nullcontext()
    with ExitStack() as stack:
        with around:
            target: Target = importlib.import_module("tests.fuzz.targets").in_module(module)[name]
            feed = stack.enter_context(target.open())
            starts = target.seeds()
            for start in starts:
                feed(start)  # whatever is imported late is imported now
        if atheris:
            _lead(atheris, target, feed, starts, float(seconds), Path(place))
        else:
            _wander(target, feed, starts, float(seconds), Path(place))


def _lead(atheris: Any, target: Target, feed: Feed, starts: list[bytes], seconds: float, place: Path) -> None:
    from tests.fuzz.decoders import Mutator

    corpus, found = place / "corpus" / target.name, place / "found"
    corpus.mkdir(parents=True, exist_ok=True)
    found.mkdir(exist_ok=True)
    for start in starts:
        (corpus / hashlib.sha1(start).hexdigest()).write_bytes(start)  # noqa: S324 -- as libFuzzer names them
    mutator = Mutator(0, {target.name: starts})

    def change(data: bytes, most: int, seed: int) -> bytes:
        """Mutate as libFuzzer does, or by the values that the bytes encode.

        The bytes that choose among cases stay as they are.
        """
        mutator.rng = random.Random(seed)
        if mutator.rng.random() < 0.5 or len(data) <= target.prefix:
            return bytes(atheris.Mutate(data, most))
        return (data[: target.prefix] + mutator.changed(data[target.prefix :]))[:most]

    def one(data: bytes) -> None:
        feed(data)

    longest = max(target.most, *(len(start) for start in starts))
    options = {
        "max_total_time": max(1, round(seconds)),
        "timeout": SLOW_SECONDS,
        "rss_limit_mb": MEMORY_MB,
        "max_len": longest,
        "artifact_prefix": f"{found}/{target.name}-",
        "print_final_stats": 1,
        "seed": random.SystemRandom().randrange(1, 2**31),
    }
    arguments = [f"-{name}={value}" for name, value in options.items()]
    atheris.Setup([sys.argv[0], *arguments, str(corpus)], one, custom_mutator=change)
    atheris.Fuzz()


def _wander(target: Target, feed: Feed, starts: list[bytes], seconds: float, place: Path) -> None:
    """Without a fuzzer: changed seeds, for so long."""
    from tests.fuzz.decoders import Mutator

    mutator = Mutator(random.SystemRandom().randrange(2**32), {target.name: starts})
    ends = time.monotonic() + seconds
    count = 0
    while time.monotonic() < ends:
        start = mutator.rng.choice(starts)
        data = start[: target.prefix] + mutator.changed(start[target.prefix :])
        try:
            feed(data)
        except BaseException:  # noqa: BLE001 -- that is what is looked for
            file = place / "found" / f"{target.name}-crash-{hashlib.sha256(data).hexdigest()[:16]}"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data)
            traceback.print_exc()
            print(f"Test unit written to {file}", file=sys.stderr)
            break
        count += 1
    print(f"stat::number_of_executed_units: {count}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    try:
        main()
    except BaseException:  # noqa: BLE001 -- threads of a target's loop must not keep it alive
        traceback.print_exc()
        os._exit(1)
    os._exit(0)
