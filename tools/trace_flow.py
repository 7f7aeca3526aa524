"""Count the files and types that a rollout group and a weights version pass in a real swarm.

Runs `echo-node demo` for a few steps with a profiler in every process. A file is on the way when
one of its functions is called with, or returns, a value that carries the cargo. A group's cargo is
its sealed bytes, its completions and whatever holds them; a version's are the routes, chunks and
element changes that lead from the optimiser to an engine. Two figures are printed for each way:

    handlers   files that can know what they hold: a reader who follows the way opens these
    carriers   files that move any message: `net/`, `storage/`, `runtime/` and the codec of
               `protocol/`. The layers contract in pyproject.toml keeps the first three from
               importing groups or weights, and the codec names no message.

A type is counted with the handlers if one of them gets it and no carrier declares it; so are
`Envelope` and `Opened`, of which a sealed message cannot come out otherwise. All other types are
counted with the carriers. Verifiers are a branch of the way, so their files are left out. Groups
are counted each time that their bytes are parsed (`parses`) or their body is decoded (`decodes`) in
one node, verifiers too. A group that arrives twice in a node, as when its receipt is late and the
sampler delivers it directly after the gossip, is parsed on each arrival; `--list` names who parsed
a group more than once.

    tools/trace_flow.py [--mode async|sequential] [--steps 3] [--list]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
SEEDS: Final = {
    "group": (
        ("protocol.trajectory", ("TrajectoryGroup", "Completion")),
        ("echo_node.engine.base", ("Draw", "Finished")),
        ("echo_node.trainer.tree_packing", ("SampledCompletion", "TrainingGroup")),
    ),
    "version": (
        ("protocol.weights", ("ChunkTable", "Route", "Frame")),
        ("echo_node.engine.base", ("Change", "Update", "TensorBytes")),
    ),
}
"""Types that are cargo by themselves; whatever has a field of such a type is cargo too."""
CARRIERS: Final = ("echo_node/net/", "echo_node/storage/", "echo_node/runtime/")
"""Packages below groups and weights in the layers contract."""
CODEC: Final = ("batch", "canonical", "delivery", "envelope", "fields", "tokens", "wire")
"""Modules of `protocol/` that encode any message."""
OPENERS: Final = ("Envelope", "Opened")
"""Types of the codec that handlers of a sealed message cannot do without."""
ENDS: Final = ("WeightsHead", "Manifest", "WeightsStore", "Run", "Node")
"""Types that only name a version or own a store: they carry nothing further."""

PROFILER: Final = '''
import dataclasses, json, os, sys, threading, typing
root, out = os.environ["ECHO_TRACE_ROOT"], os.environ["ECHO_TRACE_OUT"]
seeds, ends = json.loads(os.environ["ECHO_TRACE_SEEDS"]), set(json.loads(os.environ["ECHO_TRACE_ENDS"]))
verifies = "verifier" in sys.argv
if "bootstrap" not in sys.argv:
    log = open(os.path.join(out, f"{os.getpid()}.jsonl"), "a", buffering=1)
    known, seen, kinds, homes = {}, set(), {}, {}

    def note(**row):
        log.write(json.dumps(row) + "\\n")

    def cargo_of(cls):
        """The flows that a class carries cargo of."""
        if cls in kinds:
            return kinds[cls]
        kinds[cls] = frozenset()
        found = set()
        if cls.__module__.startswith(("echo_node", "protocol")) and cls.__name__ not in ends:
            for flow, rows in seeds.items():
                if any(cls.__module__ == module and cls.__name__ in names for module, names in rows):
                    found.add(flow)
        kinds[cls] = frozenset(found)
        return kinds[cls]

    def flows(value, depth=3):
        cls = type(value)
        if cls is bytes:
            return [("group", "")] if 200 < len(value) < 200_000 and any(mark in value for mark in SEALED) else ()
        if cls in (int, str, float, bool, type(None)):
            return ()
        if cls in (list, tuple, dict, set, frozenset):
            items = value.values() if cls is dict else value
            for item in items:
                return flows(item, depth)  # one item stands for all
            return ()
        if not cls.__module__.startswith(("echo_node", "protocol")) or cls.__name__ in ends:
            return ()
        homes[cls.__name__] = cls.__module__.replace(".", "/") + ".py"
        direct = cargo_of(cls)
        if direct or depth == 0 or not dataclasses.is_dataclass(cls):
            return [(flow, cls.__name__) for flow in direct]
        found = []
        for field in dataclasses.fields(cls):
            for flow, _ in flows(getattr(value, field.name, None), depth - 1):
                found.append((flow, cls.__name__))
        return found

    # A sealed group begins with an array of six, its major version and its kind, as msgpack writes them.
    SEALED = (b"\\x96\\x01\\xa5group", b"\\x96\\x02\\xa5group")

    def look(file, value):
        for flow, kind in flows(value):
            if (flow, file, kind) not in seen:
                seen.add((flow, file, kind))
                note(flow=flow, file=file, type=kind, home=homes.get(kind, ""))

    def caller(frame):
        """Name the first function outside of the wire that asked for it."""
        while frame.f_back and "/protocol/" in frame.f_code.co_filename:
            frame = frame.f_back
        return f"{known.get(frame.f_code.co_filename) or frame.f_code.co_filename}:{frame.f_code.co_name}"

    def profile(frame, event, arg):
        if event not in ("call", "return"):
            return
        code = frame.f_code
        file = known.get(code.co_filename)
        if file is None:
            path = code.co_filename
            inside = path.startswith((root + "/echo_node/", root + "/protocol/"))
            file = known[path] = path[len(root) + 1 :] if inside else ""
        if not file:
            return
        if event == "call":
            for name in () if verifies else code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]:
                if name in frame.f_locals:
                    look(file, frame.f_locals[name])
            if file == "protocol/envelope.py" and code.co_name == "claim":
                if frame.f_locals["kind"].__name__ == "TrajectoryGroup":
                    note(decode=frame.f_locals["self"].signature.hex(), by=caller(frame))
        else:
            if not verifies:
                look(file, arg)
            if file == "protocol/envelope.py" and code.co_name == "parse" and arg is not None:
                if arg.kind == "group":
                    note(parse=arg.signature.hex(), by=caller(frame))

    threading.setprofile(profile)
    sys.setprofile(profile)
'''


def main() -> None:
    """Run the demo under the profiler and print what was counted."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mode", choices=("async", "sequential"), default="async")
    parser.add_argument("--steps", type=int, default=3, help="optimiser steps of the demo")
    parser.add_argument(
        "--root", type=Path, default=ROOT, help="another checkout with a .venv, to compare with"
    )
    parser.add_argument("--list", action="store_true", help="name every file and type")
    options = parser.parse_args()
    root = options.root.resolve()
    with tempfile.TemporaryDirectory(prefix="echo-trace-") as place:
        Path(place, "sitecustomize.py").write_text(PROFILER)
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([place, str(root)]),
            "ECHO_TRACE_ROOT": str(root),
            "ECHO_TRACE_OUT": place,
            "ECHO_TRACE_SEEDS": json.dumps(SEEDS),
            "ECHO_TRACE_ENDS": json.dumps(ENDS),
        }
        python = root / ".venv" / "bin" / "python"
        demo = ["-m", "echo_node", "demo", "--steps", str(options.steps), "--mode", options.mode]
        done = subprocess.run(
            [python, *demo, "--set", "batch_groups=8", "--out", str(Path(place, "out"))],
            cwd=place,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            sys.exit(f"the demo failed: {done.stderr.strip()[-2000:]}")
        _report([*Path(place).glob("*.jsonl")], everything=options.list)


def is_carrier(file: str) -> bool:
    """Return whether a file moves any message, and cannot know what it holds."""
    return file.startswith(CARRIERS) or file in {f"protocol/{name}.py" for name in CODEC}


class Tally:
    """Files, types and parses of one traced demo."""

    def __init__(self) -> None:
        self.files: dict[str, set[str]] = {flow: set() for flow in SEEDS}
        self.types: dict[str, dict[str, bool]] = {flow: {} for flow in SEEDS}
        """Types of each way, and whether a handler gets them."""
        self.most = Counter({"parse": 0, "decode": 0})
        """Most parses and decodes of one group in one process."""
        self.callers: Counter[str] = Counter()
        self.repeated: Counter[str] = Counter()
        """Groups that one process parsed more than once, by who parsed them."""

    def add_process(self, log: Path) -> None:
        """Add the lines of one process."""
        counts: dict[str, Counter[str]] = {"parse": Counter(), "decode": Counter()}
        parsers: dict[str, list[str]] = {}
        for row in map(json.loads, log.read_text().splitlines()):
            if "flow" in row:
                self._add(row["flow"], row["file"], row["type"], row["home"])
            for name in counts.keys() & row.keys():
                counts[name][row[name]] += 1
                self.callers[f"{name} by {row['by']}"] += 1
            if "parse" in row:
                parsers.setdefault(row["parse"], []).append(row["by"])
        for name, count in counts.items():
            self.most[name] = max([self.most[name], *count.values()])
        self.repeated.update(" and ".join(by) for by in parsers.values() if len(by) > 1)

    def _add(self, flow: str, file: str, kind: str, home: str) -> None:
        self.files[flow].add(file)
        if kind:  # sealed bytes have no type of their own
            own = kind in OPENERS or not is_carrier(home)
            handled = self.types[flow].get(kind, False)
            self.types[flow][kind] = handled or (own and not is_carrier(file))


def _report(logs: list[Path], *, everything: bool) -> None:
    tally = Tally()
    for log in logs:
        tally.add_process(log)
    result: dict[str, int] = {}
    for flow in SEEDS:
        for who in ("handlers", "carriers"):
            there = sorted(file for file in tally.files[flow] if is_carrier(file) == (who == "carriers"))
            named = sorted(
                name for name, handled in tally.types[flow].items() if handled == (who == "handlers")
            )
            print(f"{flow}: {len(there)} {who}, {len(named)} types")
            if everything:
                print("  types:", *named)
                print(*(f"  {file}" for file in there), sep="\n")
            result |= {f"{flow}_{who}": len(there), f"{flow}_{who}_types": len(named)}
    if everything:
        print(*(f"  {count} x {caller}" for caller, count in tally.callers.most_common()), sep="\n")
        for by, count in tally.repeated.most_common():
            print(f"  {count} groups parsed more than once: by {by}")
    print(json.dumps(result | {"parses": tally.most["parse"], "decodes": tally.most["decode"]}))


if __name__ == "__main__":
    main()
