"""Run benchmarks one after the other, and write the page of their results.

    python -m benchmarks                 all of them: hours
    python -m benchmarks wire delta      these two
    python -m benchmarks "convergence steps"    a part of one; its other figures stay
    python -m benchmarks --page          none: write README.md again from results.json

A benchmark that fails leaves its last result as it was; the others go on, and the end is an error.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from benchmarks.report import Machine, Result, page, read_results, write_results
from benchmarks.report_catalogue import BENCHMARKS

HERE: Final = Path(__file__).parent
RESULTS: Final = HERE / "results.json"
PAGE: Final = HERE / "README.md"


def main() -> None:
    options = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    options.add_argument("names", nargs="*", help=f"of {', '.join(BENCHMARKS)}; all of them otherwise")
    options.add_argument("--page", action="store_true", help="run nothing, write README.md")
    given = options.parse_args()
    if unknown := {each.partition(" ")[0] for each in given.names} - set(BENCHMARKS):
        options.error(
            f"no benchmark is called {', '.join(sorted(unknown))}; there are {', '.join(BENCHMARKS)}"
        )
    failed = [] if given.page else [name for name in given.names or BENCHMARKS if not measure(name)]
    PAGE.write_text(page(results()), "utf-8")
    if failed:
        raise SystemExit(f"without a result: {', '.join(failed)}")


def measure(wanted: str) -> bool:
    """Run one and keep its figures at once, so that whoever breaks off loses one at most."""
    name, *words = shlex.split(wanted)
    load, began = os.getloadavg()[0], time.monotonic()
    print(f"== {wanted} (about {BENCHMARKS[name].minutes:g} min on two quiet cores)", flush=True)
    figures = run(name, *words)
    if figures is None:
        return False
    found = Result(
        figures=figures,
        command=shlex.join(("python", "-m", f"benchmarks.{name}", *words)),
        date=dt.datetime.now(dt.UTC).date().isoformat(),
        seconds=round(time.monotonic() - began, 1),
        load=round(load, 2),
        machine=this_machine(),
    )
    RESULTS.write_text(write_results({**results(), name: found}), "utf-8")
    return True


def run(name: str, *words: str) -> dict[str, Any] | None:
    """Run a benchmark, pass its output on, and return the figures of its last line."""
    last = ""
    with subprocess.Popen(
        [sys.executable, "-m", f"benchmarks.{name}", *words],
        stdout=subprocess.PIPE,
        text=True,
        encoding="utf-8",
    ) as child:
        assert child.stdout is not None
        for line in child.stdout:
            print(line, end="", flush=True)
            last = line.strip() or last
    try:
        figures = json.loads(last)
    except ValueError:
        return None
    return figures if child.returncode == 0 and isinstance(figures, dict) else None


def results() -> dict[str, Result]:
    return read_results(RESULTS.read_text("utf-8")) if RESULTS.exists() else {}


def this_machine() -> Machine:
    """No name of it: what it can do."""
    return Machine(
        cpu=_cpu(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_gb=round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        python=platform.python_version(),
        torch=_version("torch"),
    )


def _cpu() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


if __name__ == "__main__":
    main()
