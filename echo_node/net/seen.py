"""What gossip was already here. A message is its content, so the same bytes under a topic are the same message.

It forgets after a while and above a number, as every memory of a network must, and knows nothing else.
"""

from __future__ import annotations

from typing import Final

import trio

from protocol import derive

SECONDS: Final = 120.0
MESSAGES: Final = 16_384


class Seen:
    """The messages of the last two minutes."""

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
    """The name of a gossip message."""
    name = topic.encode()
    return derive("gossip", len(name).to_bytes(4), name, data)
