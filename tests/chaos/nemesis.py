"""The plan of faults of a chaos run, and what carries it out.

The plan is drawn from a seed before anything starts, so that it can be shown and repeated.

It knows how faults fall upon nodes in time, and nothing of how they are done.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import trio

from tests.chaos.disks import HURTS
from tests.chaos.swarm import LEASE_SECONDS, Part

WEATHER: Final = ("halves", "one_way", "flapping", "latency", "loss", "reorder")
ON_ONE: Final = ("kill", "stop", "full_disk", "slow_disk", "clock", "corrupt")
HOSTILE: Final = ("flood", "forge", "make_up", "replay", "half_message", "many_streams", "crowd", "misdirect")
FAILOVER: Final = "failover"
"""Whoever leads is gone for longer than its lease."""
KINDS: Final = (FAILOVER, *ON_ONE, *WEATHER, *(f"hostile_{each}" for each in HOSTILE))
HOSTILE_NODE: Final = "hostile"
ROLES: Final = ("trainer", "trainer", "verifier", "sampler", "bootstrap")
"""Whom a fault of one node hits: most depends on the trainers."""
OVERLAP: Final = 0.5
"""How often a fault comes while the one before still lasts; while nobody leads, always."""
FIRST_FAILOVER: Final = (4.0, 20.0)
"""Between these seconds every plan has its first failover, so that the shortest run has one."""
FILES: Final = {
    "bootstrap": ("peers.sqlite", "key"),
    "sampler": ("runs/*/outbox.sqlite", "runs/*/weights/blobs/*", "runs/*/weights/current"),
    "trainer": ("runs/*/journal.sqlite", "runs/*/records.sqlite", "runs/*/checkpoints/*", "runs/*/votes/*"),
    "verifier": ("runs/*/ledger.sqlite", "runs/*/votes/*", "runs/*/weights/state"),
}
"""Files whose loss hurts one role more than others."""
ANY_FILE: Final = ("peers.sqlite", "runs/*/weights/blobs/*", "runs/*/weights/heads/*", "runs/*/weights/state")


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong: when (seconds after the swarm works), to whom, for how long."""

    at: float
    kind: str
    targets: tuple[str, ...]
    seconds: float
    details: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        rest = " ".join(f"{name}={value}" for name, value in self.details.items())
        return f"{self.at:8.1f}  {self.kind:<20} {','.join(self.targets):<40} for {self.seconds:.1f} s  {rest}".rstrip()


def plan(seed: int, parts: Sequence[Part], seconds: float, kinds: Sequence[str] = KINDS) -> list[Fault]:
    """The faults of a run whose nemesis acts for so many seconds."""
    return list(itertools.takewhile(lambda fault: fault.at < seconds, faults(seed, parts, kinds)))


def faults(seed: int, parts: Sequence[Part], kinds: Sequence[str] = KINDS) -> Iterator[Fault]:
    """Yield faults without end, in the order of their times.

    Every kind comes before any comes again, a failover first of all within seconds; no node has two
    of its own at once.
    """
    luck = random.Random(f"chaos {seed}")
    deck, busy = luck.sample(kinds, len(kinds)), dict[str, float]()
    now, failover = 0.0, math.inf
    if FAILOVER in deck:
        deck.remove(FAILOVER)
        failover = _seconds(*FIRST_FAILOVER, luck)
        busy = dict.fromkeys(_trainers(parts), failover)
    while True:
        deck = deck or luck.sample(kinds, len(kinds))
        fault = _draw(deck[-1], now, parts, busy, luck)
        if fault.at < failover:
            deck.pop()
        else:
            fault, failover = _draw(FAILOVER, failover, parts, busy, luck), math.inf
        busy |= dict.fromkeys(
            fault.targets if fault.kind not in WEATHER else (), fault.at + fault.seconds + 8
        )
        yield fault
        lasts = fault.kind != FAILOVER and luck.random() >= OVERLAP
        over = luck.uniform(1, 4) + (fault.seconds if lasts else 0.0)
        now = round(min(fault.at + over, failover), 1)


