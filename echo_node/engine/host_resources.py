"""Host resources: free cores, available memory, memory used by this process.

Read from the kernel's files on Linux, with its control groups; elsewhere from what Python offers.
"""

from __future__ import annotations

import os
import re
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from echo_node.errors import EngineError

PROC: Final = Path("/proc")
GROUPS: Final = Path("/sys/fs/cgroup")
SAMPLE_SECONDS: Final = 0.2


def free_cores(seconds: float = SAMPLE_SECONDS, *, proc: Path = PROC, groups: Path = GROUPS) -> int:
    """Return the cores free for this process, at least 1.

    These are cores that it may use and that nobody else used for `seconds`.
    """
    mine = cores()
    quota = core_quota(proc=proc, groups=groups)
    free = len(mine) - busy_cores(mine, seconds, proc=proc)
    return max(1, min(round(free), len(mine), len(mine) if quota is None else int(quota)))


def cores() -> frozenset[int]:
    """Return the cores on which this process may run."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def core_quota(*, proc: Path = PROC, groups: Path = GROUPS) -> float | None:
    """Cores' worth of time that the control groups grant; None: as much as there is."""
    found: list[float] = []
    for folder in _group_folders("cpu", proc, groups):
        grant = _words(folder / "cpu.max")[:2]
        if not grant:
            grant = _words(folder / "cpu.cfs_quota_us")[:1] + _words(folder / "cpu.cfs_period_us")[:1]
        if len(grant) == 2 and grant[0].isdigit() and grant[1].isdigit() and int(grant[1]):
            found.append(int(grant[0]) / int(grant[1]))
    return min(found, default=None)


def busy_cores(mine: frozenset[int], seconds: float = SAMPLE_SECONDS, *, proc: Path = PROC) -> float:
    """Return how many of these cores others keep busy, measured for `seconds`."""
    before, own, begin = _core_times(mine, proc), time.process_time(), time.monotonic()
    if before is None:
        return min(float(len(mine)), os.getloadavg()[0])
    time.sleep(seconds)
    after = _core_times(mine, proc)
    elapsed = time.monotonic() - begin
    ours = (time.process_time() - own) / elapsed if elapsed else 0.0
    if after is None or after[1] <= before[1]:
        return 0.0
    busy = len(mine) * (after[0] - before[0]) / (after[1] - before[1])
    return min(float(len(mine)), max(0.0, busy - ours))


def available_memory(*, proc: Path = PROC, groups: Path = GROUPS) -> int | None:
    """Return the bytes that this process can take within all limits; None if unknown."""
    found = [_machine_memory(proc), _under_own_limit(proc)]
    for folder in _group_folders("memory", proc, groups):
        for limit, used in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            most, now = _words(folder / limit)[:1], _words(folder / used)[:1]
            if most and now and most[0].isdigit() and now[0].isdigit():
                found.append(max(0, int(most[0]) - int(now[0])))
    return min((each for each in found if each is not None), default=None)


def used_memory(*, proc: Path = PROC) -> int:
    """Return the bytes used by this process, without mapped files.

    The kernel can drop mapped files at any time. Where it does not report this, the peak.
    """
    found = re.findall(r"^(?:RssAnon|RssShmem):\s+(\d+) kB$", _text(proc / "self" / "status"), re.MULTILINE)
    if found:
        return sum(map(int, found)) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def reserved_memory(*, proc: Path = PROC) -> int | None:
    """Return the bytes of data that this process reserved; None if unknown.

    They count whether touched or not.
    """
    found = re.search(r"^VmData:\s+(\d+) kB$", _text(proc / "self" / "status"), re.MULTILINE)
    return int(found[1]) * 1024 if found else None


def _machine_memory(proc: Path) -> int | None:
    found = re.search(r"^MemAvailable:\s+(\d+) kB$", _text(proc / "meminfo"), re.MULTILINE)
    return int(found[1]) * 1024 if found else None


def _under_own_limit(proc: Path) -> int | None:
    most, reserved = resource.getrlimit(resource.RLIMIT_DATA)[0], reserved_memory(proc=proc)
    return None if most == resource.RLIM_INFINITY or reserved is None else max(0, most - reserved)


def _core_times(mine: frozenset[int], proc: Path) -> tuple[int, int] | None:
    """Ticks of these cores: busy, and in all."""
    busy = total = 0
    for line in _text(proc / "stat").splitlines():
        name, *ticks = line.split()
        if re.fullmatch(r"cpu\d+", name) and int(name[3:]) in mine:
            user, nice, system, idle, iowait, *others = map(
                int, ticks[:8]
            )  # the rest is within user and nice
            working = user + nice + system + sum(others)
            busy, total = busy + working, total + working + idle + iowait
    return (busy, total) if total else None


def _group_folders(controller: str, proc: Path, groups: Path) -> Iterator[Path]:
    """Yield the control group folders that bound this process, its own first."""
    for line in _text(proc / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = groups / controllers if controllers else groups
        if controllers and not root.is_dir():
            root = groups / controller
        here = Path(path.lstrip("/"))
        for folder in (here, *here.parents):
            yield root / folder


def _words(file: Path) -> list[str]:
    return _text(file).split()


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""


SPARE: Final = 0.9
"""The part of what is free that one thing may take."""


class NoRoomError(EngineError):
    """Too little memory on this machine."""


def check_fits(wanted: int, what: str, *, advice: str) -> None:
    """Refuse what takes more bytes than this machine has free."""
    free = available_memory()
    if free is not None and wanted > SPARE * free:
        raise NoRoomError(
            f"{what} would take {wanted / 1e9:.2f} GB, and {free / 1e9:.2f} GB are free", advice=advice
        )
