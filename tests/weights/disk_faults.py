"""A disk that fails when a test wants it to: at one touch, or from one touch on, as a full one
does.
"""

from __future__ import annotations

import errno
import os
from contextlib import contextmanager

from echo_node.storage import files

WRITES = ("write_at", "rename", "sync", "unlink", "open_file", "allocate")


@contextmanager
def failing(touch: int, code: int = errno.EIO, *, for_ever: bool = False):
    """The disk fails at that touch; a write has got half-way. Gives a list that holds the
    failures.
    """
    real = {name: getattr(files, name) for name in WRITES}
    count, failures = [0], []

    def fails(name):
        def act(*args, **options):
            count[0] += 1
            if count[0] == touch or (for_ever and count[0] > touch and name in {"write_at", "allocate"}):
                failures.append(name)
                if name == "write_at":
                    handle, offset, data = args
                    real[name](handle, offset, memoryview(data)[: len(data) // 2])
                raise OSError(code, os.strerror(code))
            return real[name](*args, **options)

        return act

    for name in WRITES:
        setattr(files, name, fails(name))
    try:
        yield failures
    finally:
        for name, function in real.items():
            setattr(files, name, function)
