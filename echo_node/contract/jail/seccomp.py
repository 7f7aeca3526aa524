"""Seccomp layer: a BPF filter that refuses system calls no contract needs.

Refused calls fail with EPERM, so that code which tries them gets an ordinary error; a call in the
convention of another architecture kills the process. Of the calls that open files only those that
write are refused; which files may be read is Landlock's part.
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import struct
from typing import Final

from echo_node.contract.jail import LayerError, syscall_ffi
from echo_node.contract.jail.syscalls import CLOSER, MACHINES, REFUSED

_ARCHITECTURES: Final = {"x86_64": 0xC000_003E, "aarch64": 0xC000_00B7}
_SECCOMP: Final = {"x86_64": 317, "aarch64": 277}
_X32: Final = 0x4000_0000  # the bit that marks calls of the x32 convention
_SET_FILTER: Final = 1
_ALL_THREADS: Final = 1
_FILTERED: Final = 2

_LOAD, _SAME, _ANY_BIT, _AT_LEAST, _END = 0x20, 0x15, 0x45, 0x35, 0x06
_ALLOW: Final = 0x7FFF_0000
_FAIL: Final = 0x0005_0000
_KILL: Final = 0x8000_0000
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data

_CLONE_THREAD: Final = 0x1_0000
_WRITES: Final = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_COMMANDS: Final = {
    "fcntl": (1, (8, 10, 15)),  # F_SETOWN, F_SETSIG, F_SETOWN_EX: have the kernel send signals to others
    "ioctl": (1, (0x8901, 0x8902, 0x5412)),  # FIOSETOWN, SIOCSPGRP: the same; TIOCSTI: type into a terminal
    "prctl": (
        0,
        (syscall_ffi.PR_SET_PDEATHSIG, syscall_ffi.PR_SET_DUMPABLE),
    ),  # outlive the node, be looked into
}
"""Calls that take a command: the index of that argument, and the commands refused."""

Step = tuple[int, int, int, int]
"""A BPF instruction: code, jump if true, jump if false, constant."""


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("steps", ctypes.c_char_p))


def install(machine: str) -> None:
    """Install the filter in every thread of this process. Needs no_new_privs or root."""
    if machine not in MACHINES:
        raise LayerError(f"no filter is written for {machine}")
    steps = program(machine, os.getpid())
    code = b"".join(struct.pack("=HBBI", *step) for step in steps)
    filter_ = _Program(len(steps), code)
    try:
        result = syscall_ffi.call(
            "seccomp", _SECCOMP[machine], _SET_FILTER, _ALL_THREADS, ctypes.byref(filter_)
        )
    except OSError as error:
        raise LayerError(f"this kernel or container does not take it: {error.strerror}") from error
    if result or syscall_ffi.prctl(syscall_ffi.PR_GET_SECCOMP) != _FILTERED:
        raise LayerError("the kernel does not say that it holds")
    try:
        socket.socket().close()
    except PermissionError:
        return
    raise LayerError("a socket can still be opened")


def program(machine: str, process: int) -> list[Step]:
    """Return the filter for an architecture; `process` may signal itself alone."""
    own = MACHINES[machine]
    steps: list[Step] = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_SAME, 1, 0, _ARCHITECTURES[machine]),
        (_END, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
    ]
    if machine == "x86_64":
        steps += [(_AT_LEAST, 0, 1, _X32), (_END, 0, 0, _KILL)]
    for numbers in REFUSED.values():
        steps += _if_call(numbers[own], [_refuse()])
    closer = {name: numbers[own] for name, numbers in CLOSER.items()}
    # The C library takes ENOSYS for an old kernel and uses the older call, whose flags the filter
    # can read.
    steps += _if_call(closer["clone3"], [_refuse(errno.ENOSYS)])
    steps += _if_call(closer["openat2"], [_refuse(errno.ENOSYS)])
    steps += _if_call(closer["clone"], [_argument(0), (_ANY_BIT, 1, 0, _CLONE_THREAD), _refuse(), _allow()])
    steps += _if_call(closer["open"], [_argument(1), (_ANY_BIT, 0, 1, _WRITES), _refuse(), _allow()])
    steps += _if_call(closer["openat"], [_argument(2), (_ANY_BIT, 0, 1, _WRITES), _refuse(), _allow()])
    for name in ("kill", "tgkill"):
        steps += _if_call(closer[name], [_argument(0), (_SAME, 1, 0, process), _refuse(), _allow()])
    steps += _if_call(closer["prlimit64"], [_argument(0), (_SAME, 1, 0, 0), _refuse(), _allow()])
    for name, (index, commands) in _COMMANDS.items():
        tests = [step for command in commands for step in ((_SAME, 0, 1, command), _refuse())]
        steps += _if_call(closer[name], [_argument(index), *tests, _allow()])
    return [*steps, _allow()]


def _if_call(number: int | None, then: list[Step]) -> list[Step]:
    return [] if number is None else [(_SAME, 0, len(then), number), *then]


def _argument(index: int) -> Step:
    """Load the lower 32 bits of an argument, which both architectures store first."""
    return _LOAD, 0, 0, _ARGUMENTS + 8 * index


def _refuse(number: int = errno.EPERM) -> Step:
    return _END, 0, 0, _FAIL | number


def _allow() -> Step:
    return _END, 0, 0, _ALLOW