def _draw(kind: str, now: float, parts: Sequence[Part], busy: dict[str, float], luck: random.Random) -> Fault:
    if kind.startswith("hostile_"):
        at = max(now, busy.get(HOSTILE_NODE, 0.0))
        return Fault(at, kind, (HOSTILE_NODE,), _seconds(8, 15, luck))
    if kind == FAILOVER:  # any of them may be the one that leads
        at = max(now, *(busy.get(name, 0.0) for name in _trainers(parts)))
        whole = luck.random() < 0.5
        seconds = _seconds(LEASE_SECONDS + 4, LEASE_SECONDS + 12, luck)
        return Fault(at, kind, _trainers(parts), seconds, {"whole": whole})
    names = [part.name for part in parts]
    if kind in WEATHER:
        return _weather(kind, now, names, luck)
    free = [part for part in parts if busy.get(part.name, 0.0) <= now]
    if kind in {"full_disk", "slow_disk", "corrupt"}:
        free = [part for part in free if part.role != "bootstrap"] or free
    at = now if free else min(busy[part.name] for part in parts)
    free = free or [part for part in parts if busy[part.name] <= at]
    role = luck.choice([each for each in ROLES if any(part.role == each for part in free)])
    part = luck.choice([part for part in free if part.role == role])
    return Fault(at, kind, (part.name,), *_upon(kind, part, luck))


def _upon(kind: str, part: Part, luck: random.Random) -> tuple[float, dict[str, Any]]:
    """How long one node is hit, and how."""
    if kind == "kill":
        return luck.choice((0.5, 4.0, 20.0)), {"whole": luck.random() < 0.5}
    if kind == "stop":
        return luck.choice((2.0, 8.0, 20.0)), {}
    if kind == "full_disk":
        return _seconds(5, 12, luck), {}
    if kind == "slow_disk":
        return _seconds(8, 15, luck), {"sync": luck.choice((0.05, 0.3)), "write": luck.choice((0.0, 0.01))}
    if kind == "clock":
        return _seconds(5, 15, luck), {"jump": luck.choice((-86_400, -3_600, -20, 20, 3_600, 86_400))}
    files = FILES[part.role] if luck.random() < 0.7 else ANY_FILE
    patterns = luck.sample(files, len(files))
    return 1.0, {"files": patterns, "how": luck.choice(HURTS), "luck": luck.randrange(1 << 30)}


def _weather(kind: str, now: float, names: list[str], luck: random.Random) -> Fault:
    mixed = luck.sample(names, len(names))
    cut = luck.randrange(1, len(names))
    some = tuple(sorted(mixed[:cut]))
    if kind == "halves":
        half = tuple(sorted(mixed[: len(names) // 2]))
        return Fault(now, kind, half, luck.choice((4.0, 10.0, 20.0)))
    if kind == "one_way":
        return Fault(now, kind, some, _seconds(5, 15, luck), {"to": sorted(mixed[cut:])})
    if kind == "flapping":
        return Fault(now, kind, some, _seconds(8, 16, luck), {"period": luck.choice((0.5, 1.5, 3.0))})
    if kind == "latency":
        told = {"delay": luck.choice((0.05, 0.15, 0.4)), "jitter": luck.choice((0.01, 0.1))}
        return Fault(now, kind, tuple(names), _seconds(8, 15, luck), told)
    if kind == "loss":
        return Fault(
            now, kind, tuple(names), _seconds(6, 12, luck), {"share": luck.choice((0.01, 0.05, 0.15))}
        )
    return Fault(now, kind, tuple(names), _seconds(8, 15, luck), {"share": luck.choice((0.05, 0.25))})


def _trainers(parts: Sequence[Part]) -> tuple[str, ...]:
    return tuple(part.name for part in parts if part.role == "trainer")


def _seconds(least: float, most: float, luck: random.Random) -> float:
    return round(luck.uniform(least, most), 1)


class Nemesis:
    """Carry out faults at their times.

    `do` is a context that is entered for each, for as long as it lasts.
    """

    def __init__(self, do) -> None:
        self._do = do
        self._began = trio.current_time()

    async def act(self, coming) -> None:
        """All of these; when it returns, the last one is healed."""
        async with trio.open_nursery() as nursery:
            for fault in coming:
                await trio.sleep_until(self._began + fault.at)
                nursery.start_soon(self._act, fault)

    async def _act(self, fault: Fault) -> None:
        async with self._do(fault):
            await trio.sleep(fault.seconds)
