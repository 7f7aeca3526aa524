"""Count the files and types that a rollout group and a weights version pass in a real swarm.

Runs `echo-node demo` for a few steps with a profiler in every process. A file counts when one of
its functions is called with, or returns, a value that carries the cargo. A group's cargo is its
sealed bytes, its completions and whatever holds them; a version's are the routes, chunks and
element changes that lead from the optimiser to an engine. Sealed groups are counted each time that
their bytes are parsed (`parses`) or their body is decoded (`decodes`) in one node. Verifiers are a
branch of the way, and left out.

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
        ("echo_node.trainer.packing", ("SampledCompletion", "TrainingGroup")),
    ),
    "version": (
        ("protocol.weights", ("ChunkTable", "Route", "Frame")),
        ("echo_node.engine.base", ("Change", "Update", "TensorBytes")),
    ),
}
"""Types that are cargo by themselves; whatever has a field of such a type is cargo too."""
ENDS: Final = ("WeightsHead", "Manifest", "WeightsStore", "Run", "Node")
"""Types that only name a version or own a store: they carry nothing further."""

PROFILER: Final = '''
import dataclasses, json, os, sys, threading, typing
root, out = os.environ["ECHO_TRACE_ROOT"], os.environ["ECHO_TRACE_OUT"]
seeds, ends = json.loads(os.environ["ECHO_TRACE_SEEDS"]), set(json.loads(os.environ["ECHO_TRACE_ENDS"]))
if "verifier" not in sys.argv and "bootstrap" not in sys.argv:
    log = open(os.path.join(out, f"{os.getpid()}.jsonl"), "a", buffering=1)
    known, seen, kinds = {}, set(), {}

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
            return [("group", "")] if 200 < len(value) < 200_000 and SEALED in value else ()
        if cls in (int, str, float, bool, type(None)):
            return ()
        if cls in (list, tuple, dict, set, frozenset):
            items = value.values() if cls is dict else value
            for item in items:
                return flows(item, depth)  # one item stands for all
            return ()
        if not cls.__module__.startswith(("echo_node", "protocol")) or cls.__name__ in ends:
            return ()
        direct = cargo_of(cls)
        if direct or depth == 0 or not dataclasses.is_dataclass(cls):
            return [(flow, cls.__name__) for flow in direct]
        found = []
        for field in dataclasses.fields(cls):
            for flow, _ in flows(getattr(value, field.name, None), depth - 1):
                found.append((flow, cls.__name__))
        return found

    SEALED = b"\\xa5group"  # the kind of a sealed group, as msgpack writes it

    def look(file, value):
        for flow, kind in flows(value):
            if (flow, file, kind) not in seen:
                seen.add((flow, file, kind))
                note(flow=flow, file=file, type=kind)

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
            for name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]:
                if name in frame.f_locals:
                    look(file, frame.f_locals[name])
            if file == "protocol/envelope.py" and code.co_name == "claim":
                if frame.f_locals["kind"].__name__ == "TrajectoryGroup":
                    note(decode=frame.f_locals["self"].signature.hex(), by=caller(frame))
        else:
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


def _report(logs: list[Path], *, everything: bool) -> None:
    files: dict[str, set[str]] = {flow: set() for flow in SEEDS}
    types: dict[str, set[str]] = {flow: set() for flow in SEEDS}
    most = Counter({"parse": 0, "decode": 0})
    callers: Counter[str] = Counter()
    for log in logs:
        counts: dict[str, Counter[str]] = {"parse": Counter(), "decode": Counter()}
        for line in log.read_text().splitlines():
            row = json.loads(line)
            if flow := row.get("flow"):
                files[flow].add(row["file"])
                types[flow] |= {row["type"]} - {""}  # sealed bytes have no type of their own
            for name, count in counts.items():
                if name in row:
                    count[row[name]] += 1
                    callers[f"{name} by {row['by']}"] += 1
        for name, count in counts.items():
            most[name] = max([most[name], *count.values()])
    for flow in SEEDS:
        print(f"{flow}: {len(files[flow])} files, {len(types[flow])} types")
        if everything:
            print("  types:", *sorted(types[flow]))
            print(*(f"  {file}" for file in sorted(files[flow])), sep="\n")
    if everything:
        print(*(f"  {count} x {caller}" for caller, count in callers.most_common()), sep="\n")
    result = {f"{flow}_files": len(found) for flow, found in files.items()}
    result |= {"group_types": len(types["group"]), "parses": most["parse"], "decodes": most["decode"]}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
