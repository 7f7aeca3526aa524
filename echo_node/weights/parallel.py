"""Run the same work on many chunks in a few threads.

Hashing, zstd, numpy and files release the GIL. As many chunks are in memory as there are threads.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

T = TypeVar("T")
R = TypeVar("R")
WORKERS: Final = min(4, os.cpu_count() or 1)


def each(work: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """Return `work(item)` for each item, in order.

    The first error ends it; work that has begun is waited for.
    """
    if len(items) < 2 or WORKERS < 2:
        return [work(item) for item in items]
    with ThreadPoolExecutor(min(WORKERS, len(items)), "weights") as pool:
        try:
            return list(pool.map(work, items))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
