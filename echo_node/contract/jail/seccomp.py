"""Seccomp layer: a BPF filter with the system calls that a contract needs.

Other calls fail with EPERM, so that code which tries them gets an ordinary error; a call in the
convention of another architecture kills the process. Files are opened for reading only; which files
is Landlock's part. A process that forks one child per text asks the node for each fork: the kernel
hands such calls to the node (`listen`, `fork_permit`). Its children close the rest by `install`.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import signal
import socket
import struct
from typing import Final

from echo_node.contract.jail import LayerError, syscall_ffi
from echo_node.contract.jail.syscalls import ALLOWED, CLOSER, FORKING, MACHINES

_ARCHITECTURES: Final = {"x86_64": 0xC000_003E, "aarch64": 0xC000_00B7}
_X32: Final = 0x4000_0000  # the bit that marks calls of the x32 convention
_SET_FILTER: Final = 1
_ALL_THREADS: Final = 1
_NEW_LISTENER: Final = 8
_FILTERED: Final = 2

_LOAD, _SAME, _ANY_BIT, _AT_LEAST, _MASK, _END = 0x20, 0x15, 0x45, 0x35, 0x54, 0x06
_ALLOW: Final = 0x7FFF_0000
_ASK: Final = 0x7FC0_0000
_FAIL: Final = 0x0005_0000
_KILL: Final = 0x8000_0000
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data

_CLONE_THREAD: Final = 0x1_0000
_NAMESPACES: Final = 0x7E02_0080  # CLONE_NEW*: namespaces of every kind
_FORK: Final = 0x0120_0000 | signal.SIGCHLD  # as the C library's fork: set and clear the child's thread id
_WRITES: Final = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_SHARED_MEMORY: Final = mmap.MAP_SHARED | 0x20  # MAP_ANONYMOUS: memory that children share
_PR_SET_NAME, _PR_GET_NAME, _PR_SET_VMA = 15, 16, 0x53564D41
_COMMANDS: Final = {
    "fcntl": (1, (0, 1, 2, 3, 4, 1030)),  # F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL, F_DUPFD_CLOEXEC
    "ioctl": (1, (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)),  # is it a terminal, bytes to read, flags
    "prctl": (
        0,
        (_PR_SET_NAME, _PR_GET_NAME, _PR_SET_VMA, syscall_ffi.PR_GET_DUMPABLE, syscall_ffi.PR_GET_SECCOMP),
    ),
    "prlimit64": (0, (0,)),  # of this process
}
"""Calls that take a command: the index of that argument, and the commands allowed."""

Step = tuple[int, int, int, int]
"""A BPF instruction: code, jump if true, jump if false, constant."""


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("steps", ctypes.c_char_p))


def install(machine: str, *, forks: bool = False) -> None:
    """Install the filter in every thread of this process. Needs no_new_privs or root.

    With `forks` the process may fork and wait for its children, where `listen` was called before,
    and install a further filter.
    """
    if machine not in MACHINES:
        raise LayerError(f"no filter is written for {machine}")
    try:
        result = _load(machine, program(machine, os.getpid(), forks=forks), _ALL_THREADS)
    except OSError as error:
        raise LayerError(f"this kernel or container does not take it: {error.strerror}") from error
    if result or syscall_ffi.prctl(syscall_ffi.PR_GET_SECCOMP) != _FILTERED:
        raise LayerError("the kernel does not say that it holds")
    try:
        socket.socket().close()
    except PermissionError:
        return
    raise LayerError("a socket can still be opened")


def tighten(machine: str) -> None:
    """Give up forking in a child of a filtered process; raise if that fails."""
    if _load(machine, program(machine, os.getpid()), _ALL_THREADS):
        raise LayerError("a thread did not take the filter")


def listen(machine: str) -> int | None:
    """Have the kernel ask before every fork; return the descriptor to answer at.

    None: this kernel cannot do so, or another program is being asked already.
    """
    if machine not in MACHINES:
        return None
    clone = CLOSER["clone"][MACHINES[machine]]
    ask = [_argument(0), (_ANY_BIT, 0, 1, _CLONE_THREAD), _allow(), (_END, 0, 0, _ASK)]
    try:
        return _load(machine, [*_begin(machine), *_if_call(clone, ask), _allow()], _NEW_LISTENER)
    except OSError:
        return None


def _load(machine: str, steps: list[Step], flags: int) -> int:
    code = b"".join(struct.pack("=HBBI", *step) for step in steps)
    filter_ = _Program(len(steps), code)
    number = FORKING["seccomp"][MACHINES[machine]]
    assert number is not None  # noqa: S101 -- both architectures have it
    return syscall_ffi.call("seccomp", number, _SET_FILTER, flags, ctypes.byref(filter_))


def program(machine: str, process: int, *, forks: bool = False) -> list[Step]:
    """Return the filter for an architecture; `process` may signal itself alone."""
    own = MACHINES[machine]
    number = {name: numbers[own] for name, numbers in CLOSER.items()}
    steps = _begin(machine)
    for numbers in [*ALLOWED.values(), *(FORKING.values() if forks else ())]:
        steps += _if_call(numbers[own], [_allow()])
    # The C library takes ENOSYS for an old kernel and uses the older call, whose flags the filter
    # can read.
    steps += _if_call(number["clone3"], [_refuse(errno.ENOSYS)])
    steps += _if_call(number["openat2"], [_refuse(errno.ENOSYS)])
    steps += _if_call(number["clone"], _clone(forks=forks))
    steps += _if_call(number["open"], [_argument(1), (_ANY_BIT, 0, 1, _WRITES), _refuse(), _allow()])
    steps += _if_call(number["openat"], [_argument(2), (_ANY_BIT, 0, 1, _WRITES), _refuse(), _allow()])
    shared = [_argument(3), (_MASK, 0, 0, _SHARED_MEMORY), (_SAME, 0, 1, _SHARED_MEMORY)]
    steps += _if_call(number["mmap"], [*shared, _refuse(), _allow()])
    for name in ("kill", "tgkill"):
        steps += _if_call(number[name], [_argument(0), (_SAME, 1, 0, process), _refuse(), _allow()])
    for name, (index, commands) in _COMMANDS.items():
        tests = [step for command in commands for step in ((_SAME, 0, 1, command), _allow())]
        if name == "prctl" and forks:  # a child asks to die with the process that forked it
            dies = (_SAME, 0, 3, syscall_ffi.PR_SET_PDEATHSIG)
            tests += [dies, _argument(1), (_SAME, 0, 1, signal.SIGKILL), _allow()]
        steps += _if_call(number[name], [_argument(index), *tests, _refuse()])
    # Over a socket that is connected: no address, in either half of the pointer.
    plain = [_argument(4), (_SAME, 0, 3, 0), _argument(4, upper=True), (_SAME, 0, 1, 0), _allow()]
    steps += _if_call(number["sendto"], [*plain, _refuse()])
    return [*steps, _refuse()]


def _begin(machine: str) -> list[Step]:
    """Kill calls of another architecture, then load the call's number."""
    steps: list[Step] = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_SAME, 1, 0, _ARCHITECTURES[machine]),
        (_END, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
    ]
    if machine == "x86_64":
        steps += [(_AT_LEAST, 0, 1, _X32), (_END, 0, 0, _KILL)]
    return steps


def _clone(*, forks: bool) -> list[Step]:
    """Allow threads, and with `forks` children, within the current namespaces."""
    plain = (signal.SIGCHLD, _FORK) if forks else ()
    fork = [step for flags in plain for step in ((_SAME, 0, 1, flags), _allow())]
    thread = [(_ANY_BIT, 0, 2, _CLONE_THREAD), (_ANY_BIT, 1, 0, _NAMESPACES), _allow()]
    return [_argument(0), *fork, *thread, _refuse()]


def _if_call(number: int | None, then: list[Step]) -> list[Step]:
    return [] if number is None else [(_SAME, 0, len(then), number), *then]


def _argument(index: int, *, upper: bool = False) -> Step:
    """Load 32 bits of an argument; the lower half is first on both architectures."""
    return _LOAD, 0, 0, _ARGUMENTS + 8 * index + 4 * upper


def _refuse(number: int = errno.EPERM) -> Step:
    return _END, 0, 0, _FAIL | number


def _allow() -> Step:
    return _END, 0, 0, _ALLOW
