"""System calls that the jail allows, by their numbers on x86_64 and aarch64.

None: that architecture has no such call. Numbers never change once a kernel has been released with
them. Whatever is not listed here is refused; `seccomp` makes the filter.
"""

from __future__ import annotations

from typing import Final

MACHINES: Final = {"x86_64": 0, "aarch64": 1}
"""Index of an architecture's number in each pair."""

Numbers = dict[str, tuple[int | None, int | None]]

ALLOWED: Final[Numbers] = {
    # open descriptors: reading and writing, never opening
    "read": (0, 63),
    "pread64": (17, 67),
    "readv": (19, 65),
    "preadv": (295, 69),
    "write": (1, 64),
    "writev": (20, 66),
    "lseek": (8, 62),
    "close": (3, 57),
    "close_range": (436, 436),
    "dup": (32, 23),
    "dup2": (33, None),
    "dup3": (292, 24),
    "pipe": (22, None),
    "pipe2": (293, 59),
    "eventfd2": (290, 19),
    "recvfrom": (45, 207),
    "fadvise64": (221, 223),
    # names and folders: which of them is Landlock's part
    "stat": (4, None),
    "lstat": (6, None),
    "fstat": (5, 80),
    "newfstatat": (262, 79),
    "statx": (332, 291),
    "access": (21, None),
    "faccessat": (269, 48),
    "faccessat2": (439, 439),
    "readlink": (89, None),
    "readlinkat": (267, 78),
    "getcwd": (79, 17),
    "getdents": (78, None),
    "getdents64": (217, 61),
    "umask": (95, 166),
    # memory, but for mmap
    "munmap": (11, 215),
    "mprotect": (10, 226),
    "mremap": (25, 216),
    "madvise": (28, 233),
    "brk": (12, 214),
    "membarrier": (324, 283),
    # threads and signals of this process
    "futex": (202, 98),
    "futex_waitv": (449, 449),
    "set_robust_list": (273, 99),
    "get_robust_list": (274, 100),
    "set_tid_address": (218, 96),
    "rseq": (334, 293),
    "sched_yield": (24, 124),
    "sched_getaffinity": (204, 123),
    "sched_getparam": (143, 121),
    "sched_getscheduler": (145, 120),
    "sched_get_priority_max": (146, 125),
    "sched_get_priority_min": (147, 126),
    "getcpu": (309, 168),
    "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135),
    "rt_sigpending": (127, 136),
    "rt_sigreturn": (15, 139),
    "rt_sigsuspend": (130, 133),
    "rt_sigtimedwait": (128, 137),
    "sigaltstack": (131, 132),
    "pause": (34, None),
    "restart_syscall": (219, 128),
    "exit": (60, 93),
    "exit_group": (231, 94),
    # waiting, clocks and timers
    "poll": (7, None),
    "ppoll": (271, 73),
    "select": (23, None),
    "pselect6": (270, 72),
    "epoll_create1": (291, 20),
    "epoll_ctl": (233, 21),
    "epoll_wait": (232, None),
    "epoll_pwait": (281, 22),
    "nanosleep": (35, 101),
    "clock_nanosleep": (230, 115),
    "clock_gettime": (228, 113),
    "clock_getres": (229, 114),
    "gettimeofday": (96, 169),
    "time": (201, None),
    "times": (100, 153),
    "alarm": (37, None),
    "getitimer": (36, 102),
    "setitimer": (38, 103),
    # questions about this process and this system
    "getpid": (39, 172),
    "gettid": (186, 178),
    "getppid": (110, 173),
    "getpgrp": (111, None),
    "getuid": (102, 174),
    "geteuid": (107, 175),
    "getgid": (104, 176),
    "getegid": (108, 177),
    "getresuid": (118, 148),
    "getresgid": (120, 150),
    "getgroups": (115, 158),
    "getrusage": (98, 165),
    "getrlimit": (97, 163),
    "getrandom": (318, 278),
    "uname": (63, 160),
    "sysinfo": (99, 179),
}
"""Calls that are allowed with any arguments."""

CLOSER: Final[Numbers] = {
    "clone": (56, 220),
    "clone3": (435, 435),
    "open": (2, None),
    "openat": (257, 56),
    "openat2": (437, 437),
    "mmap": (9, 222),
    "kill": (62, 129),
    "tgkill": (234, 131),
    "fcntl": (72, 25),
    "ioctl": (16, 29),
    "prlimit64": (302, 261),
    "prctl": (157, 167),
    "sendto": (44, 206),
}
"""Calls that are allowed with some arguments only."""

FORKING: Final[Numbers] = {
    "wait4": (61, 260),
    "seccomp": (317, 277),
}
"""Calls that a process needs in addition if it forks one child per text."""
