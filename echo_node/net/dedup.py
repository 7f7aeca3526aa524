"""Filter for gossip messages that were already received.

A message is identified by its content: the same bytes under a topic are the same message. Entries
expire, and their number is bounded.
"""

from __future__ import annotations

from typing import Final

import trio

from protocol import derive

SECONDS: Final = 120.0
MESSAGES: Final = 16_384


class DuplicateFilter:
    """The ids of the messages of the last two minutes."""

    def __init__(self) -> None:
        self._until: dict[bytes, float] = {}  # in the order in which they are to be forgotten

    def add(self, message: bytes) -> None:
        self._until.pop(message, None)
        self._until[message] = trio.current_time() + SECONDS
        if len(self._until) > MESSAGES:
            del self._until[next(iter(self._until))]

    def __contains__(self, message: bytes) -> bool:
        now = trio.current_time()
        while self._until and self._until[oldest := next(iter(self._until))] <= now:
            del self._until[oldest]
        return message in self._until


def message_id(topic: str, data: bytes) -> bytes:
    """Return the id of a gossip message."""
    name = topic.encode()
    return derive("gossip", len(name).to_bytes(4), name, data)
