"""Groups per second that one trainer admits, found by raising the rate.

The trainer is a node as it is, in a process of its own, paused so that it learns nothing: gossip
and streams, every check of admission with the contract in its jail, the journal on disk, receipts.
Simulated samplers in two other processes join, seal and push groups of the embedded task over real
sockets, sixteen at a time, never more unanswered than a sampler of ours has.

A rate is kept when every group was receipted as accepted, no burst was held back for half a second,
and all was answered one second after the last push. The time of admission is from a push to the
moment its sampler has read the receipt, which goes out once the group is on disk, at half of the
rate that is kept. Bytes are those of the TCP connections into the trainer, whatever they carry,
over those of the sealed groups. Then one hostile peer floods, turn by turn with no flood.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
from collections.abc import Generator
from contextlib import contextmanager
from typing import Final

from rich.console import Console
from rich.table import Table

from benchmarks.load_profile import IDLE
from benchmarks.load_run import UNANSWERED
from benchmarks.load_swarm import PROCESSES, SAMPLERS, Level, Swarm, start_swarm

FIRST: Final = 60.0
RISE: Final = 1.5
FINER: Final = 3
"""Rates that are tried between the highest that was kept and the lowest that was not."""
PAIRS: Final = 7
BUSY: Final = 0.85
"""The share of a core above which the loop itself is the limit."""


class Bench:
    """Levels, each in a swarm that has room for it."""

    def __init__(self, swarms: Generator[Swarm]) -> None:
        self._swarms = swarms
        self._swarm = next(swarms)
        self.levels: list[Level] = []

    def level(self, rate: float, seconds: float, *, flood: bool = False) -> Level:
        if self._swarm.left < 1.5 * rate * seconds:
            self._swarm = next(self._swarms)
        found = self._swarm.level(rate, seconds, flood=flood, watch=True)
        self.levels.append(found)
        _show_line(found)
        return found


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--seconds", type=float, default=8.0, help="of each rate")
    options.add_argument("--pairs", type=int, default=PAIRS, help="with the flood and without it")
    options.add_argument(
        "--most", type=float, default=5_000.0, help="groups a second that are offered at most"
    )
    options.add_argument(
        "--samplers", type=int, default=SAMPLERS, help=f"in {PROCESSES} processes ({SAMPLERS})"
    )
    given = options.parse_args()
    if given.samplers < PROCESSES:
        options.error(f"at least {PROCESSES} samplers")
    with _bench(given.samplers) as bench:
        kept, broken = climb(bench, given.seconds, given.most)
        half = bench.level(kept.offered / 2, given.seconds)
        pairs = [
            flood_pair(bench, kept.offered, given.seconds, first=bool(n % 2)) for n in range(given.pairs)
        ]
    under_flood = (
        statistics.median(flooded.rate / calm.rate for flooded, calm in pairs) if pairs else math.nan
    )
    _show(bench.levels, given.samplers)
    print(
        json.dumps(
            {
                "groups_per_s": round(kept.rate, 1),
                "bytes_per_group_overhead": round(kept.overhead, 3),
                "bytes_over_bodies": round(kept.body_overhead, 3),
                "p99_admission_ms": round(half.percentile(0.99), 1),
                "p50_admission_ms": round(half.median, 1),
                "admission_is": "from the push to the receipt read by its sampler, at half of groups_per_s",
                "cpu_ms_per_group": round(kept.cpu_ms, 3),
                "honest_under_flood": round(under_flood, 3) if pairs else None,
                "limited_by": limit(broken or kept, given.samplers),
            }
        )
    )


@contextmanager
def _bench(samplers: int) -> Generator[Bench]:
    swarms = _one_after_the_other(samplers)
    try:
        yield Bench(swarms)
    finally:
        swarms.close()


def _one_after_the_other(samplers: int) -> Generator[Swarm]:
    while True:
        with start_swarm(samplers) as swarm:
            swarm.level(FIRST, 2.0)  # caches fill, connections settle
            yield swarm


def climb(bench: Bench, seconds: float, most: float) -> tuple[Level, Level | None]:
    """Return the highest rate that was kept, and the lowest that was not."""
    kept: Level | None = None
    broken: Level | None = None
    rate = FIRST
    while broken is None and rate <= most:
        found = bench.level(rate, seconds)
        kept, broken = (found, None) if found.is_kept else (kept, found)
        rate *= RISE
    if kept is None:
        raise SystemExit(f"not even {FIRST:g} groups a second are taken in on this machine as it is")
    for _ in range(FINER if broken else 0):
        assert broken is not None
        found = bench.level(math.sqrt(kept.offered * broken.offered), seconds)
        kept, broken = (found, broken) if found.is_kept else (kept, found)
    return kept, broken


def flood_pair(bench: Bench, rate: float, seconds: float, *, first: bool) -> tuple[Level, Level]:
    """Measure with and without the flood, in alternating order."""
    if first:
        flooded = bench.level(rate, seconds, flood=True)
        return flooded, bench.level(rate, seconds)
    calm = bench.level(rate, seconds)
    return bench.level(rate, seconds, flood=True), calm


def limit(level: Level, samplers: int) -> str:
    """Return why a rate was not kept, in one line."""
    idle = level.spent.get(IDLE, 0.0)
    parts = [f"{part} {share:.0%}" for part, share in level.spent.items() if part != IDLE and share >= 0.03]
    used, cores = level.cpu + level.jail_cpu + level.load_cpu, os.cpu_count() or 1
    unanswered, window = level.rate * level.median / 1000, samplers * UNANSWERED
    if 1 - idle > BUSY:
        what = "the trainer's event loop"
    elif used > BUSY * cores:
        what = f"this machine, whose {cores} cores the trainer and its samplers share: {used:.2f} are busy"
    elif unanswered > BUSY * window:
        what = f"the samplers, with {unanswered:.0f} of {window} groups unanswered that they may have"
    else:
        what = "waiting for the disk or the jail"
    return f"{what}; the trainer's event loop is idle {idle:.0%} of the time: {', '.join(parts)}"


def _show_line(level: Level) -> None:
    flooded = f"  flood {level.flood}" if level.flood else ""
    print(
        f"{level.offered:7.0f} groups/s offered: {level.rate:7.1f} in time, {level.lost} lost, {level.by_hand} by hand, "
        f"p50 {level.median:.0f} ms, p99 {level.percentile(0.99):.0f} ms, held back {level.held_back:.2f} s, "
        f"drained in {level.drain:.2f} s, trainer {level.cpu:.2f} + jail {level.jail_cpu:.2f} cores, {level.cpu_ms:.2f} ms a group, "
        f"samplers {level.load_cpu:.2f}{'' if level.is_kept else '  NOT KEPT'}{flooded}",
        flush=True,
    )


def _show(levels: list[Level], samplers: int) -> None:
    table = Table(title=f"One trainer, {samplers} simulated samplers in {PROCESSES} processes")
    columns = (
        "offered/s",
        "answered/s",
        "lost",
        "refused",
        "by hand",
        "p50 ms",
        "p99 ms",
        "overhead",
        "cores",
        "kept",
    )
    for column in columns:
        table.add_column(column, justify="right")
    for each in levels:
        table.add_row(
            f"{each.offered:.0f}" + (" + flood" if each.flood else ""),
            f"{each.rate:.1f}",
            str(each.lost),
            ", ".join(f"{reason} {count}" for reason, count in each.refused.items()) or "0",
            str(each.by_hand),
            f"{each.median:.0f}",
            f"{each.percentile(0.99):.0f}",
            f"{each.overhead:.3f}",
            f"{each.cpu:.2f}",
            "yes" if each.is_kept else "no",
        )
    Console().print(table)
    shares = Table(title="Where the time of the trainer's event loop goes, by rate")
    parts = sorted({part for each in levels for part in each.spent})
    for column in ("offered/s", *parts):
        shares.add_column(column, justify="right")
    for each in levels:
        label = f"{each.offered:.0f}" + (" + flood" if each.flood else "")
        shares.add_row(label, *(f"{each.spent.get(part, 0.0):.0%}" for part in parts))
    Console().print(shares)


if __name__ == "__main__":
    main()
