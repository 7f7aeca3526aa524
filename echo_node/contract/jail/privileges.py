"""What a jailed process of Linux gives up before anything of the contract is imported: new privileges, the network and
the users that everybody else sees, every capability. And its tie to its parent, with which it ends.

Namespaces can be had by a process of one thread only, which is why this comes before the import. It knows nothing of
files and system calls.
"""

from __future__ import annotations

import ctypes
import os
import signal
from pathlib import Path
from typing import Final

from echo_node.contract.jail import kernel
from echo_node.contract.jail.layer import LayerError

PARENT_GONE: Final = 113
_CLONE_NEWUSER: Final = 0x1000_0000
_CLONE_NEWNET: Final = 0x4000_0000
_CLONE_NEWIPC: Final = 0x0800_0000
_CAPGET: Final = {"x86_64": 125, "aarch64": 90}
_CAPABILITIES_3: Final = 0x2008_0522


class _Header(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _Sets(ctypes.Structure):
    _fields_ = (
        ("effective", ctypes.c_uint32),
        ("permitted", ctypes.c_uint32),
        ("inheritable", ctypes.c_uint32),
    )


def forgo_privileges() -> None:
    """No program that this process could ever become has more rights than it."""
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    if kernel.prctl(kernel.PR_GET_NO_NEW_PRIVS) != 1:
        raise LayerError("the kernel does not say that it holds")


def leave_namespaces() -> None:
    """A network of its own, without an interface that is up, and users of which none is anybody."""
    before = _namespaces()
    try:
        kernel.unshare(_CLONE_NEWUSER | _CLONE_NEWNET | _CLONE_NEWIPC)
    except OSError as error:
        raise LayerError(f"{error.strerror}; this system or container forbids new user namespaces") from error
    if any(now == then for now, then in zip(_namespaces(), before, strict=True)):
        raise LayerError("the process is still where it was")


def drop_capabilities(machine: str) -> None:
    """None is left, not even within its own namespace; root is a user like any other then."""
    header, sets = _Header(_CAPABILITIES_3, 0), (_Sets * 2)()
    number = _CAPGET.get(machine)
    if number is None:
        raise LayerError(f"not written for {machine}")
    kernel.call("capset", number + 1, ctypes.byref(header), sets)
    kernel.call("capget", number, ctypes.byref(header), sets)
    if any(one.effective or one.permitted or one.inheritable for one in sets):
        raise LayerError("some are left")


def die_with(parent: int) -> None:
    """Let the kernel end this process with its parent, and keep others of its user from looking into it.

    A change of credentials makes the kernel forget both, so this comes after them.
    """
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
    if os.getppid() != parent:  # it went before anybody could be told
        os._exit(PARENT_GONE)


def _namespaces() -> list[str]:
    return [str(Path("/proc/self/ns", name).readlink()) for name in ("user", "net", "ipc")]
