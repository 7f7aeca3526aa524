"""Render benchmarks/README.md from the last results.

Pure text, so that a test can render it again. Nothing is run here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from benchmarks.report_catalogue import BENCHMARKS, PARTS

NOT_RUN: Final = "not run"
LONGEST: Final = 160
"""Characters shown of a figure that is text."""
_TOP: Final = """\
# Benchmarks

Written by `make bench` from `results.json`; do not edit by hand. `make bench ARGS="wire delta"` runs two benchmarks and updates their
rows only. Each benchmark is a program (`python -m benchmarks.wire`) that prints a table and, as its last line, its figures as
JSON. Ratios are medians of interleaved pairs within one run. *Load* is the load average of the machine at the start: results from
a busy machine are less reliable.
"""


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine of a measurement."""

    cpu: str
    cores: int
    memory_gb: float
    python: str
    torch: str

    def __str__(self) -> str:
        return (
            f"{self.cpu}, {self.cores} cores, {self.memory_gb:g} GB, Python {self.python}, torch {self.torch}"
        )


@dataclass(frozen=True, slots=True)
class Result:
    """The last run of one benchmark."""

    figures: Mapping[str, Any]
    command: str
    date: str
    seconds: float
    load: float
    machine: Machine


Results = Mapping[str, Result]


def read_results(text: str) -> dict[str, Result]:
    return {
        name: Result(**{**row, "machine": Machine(**row["machine"])})
        for name, row in json.loads(text).items()
    }


def write_results(results: Results) -> str:
    """Return the results as JSON, one benchmark a line, so that diffs are small."""
    lines = [
        f"{json.dumps(name)}: {json.dumps(asdict(results[name]), ensure_ascii=False)}"
        for name in BENCHMARKS
        if name in results
    ]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def page(results: Results) -> str:
    """Return the whole page."""
    machines = list(dict.fromkeys(results[name].machine for name in BENCHMARKS if name in results))
    return "\n".join(
        (
            _TOP,
            "## Runs\n",
            "| benchmark | what it measures | command | date | seconds | load | machine |",
            "|---|---|---|---|---:|---:|---|",
            *(_run(name, results.get(name), machines) for name in BENCHMARKS),
            "",
            *(f"Machine {number}: {machine}." for number, machine in enumerate(machines, 1)),
            "",
            "## Figures\n",
            "| benchmark | figure | measured | asked for | |",
            "|---|---|---:|---:|---|",
            *(row for name in BENCHMARKS for row in _figures(name, results.get(name))),
            "",
            "Processes that benchmarks start, which measure nothing by themselves: "
            + ", ".join(f"`{part}` ({of})" for part, of in PARTS.items())
            + ".",
            "",
        )
    )


def _run(name: str, result: Result | None, machines: list[Machine]) -> str:
    what = BENCHMARKS[name].what
    if result is None:
        about = f"about {BENCHMARKS[name].minutes:g} min"
        return f"| {name} | {what} | `python -m benchmarks.{name}` | {NOT_RUN} | {about} | | |"
    number = machines.index(result.machine) + 1
    return f"| {name} | {what} | `{result.command}` | {result.date} | {result.seconds:.0f} | {result.load:.1f} | {number} |"


def _figures(name: str, result: Result | None) -> Iterator[str]:
    """Yield a row for each figure, also for one that is required and was not measured."""
    bounds = BENCHMARKS[name].bounds
    measured = dict(_flat(result.figures)) if result else {}
    for figure in [*measured, *(each for each in bounds if each not in measured)]:
        bound, value = bounds.get(figure), measured.get(figure)
        if bound is None:
            verdict = ""
        elif isinstance(value, int | float):
            verdict = "holds" if bound.holds(value) else "**falls short**"
        else:
            verdict = NOT_RUN if result is None else "not measured"
        yield f"| {name} | {figure} | {_shown(value)} | {bound or ''} | {verdict} |"


def _flat(figures: Mapping[str, Any], within: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in figures.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{within}{name}/")
        else:
            yield f"{within}{name}", value


def _shown(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:.0f}"
    if isinstance(value, list):
        value = json.dumps(value)
    return " ".join(str(value).replace("|", "/").split())[:LONGEST]
