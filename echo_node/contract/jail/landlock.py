"""Landlock layer: read-only access to given folders, no TCP, no signals outside.

No file is written, made or removed anywhere. Landlock does not cover chmod, chown or extended
attributes; `seccomp` does. It binds the calling thread and those that it starts, so `restrict`
refuses to run once other threads exist.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from echo_node.contract.jail import LayerError, syscall_ffi

_CREATE, _ADD, _RESTRICT = 444, 445, 446  # the same on every machine
_VERSION_ASKED: Final = 1
_PATH_BENEATH: Final = 1

_READ_FILE: Final = 1 << 2
_READ_FOLDER: Final = 1 << 3
_FILE_RIGHTS: Final = {1: 13, 2: 14, 3: 15, 5: 16}
"""Landlock version to the number of file access rights it knows, one bit each from the lowest."""
_TCP: Final = 0b11  # bind and connect, from version 4 on
_SCOPES: Final = 0b11  # abstract sockets and signals, from version 6 on


class _Ruleset(ctypes.Structure):
    _fields_ = (("files", ctypes.c_uint64), ("network", ctypes.c_uint64), ("scopes", ctypes.c_uint64))


class _Beneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed", ctypes.c_uint64), ("folder", ctypes.c_int32))


def version() -> int:
    """Return the kernel's Landlock version; raise `LayerError` if it has none."""
    try:
        return syscall_ffi.call("landlock", _CREATE, None, 0, _VERSION_ASKED)
    except OSError as error:
        raise LayerError(f"this kernel lacks Landlock or has it switched off: {error.strerror}") from error


def restrict(readable: Iterable[Path]) -> None:
    """Restrict this process to reading beneath these paths.

    Needs no_new_privs or root.
    """
    known = version()
    threads = len(list(Path("/proc/self/task").iterdir()))
    if threads > 1:
        raise LayerError(f"the contract's import has started {threads - 1} threads, which it would not bind")
    rules = _Ruleset(
        (1 << max(count for since, count in _FILE_RIGHTS.items() if since <= known)) - 1,
        _TCP if known >= 4 else 0,
        _SCOPES if known >= 6 else 0,
    )
    size = 24 if known >= 6 else 16 if known >= 4 else 8  # bytes of the versions' records
    ruleset = syscall_ffi.call("landlock_create_ruleset", _CREATE, ctypes.byref(rules), size, 0)
    try:
        for path in readable:
            _allow(ruleset, path)
        syscall_ffi.call("landlock_restrict_self", _RESTRICT, ruleset, 0)
    except OSError as error:
        raise LayerError(str(error.strerror)) from error
    finally:
        os.close(ruleset)
    with contextlib.suppress(PermissionError):
        os.listdir("/")  # noqa: PTH208 -- the plainest test that the rules hold
        raise LayerError("the root folder can still be listed")


def _allow(ruleset: int, path: Path) -> None:
    try:
        opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return  # a missing or unreadable path needs no rule
    try:
        allowed = _READ_FILE | (_READ_FOLDER if path.is_dir() else 0)
        beneath = _Beneath(allowed, opened)
        syscall_ffi.call("landlock_add_rule", _ADD, ruleset, _PATH_BENEATH, ctypes.byref(beneath), 0)
    finally:
        os.close(opened)
