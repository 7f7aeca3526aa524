"""Resources of the machine, read from files of both generations of control groups."""

from __future__ import annotations

import mmap
import os
import resource

import numpy as np
import pytest

from echo_node.engine import host_resources

GB = 2**30


@pytest.fixture
def proc(tmp_path):
    """A /proc of a process in the control group /a/b."""
    at = tmp_path / "proc"
    (at / "self").mkdir(parents=True)
    (at / "self" / "cgroup").write_text("0::/a/b\n")
    (at / "meminfo").write_text(f"MemTotal: {8 * GB // 1024} kB\nMemAvailable:   {4 * GB // 1024} kB\n")
    return at


@pytest.fixture
def groups(tmp_path):
    at = tmp_path / "cgroup"
    (at / "a" / "b").mkdir(parents=True)
    return at


def test_free_cores_are_at_least_one_and_at_most_those_of_the_mask():
    assert 1 <= host_resources.free_cores(0.02) <= len(host_resources.cores()) <= (os.cpu_count() or 1)


def test_a_process_that_may_use_one_core_has_one():
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        assert host_resources.cores() == {min(before)}
        assert host_resources.free_cores(0.02) == 1
    finally:
        os.sched_setaffinity(0, before)


@pytest.mark.parametrize(("busy", "free"), [(0, 4), (100, 3), (140, 3), (160, 2), (390, 1), (400, 1)])
def test_what_others_use_is_taken_off(proc, groups, monkeypatch, busy, free):
    def watch(_seconds):
        write_stat(proc, busy)

    write_stat(proc, 0)
    monkeypatch.setattr(host_resources, "cores", lambda: frozenset(range(4)))
    monkeypatch.setattr(host_resources.time, "process_time", lambda: 0.0)
    monkeypatch.setattr(host_resources.time, "sleep", watch)
    assert host_resources.free_cores(1, proc=proc, groups=groups) == free


def write_stat(proc, busy):
    """Four cores, busy by so many hundredths for a second; a fifth, not ours, all the time."""
    lines = ["cpu  0 0 0 0 0 0 0 0 0 0"]
    for core in range(4):
        mine = busy / 4
        lines.append(
            f"cpu{core} {1000 + mine / 2:.0f} 5 {70 + mine / 2:.0f} {9000 + (100 - mine) * bool(busy):.0f} 9 0 0 0 0 0"
        )
    lines.append(f"cpu4 {5000 + 100 * bool(busy)} 0 0 100 0 0 0 0 0 0")
    (proc / "stat").write_text("\n".join([*lines, "intr 1 2 3", ""]))


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, None),
        ({"a/b/cpu.max": "max 100000"}, None),
        ({"a/b/cpu.max": "150000 100000"}, 1.5),
        ({"a/b/cpu.max": "max 100000", "a/cpu.max": "200000 100000", "cpu.max": "300000 100000"}, 2.0),
        ({"a/b/cpu.max": "nonsense"}, None),
        ({"a/b/cpu.max": ""}, None),
    ],
)
def test_the_quota_is_the_tightest_of_all_groups_above(proc, groups, files, quota):
    for name, text in files.items():
        (groups / name).write_text(text + "\n")
    assert host_resources.core_quota(proc=proc, groups=groups) == quota


def test_the_quota_of_the_old_groups_is_read(proc, groups):
    (proc / "self" / "cgroup").write_text("4:memory:/m\n2:cpu,cpuacct:/c\n0::/\n")
    (groups / "cpu,cpuacct" / "c").mkdir(parents=True)
    (groups / "memory" / "m").mkdir(parents=True)
    (groups / "cpu,cpuacct" / "c" / "cpu.cfs_quota_us").write_text("250000\n")
    (groups / "cpu,cpuacct" / "c" / "cpu.cfs_period_us").write_text("100000\n")
    (groups / "memory" / "m" / "memory.limit_in_bytes").write_text(f"{3 * GB}\n")
    (groups / "memory" / "m" / "memory.usage_in_bytes").write_text(f"{GB}\n")
    assert host_resources.core_quota(proc=proc, groups=groups) == 2.5
    assert host_resources.available_memory(proc=proc, groups=groups) == 2 * GB
    (groups / "cpu,cpuacct" / "c" / "cpu.cfs_quota_us").write_text("-1\n")
    assert host_resources.core_quota(proc=proc, groups=groups) is None


def test_a_small_quota_still_leaves_one_core(proc, groups, monkeypatch):
    write_stat(proc, 0)
    monkeypatch.setattr(host_resources, "cores", lambda: frozenset(range(4)))
    for quota, free in ((30_000, 1), (250_000, 2), (900_000, 4)):
        (groups / "a" / "b" / "cpu.max").write_text(f"{quota} 100000\n")
        assert host_resources.free_cores(0.001, proc=proc, groups=groups) == free


def test_memory_is_that_of_the_machine_or_of_the_group_whichever_is_less(proc, groups):
    assert host_resources.available_memory(proc=proc, groups=groups) == 4 * GB
    (groups / "a" / "memory.max").write_text(f"{2 * GB}\n")
    (groups / "a" / "memory.current").write_text(f"{GB}\n")
    (groups / "a" / "b" / "memory.max").write_text("max\n")
    (groups / "a" / "b" / "memory.current").write_text("5\n")
    assert host_resources.available_memory(proc=proc, groups=groups) == GB
    (groups / "a" / "memory.current").write_text(f"{3 * GB}\n")
    assert host_resources.available_memory(proc=proc, groups=groups) == 0


def test_where_nobody_says_nothing_is_claimed(tmp_path):
    nothing = tmp_path / "nothing"
    assert host_resources.available_memory(proc=nothing, groups=nothing) is None
    assert host_resources.core_quota(proc=nothing, groups=nothing) is None
    assert host_resources.reserved_memory(proc=nothing) is None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    assert host_resources.used_memory(proc=nothing) >= peak
    assert 1 <= host_resources.free_cores(0.001, proc=nothing, groups=nothing) <= len(host_resources.cores())


def test_memory_that_is_touched_is_used_and_memory_that_is_asked_for_is_reserved():
    used, reserved = host_resources.used_memory(), host_resources.reserved_memory()
    # Fresh pages from the system: an allocator may hand out what it has kept from before.
    pages = mmap.mmap(-1, 64 * 2**20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    assert host_resources.reserved_memory() >= reserved + 60 * 2**20
    block = np.frombuffer(pages, np.uint8)
    block[:] = 1
    assert host_resources.used_memory() >= used + 60 * 2**20
    assert 0 < host_resources.available_memory() < 2**50
