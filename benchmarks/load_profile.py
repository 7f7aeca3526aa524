"""Sampling profiler of the event loop: 200 samples a second from a thread.

A part is named after the innermost frame of ours that is on the list. What waits for the network is
idle.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from types import FrameType
from typing import Final

EVERY_SECONDS: Final = 0.005
IDLE: Final = "idle"
OTHER: Final = "other"
PARTS: Final = (
    ("trio/_core/_io_epoll.py", "get_events", IDLE),
    ("echo_node/contract/", "", "prompts from the jail"),
    ("echo_node/runs/tokenizer.py", "", "prompts to tokens"),
    ("protocol/identity.py", "", "signatures"),
    ("protocol/", "", "decoding and hashing"),
    ("echo_node/rollouts/admission.py", "", "other checks of admission"),
    ("echo_node/trainer/receipts.py", "", "receipts"),
    ("echo_node/trainer/", "", "buffer and bookkeeping"),
    ("echo_node/storage/sqlite.py", "", "journal"),
    ("echo_node/net/noise.py", "", "encryption"),
    ("libp2p/security/", "", "encryption"),
    ("echo_node/net/yamux/", "", "streams"),
    ("echo_node/net/gossip/", "", "gossip"),
    ("echo_node/net/", "", "other network"),
    ("libp2p/", "", "other network"),
)
"""Patterns of a frame's file and function, and the part of the work; first match wins."""


class Watching:
    """A look at the thread that made it, until `stop`."""

    def __init__(self) -> None:
        self._watched = threading.get_ident()
        self._counts: Counter[str] = Counter()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def stop(self) -> dict[str, float]:
        """Return the share of each part, the largest first."""
        self._end.set()
        self._thread.join()
        total = max(self._counts.total(), 1)
        return {part: count / total for part, count in self._counts.most_common()}

    def _look(self) -> None:
        due = time.monotonic()
        while not self._end.is_set():
            due += EVERY_SECONDS
            time.sleep(max(0.0, due - time.monotonic()))
            self._counts[_part_of(sys._current_frames().get(self._watched))] += 1  # noqa: SLF001 - no other way


def _part_of(frame: FrameType | None) -> str:
    while frame is not None:
        file, function = frame.f_code.co_filename, frame.f_code.co_name
        for place, name, part in PARTS:
            if place in file and (not name or name == function):
                return part
        frame = frame.f_back
    return OTHER
