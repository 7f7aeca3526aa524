"""Shared by all tests: the hypothesis profile, and a check that no process is left behind."""

from __future__ import annotations

import logging
import os
import signal
import uuid

import psutil
import pytest
from hypothesis import settings

settings.register_profile("ci", derandomize=True, deadline=None)
settings.load_profile("ci")
if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):  # as in the background of a shell: then no child would hear Ctrl-C
    signal.signal(signal.SIGINT, signal.default_int_handler)

MARK = "ECHO_NODE_TEST_SESSION"
LONGEST = (
    "tests/chaos/test_chaos.py",
    "tests/weights/test_store_crashes.py",
    "tests/trainer/test_distributed.py",
    "tests/test_readme.py",
    "tests/net/test_recipient.py",
    "tests/swarm/test_swarm.py",
    "tests/verifier/test_calibration.py",
    "tests/swarm/test_arriving.py",
    "tests/net/test_hostile.py",
    "tests/swarm/test_operator.py",
    "tests/trainer/test_recovery.py",
    "tests/test_examples.py",
    "tests/cli/test_demo.py",
    "tests/net/test_reachability.py",
    "tests/test_loop.py",
    "tests/demo/test_processes.py",
    "tests/engine/test_distances.py",
    "tests/trainer/test_standby.py",
    "tests/chaos/test_hostile.py",
)
"""Files that take longest, which the workers of `make test` get first: none is left for the end.

Swarms of processes and tests within one process alternate, so that few swarms run side by side.
"""
OF_PYTHON_ITSELF = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")  # these end with us


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest files first; within a file, and among the others, the order stays."""
    places = {file: place for place, file in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.nodeid.partition("::")[0], len(LONGEST)))


@pytest.fixture(scope="session", autouse=True)
def no_process_is_left_behind():
    """End what the tests started and did not end, and fail for it.

    The mark in the environment finds grandchildren too, whose parent has died.
    """
    mark = os.environ[MARK] = uuid.uuid4().hex
    yield
    left = _leftovers(mark)
    if not left:
        return
    names = [_describe(process) for process in left]
    for process in left:
        _quietly(process.terminate)
    _, stubborn = psutil.wait_procs(left, timeout=3)
    for process in stubborn:
        _quietly(process.kill)
    psutil.wait_procs(stubborn, timeout=3)
    pytest.fail("the tests left processes behind:\n  " + "\n  ".join(names), pytrace=False)


@pytest.fixture(autouse=True)
def what_the_network_has_silenced_stays_silent():
    """Restore the level of libp2p's logger, which a command that runs within a test changes."""
    library = logging.getLogger("libp2p")
    before = library.level
    yield
    if before == logging.CRITICAL:
        library.setLevel(before)


def _leftovers(mark: str) -> list[psutil.Process]:
    """Processes of this session that still run after a moment's grace."""
    ours = {process for process in psutil.process_iter() if _carries(process, mark)}
    ours |= set(psutil.Process().children(recursive=True))
    ours = {process for process in ours if not _is_none_of_our_business(process)}
    _, alive = psutil.wait_procs(ours, timeout=2)
    return alive


def _carries(process: psutil.Process, mark: str) -> bool:
    try:
        return process.pid != os.getpid() and process.environ().get(MARK) == mark
    except (psutil.Error, OSError):
        return False


def _is_none_of_our_business(process: psutil.Process) -> bool:
    try:
        ended = process.status() == psutil.STATUS_ZOMBIE
        return ended or any(name in " ".join(process.cmdline()) for name in OF_PYTHON_ITSELF)
    except psutil.Error:
        return True


def _describe(process: psutil.Process) -> str:
    try:
        return f"{process.pid}: {' '.join(process.cmdline())[:200]}"
    except psutil.Error:
        return str(process.pid)


def _quietly(act) -> None:
    try:
        act()
    except psutil.NoSuchProcess:
        return
