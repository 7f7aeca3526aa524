"""Where a chaos run takes place: machines in network namespaces, and their disks.

Each machine has one address and one link. The disks are in a mount namespace, so that nothing stays
mounted, however the run ends.

What a killed run left behind, the next one takes away.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Final

import psutil

from tests.chaos.weather import DEVICE, MTU, Weather, WeatherError
from tests.net.namespaces import PREFIX, WORLD, Machine, _ip, _sweep

OWNER: Final = "ECHO_CHAOS_OWNER"
"""Environment variable of every process of a run: the process that started it.

It finds grandchildren too.
"""
_NEW_MOUNTS: Final = 0x00020000
_PRIVATE_ALL_THE_WAY: Final = 0x40000 | 0x4000


class NoWorldError(RuntimeError):
    """This machine does not let a world be made; the text says why in one line."""


class World:
    """Machines by name, and the weather between them."""

    def __init__(self, names: Sequence[str], seed: int) -> None:
        self._name = f"{PREFIX}-{os.getpid()}-{secrets.token_hex(3)}"
        self._made: list[str] = []
        self.machines: dict[str, Machine] = {}
        self.numbers = {name: number for number, name in enumerate(names)}
        """As the weather knows them."""
        for name, number in self.numbers.items():
            namespace = f"{self._name}-{name}"
            _ip("netns", "add", namespace)
            self._made.append(namespace)
            _ip("-n", namespace, "link", "set", "lo", "up")
            address = f"{WORLD}.{number + 1}"
            self.machines[name] = Machine(namespace, address, address)
        self.weather = Weather(self._made, WORLD, seed)
        for machine in self.machines.values():
            _ip("-n", machine.namespace, "address", "add", f"{machine.address}/24", "dev", DEVICE)
            _ip("-n", machine.namespace, "link", "set", DEVICE, "mtu", str(MTU), "up")

    def close(self) -> None:
        if hasattr(self, "weather"):
            self.weather.close()
        for namespace in reversed(self._made):
            subprocess.run(["ip", "netns", "delete", namespace], check=False, capture_output=True, timeout=20)


@contextmanager
def world(names: Sequence[str], seed: int) -> Iterator[World]:
    """The world of one run. Call `own_mounts` first, where disks are wanted."""
    check_that_it_can_be()
    sweep()
    made = World.__new__(World)
    try:
        try:
            made.__init__(names, seed)  # so that what was made before a failure is taken away as well
        except subprocess.CalledProcessError as error:
            raise NoWorldError(f"this machine makes no network namespaces: {error.stderr.strip()}") from error
        except WeatherError as error:
            raise NoWorldError(f"this machine makes no TUN devices: {error}") from error
        yield made
    finally:
        made.close()


def check_that_it_can_be() -> None:
    """What can be known beforehand."""
    if sys.platform != "linux" or shutil.which("ip") is None:
        raise NoWorldError("network namespaces need Linux and the `ip` command of iproute2")
    if os.geteuid() != 0:
        raise NoWorldError("network namespaces need root")
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        raise NoWorldError("links between namespaces need /dev/net/tun")


def own_mounts() -> None:
    """Make this process's mounts visible to it and its children alone, and gone with them."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_NEW_MOUNTS) or libc.mount(b"none", b"/", None, _PRIVATE_ALL_THE_WAY, None):
        raise NoWorldError(f"this machine makes no mount namespaces: {os.strerror(ctypes.get_errno())}")


def sweep() -> None:
    """Take away processes and namespaces of runs that have died."""
    end_all(lambda owner: not psutil.pid_exists(owner))
    _sweep()


def end_all(is_meant) -> list[str]:
    """End every process whose owner is meant; the command lines of those that there were."""
    left = [process for process in psutil.process_iter() if (owner := _owner(process)) and is_meant(owner)]
    found = []
    for process in left:
        with suppress(psutil.Error):
            found.append(" ".join(process.cmdline())[:200])
            process.kill()
    psutil.wait_procs(left, timeout=5)
    return found


def _owner(process: psutil.Process) -> int:
    try:
        if process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE:
            return 0
        return int(process.environ().get(OWNER, 0))
    except (psutil.Error, OSError, ValueError):
        return 0
