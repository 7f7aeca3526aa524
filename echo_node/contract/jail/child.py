"""Answer one item in a forked child that sees that item's text alone.

The child closes what it inherited, gives up forking by a stricter filter, and only then runs the
contract on the text. Its answer comes over a pipe of its own; nothing that it writes is read as
another's, and whatever it changed in memory ends with it.
"""

from __future__ import annotations

import os
import platform
import signal
import time
from collections.abc import Callable
from typing import Final, NoReturn

import msgpack

from echo_node.contract.jail import seccomp, syscall_ffi
from echo_node.contract.jail.process import MAX_MESSAGE_BYTES, OUT_OF_MEMORY
from echo_node.runtime.ipc import Message

_ANSWER_BYTES: Final = MAX_MESSAGE_BYTES // 2
"""Most bytes of one child's answer."""
_EXIT_SECONDS: Final = 0.5
"""Time between a child's last byte and its exit."""
_DESCRIPTORS: Final = 4096
"""Descriptors above this are not looked for; the limit of open files is far below."""


def answer_in_child(work: Callable[[], Message]) -> Message:
    """Return what a forked child sends as its answer, and its exit status.

    The status is None if the child closed its pipe and did not exit.
    """
    read_end, write_end = os.pipe()
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        _run(work, write_end, parent)
    os.close(write_end)
    body = bytearray()
    while len(body) <= _ANSWER_BYTES and (part := os.read(read_end, 65536)):
        body += part
    os.close(read_end)  # a child that still writes ends by SIGPIPE or its error
    return {"kind": "child", "body": bytes(body[:_ANSWER_BYTES]), "status": _wait(child)}


def _wait(child: int) -> int | None:
    until = time.monotonic() + _EXIT_SECONDS
    pause = 0.0001
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > until:
            return None
        time.sleep(pause)
        pause = min(2 * pause, 0.01)


def _run(work: Callable[[], Message], write_end: int, parent: int) -> NoReturn:
    """Do the work in this child and exit."""
    code = 1
    try:
        syscall_ffi.prctl(syscall_ffi.PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == parent:  # else it ended before the kernel was told
            os.closerange(3, write_end)
            os.closerange(write_end + 1, _DESCRIPTORS)
            seccomp.tighten(platform.machine())
            _send(msgpack.packb(work()), write_end)
            code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except MemoryError:
        code = OUT_OF_MEMORY
    finally:
        os._exit(code)


def _send(answer: bytes, write_end: int) -> None:
    rest = memoryview(answer)
    while rest:
        rest = rest[os.write(write_end, rest) :]
