"""Run a program as on a kernel without some system calls: `NUMBER,NUMBER PROGRAM …`."""

from __future__ import annotations

import errno
import os
import platform
import sys

from echo_node.contract.jail import seccomp, syscall_ffi


def main(numbers: list[int], command: list[str]) -> None:
    steps = seccomp._begin(platform.machine())
    for number in numbers:
        steps += seccomp._if_call(number, [seccomp._refuse(errno.ENOSYS)])
    syscall_ffi.prctl(syscall_ffi.PR_SET_NO_NEW_PRIVS, 1)
    seccomp._load(platform.machine(), [*steps, seccomp._allow()], 0)
    os.execv(command[0], command)  # noqa: S606 -- of a test


if __name__ == "__main__":
    main([int(number) for number in sys.argv[1].split(",")], sys.argv[2:])
