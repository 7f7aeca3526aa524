"""Linux system calls that Python has no function for, through the C library.

A call that fails is an `OSError` with the call's name.
"""

from __future__ import annotations

import ctypes
import functools
import os
from typing import Any, Final

PR_SET_PDEATHSIG: Final = 1
PR_SET_DUMPABLE: Final = 4
PR_GET_DUMPABLE: Final = 3
PR_GET_SECCOMP: Final = 21
PR_SET_NO_NEW_PRIVS: Final = 38
PR_GET_NO_NEW_PRIVS: Final = 39


def prctl(what: int, value: int = 0) -> int:
    """Call `prctl` with one integer argument."""
    return _checked("prctl", _library().prctl, what, *(ctypes.c_ulong(n) for n in (value, 0, 0, 0)))


def unshare(flags: int) -> None:
    """Enter new namespaces."""
    _checked("unshare", _library().unshare, ctypes.c_int(flags))


def call(name: str, number: int, *arguments: object) -> int:
    """Make a system call by its number. Integers are passed as 64 bits."""
    plain = (ctypes.c_long(one) if isinstance(one, int) else one for one in arguments)
    return _checked(name, _library().syscall, ctypes.c_long(number), *plain)


@functools.cache
def _library() -> Any:
    library = ctypes.CDLL(None, use_errno=True)
    library.syscall.restype = ctypes.c_long
    return library


def _checked(name: str, function: Any, *arguments: object) -> int:
    ctypes.set_errno(0)
    result: int = function(*arguments)
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result
