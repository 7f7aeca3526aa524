"""Privilege layers on Linux: no_new_privs, namespaces, capabilities, parent death.

They come before the contract's code is imported, because only a process of one thread can enter
new namespaces.
"""

from __future__ import annotations

import ctypes
import os
import signal
from pathlib import Path
from typing import Final

from echo_node.contract.jail import LayerError, syscall_ffi

PARENT_GONE: Final = 113
"""Exit code of a process whose parent is gone."""
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
    """Set no_new_privs: no program that this process executes gains rights."""
    syscall_ffi.prctl(syscall_ffi.PR_SET_NO_NEW_PRIVS, 1)
    if syscall_ffi.prctl(syscall_ffi.PR_GET_NO_NEW_PRIVS) != 1:
        raise LayerError("the kernel does not say that it holds")


def leave_namespaces() -> None:
    """Enter new user, network and IPC namespaces, without interface or user.

    No interface is up there, and no user is mapped.
    """
    before = _namespaces()
    try:
        syscall_ffi.unshare(_CLONE_NEWUSER | _CLONE_NEWNET | _CLONE_NEWIPC)
    except OSError as error:
        raise LayerError(f"{error.strerror}; this system or container forbids new user namespaces") from error
    if any(now == then for now, then in zip(_namespaces(), before, strict=True)):
        raise LayerError("the process is still in its old namespaces")


def drop_capabilities(machine: str) -> None:
    """Drop every capability, in its own namespace too; root is then an ordinary user."""
    header, sets = _Header(_CAPABILITIES_3, 0), (_Sets * 2)()
    number = _CAPGET.get(machine)
    if number is None:
        raise LayerError(f"no system call numbers are known for {machine}")
    syscall_ffi.call("capset", number + 1, ctypes.byref(header), sets)
    syscall_ffi.call("capget", number, ctypes.byref(header), sets)
    if any(one.effective or one.permitted or one.inheritable for one in sets):
        raise LayerError("some capabilities are left")


def die_with(parent: int) -> None:
    """Have the kernel kill this process with its parent, and forbid tracing it.

    A change of credentials resets both, so this comes after the other layers.
    """
    syscall_ffi.prctl(syscall_ffi.PR_SET_PDEATHSIG, signal.SIGKILL)
    syscall_ffi.prctl(syscall_ffi.PR_SET_DUMPABLE, 0)
    if os.getppid() != parent:  # it exited before the signal was set
        os._exit(PARENT_GONE)


def _namespaces() -> list[str]:
    return [str(Path("/proc/self/ns", name).readlink()) for name in ("user", "net", "ipc")]
