"""One chaos run from set-up to verdict.

The world is made, the swarm comes up, the nemesis works, a quiet time follows in which all must
make progress; then everybody is stopped, everything is written down and checked.

    place/chaos.json  place/timeline.jsonl  place/run/
    place/nodes/NAME/{state/,events.jsonl,stderr}
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import trio

from tests.chaos.clock import build_shim
from tests.chaos.faults import Faults
from tests.chaos.invariants import check
from tests.chaos.nemesis import HOSTILE_NODE, Fault, Nemesis
from tests.chaos.progress import Quiet, until_it_works
from tests.chaos.soak import Soak
from tests.chaos.swarm import STALENESS, Part, Swarm
from tests.chaos.timeline import Say, Timeline
from tests.chaos.world import end_all, world

BOUND_SECONDS: Final = 150.0
"""Seconds in which every living node must make progress after the last fault.

Two cores carry a whole swarm here: most of it is starting.
"""
UP_SECONDS: Final = 300.0
SOAK_LOOK_SECONDS: Final = 60.0


@dataclass(frozen=True)
class Wanted:
    """Settings of a run.

    `coming` are the faults; with `soak`, measurements are made while it lasts.
    """

    seed: int
    parts: Sequence[Part]
    place: Path
    coming: Iterable[Fault]
    soak: bool = False
    minutes: float | None = None


def run(wanted: Wanted, say: Say) -> dict[str, Any]:
    """Do it. What is returned can be written as JSON; `findings` are all that must not be."""
    wanted.place.mkdir(parents=True)
    line = Timeline(wanted.place / "timeline.jsonl", say)
    names = [*(part.name for part in wanted.parts), HOSTILE_NODE]
    try:
        with world(names, wanted.seed) as made:
            swarm = Swarm(wanted.place, made, wanted.parts, build_shim(wanted.place), line)
            try:
                _describe(wanted, swarm)
                told = trio.run(_live, wanted, swarm, say)
            finally:
                left = end_all(lambda owner: owner == os.getpid())
                swarm.close()
            for command in left:
                swarm.fail("leaves-nothing", None, f"a process was left behind: {command}")
        findings = [asdict(each) for each in swarm.failings]
        return _checked(wanted.place, told, findings)
    finally:
        line.close()


def _describe(wanted: Wanted, swarm: Swarm) -> None:
    nodes: dict[str, dict[str, Any]] = {
        member.name: {
            "role": member.part.role,
            "peer_id": member.peer_id,
            "engine": member.part.engine,
            "honest": True,
        }
        for member in swarm.members.values()
    }
    told = {
        "seed": wanted.seed,
        "nodes": nodes,
        "started": time.time(),
        "run": "run",
        "staleness": STALENESS,
        "bound_seconds": BOUND_SECONDS,
    }
    (wanted.place / "chaos.json").write_text(json.dumps(told, indent=2))


async def _live(wanted: Wanted, swarm: Swarm, say: Say) -> dict[str, Any]:
    """The time in which nodes run."""
    faults, soak = Faults(swarm), Soak(swarm)
    async with trio.open_nursery() as nursery:
        for member in swarm.members.values():
            nursery.start_soon(swarm.keep, member)
        await _come_up(swarm)
        nemesis = Nemesis(faults.do)
        if wanted.soak:
            nursery.start_soon(_measure, soak, say)
        with trio.move_on_after(60 * wanted.minutes if wanted.minutes else float("inf")):
            await _until_told(nemesis, wanted)
        await _calm(swarm)
        await swarm.stop()
        swarm.line.note("end")
        nursery.cancel_scope.cancel()
    result: dict[str, Any] = {"seed": wanted.seed, "faults": dict(sorted(faults.done.items()))}
    result["versions"] = swarm.head_version
    result["weather"] = swarm.world.weather.counts()
    return result | ({"slopes": soak.slopes()} if wanted.soak else {})


async def _come_up(swarm: Swarm) -> None:
    for member in swarm.members.values():
        member.want(running=True)
    wanting = await until_it_works(swarm, UP_SECONDS)
    for name in wanting:
        swarm.fail("comes-up", name, f"it did not begin to work within {UP_SECONDS:g} s")
    swarm.line.note("up", None, head=swarm.head_version)


async def _until_told(nemesis: Nemesis, wanted: Wanted) -> None:
    """Wait until the plan is done.

    A soak has a plan without end: it ends with its minutes, or when it is told to.
    """
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_hear_of_the_end, nursery.cancel_scope if wanted.soak else None)
        await nemesis.act(wanted.coming)
        nursery.cancel_scope.cancel()


async def _hear_of_the_end(scope: trio.CancelScope | None) -> None:
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as told:
        async for _ in told:
            if scope is None:
                raise KeyboardInterrupt
            scope.cancel()


async def _calm(swarm: Swarm) -> None:
    swarm.line.note("quiet", None, head=swarm.head_version)
    for name in await Quiet(swarm).until_all_get_on(BOUND_SECONDS):
        last = json.dumps(swarm.members[name].last("progress"))
        swarm.fail(
            "gets-on", name, f"no progress within {BOUND_SECONDS:g} s of the last fault; last said: {last}"
        )
    swarm.line.note("all well" if not swarm.failings else "not well", None, head=swarm.head_version)


async def _measure(soak: Soak, say: Say) -> None:
    while True:
        say(soak.look())
        await trio.sleep(SOAK_LOOK_SECONDS)


def _checked(place: Path, told: dict[str, Any], findings: list[dict[str, Any]]) -> dict[str, Any]:
    """With what the checker finds in the nodes' ledgers, stores and logs."""
    report = check(place)
    findings += [asdict(each) for each in report.findings]
    return told | {"counts": report.counts, "findings": findings}
