"""Hostile bytes for every handler that takes bytes from outside.

python -m tests.fuzz                    all targets, each in a process of its own
python -m tests.fuzz TARGET             one of them
python -m tests.fuzz TARGET FILE…       give it these inputs again, and show what comes of them
python -m tests.fuzz --list             the targets, and the code that they feed
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
PLACE: Final = ROOT / "build" / "fuzz"
START_SECONDS: Final = 300.0
"""For a process to come up and to end, besides its time."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one target."""

    target: str
    executions: int
    edges: int | None
    features: int | None
    seconds: float
    found: list[str]
    failure: str = ""


def run_one(module: str, name: str, seconds: float, place: Path) -> Outcome:
    """Fuzz one target in a process of its own."""
    command = [sys.executable, "-m", "tests.fuzz.child", module, name, str(seconds), str(place)]
    began = time.monotonic()
    place.mkdir(parents=True, exist_ok=True)
    log = place / f"{name}.log"
    with log.open("wb") as written:
        try:
            code = subprocess.run(
                command,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=written,
                stderr=subprocess.STDOUT,
                timeout=seconds + START_SECONDS,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            code = -1
    said = log.read_text(errors="replace")
    found = [_shown(Path(each)) for each in re.findall(r"Test unit written to (\S+)", said)]
    counts = re.findall(r"stat::number_of_executed_units: (\d+)", said) or re.findall(
        r"^#(\d+)", said, re.MULTILINE
    )
    covered = re.findall(r"cov: (\d+) ft: (\d+)", said)
    failure = "" if not code or found else f"its process ended with {code}: see {_shown(log)}"
    return Outcome(
        target=name,
        executions=int(counts[-1]) if counts else 0,
        edges=int(covered[-1][0]) if covered else None,
        features=int(covered[-1][1]) if covered else None,
        seconds=round(time.monotonic() - began, 1),
        found=found,
        failure=failure,
    )


def _shown(path: Path) -> str:
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)


def show(outcomes: list[Outcome]) -> None:
    print(f"{'target':<18} {'executions':>10} {'edges':>7} {'features':>9}  found")
    for each in outcomes:
        edges = "-" if each.edges is None else f"{each.edges:,}"
        features = "-" if each.features is None else f"{each.features:,}"
        words = each.failure or (f"{len(each.found)} of them" if each.found else "nothing")
        print(f"{each.target:<18} {each.executions:>10,} {edges:>7} {features:>9}  {words}")
    for each in outcomes:
        for file in each.found:
            print(f"to repeat: python -m tests.fuzz {each.target} {file}")


def repeat(name: str, files: list[Path]) -> None:
    """Give inputs to a target again. What it raises is shown."""
    from tests.fuzz.targets import everywhere

    with everywhere()[name][1].open() as feed:
        for file in files:
            taken = feed(file.read_bytes())
            print(f"{file}: {'taken' if taken else 'refused'}")


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("target", nargs="?", help="one target; all of them otherwise")
    words.add_argument("file", nargs="*", type=Path, help="inputs to give it again")
    words.add_argument("--seconds", type=float, default=60.0, help="in all, shared out evenly (default: 60)")
    words.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes at a time")
    words.add_argument(
        "--place", type=Path, default=PLACE, help="where inputs are kept (default: build/fuzz)"
    )
    words.add_argument("--list", action="store_true", help="say what there is")
    chosen = words.parse_args()

    from tests.fuzz.targets import everywhere  # after --help, which needs none of it

    there = everywhere()
    if chosen.target is not None and chosen.target not in there:
        words.error(f"no target {chosen.target}; there are {', '.join(sorted(there))}")
    if chosen.list:
        for name, (_, target) in there.items():
            print(f"{name:<18} {target.entry}")
        return
    if chosen.file:
        repeat(chosen.target, chosen.file)
        return
    wanted = [chosen.target] if chosen.target else list(there)
    workers = min(max(1, chosen.workers), len(wanted))
    each = max(1.0, chosen.seconds * workers / len(wanted))
    if find_spec("atheris") is None:
        print("atheris is not here: inputs are changed seeds, and no coverage leads them")
    print(f"{len(wanted)} targets, {each:.1f} s each, {workers} at a time", flush=True)
    with ThreadPoolExecutor(workers) as pool:
        outcomes = list(
            pool.map(lambda name: run_one(there[name][0], name, each, chosen.place.resolve()), wanted)
        )
    show(outcomes)
    found = [file for one in outcomes for file in one.found]
    failed = [one.target for one in outcomes if one.failure]
    total = {
        "targets": len(outcomes),
        "executions": sum(one.executions for one in outcomes),
        "edges": sum(one.edges or 0 for one in outcomes),
        "features": sum(one.features or 0 for one in outcomes),
        "found": found,
        "failed": failed,
        "coverage": find_spec("atheris") is not None,
        "by_target": {one.target: asdict(one) for one in outcomes},
    }
    print(json.dumps(total))
    sys.exit(1 if found or failed else 0)


if __name__ == "__main__":
    main()
