"""Tokens of running completions, kept should the engine's process die.

The caller keeps them. Draws are fixed by the slot's key, so what was drawn under the weights of a
head is continued under the same weights by one prefill. Memory is bounded: beyond that, completions
are drawn again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Final

import numpy as np

from echo_node.engine.base import Finished, Prefix, SlotRequest

MOST_TOKENS: Final = 4 * 1024 * 1024
"""Most tokens kept, of 16 bytes each."""
MOST_SENT: Final = 512 * 1024
"""Most tokens that one request brings back into an engine: messages of the pipe are bounded."""


class PartialDraws:
    """Tokens by slot key and completion, all drawn under the weights of one head."""

    def __init__(self) -> None:
        self._head: bytes | None = None
        self._keys: list[bytes] = []
        """Slot keys of the requests of the call, in their order."""
        self._drawn: dict[bytes, dict[int, list[Prefix]]] = {}
        self._ended: dict[bytes, set[int]] = {}
        self._tokens = 0

    def begin(self, head: bytes | None) -> None:
        """Begin a call under a head: what was drawn under another is of no use."""
        self._keys = []
        if head != self._head:
            self.clear()
        self._head = head

    def clear(self) -> None:
        """Forget everything."""
        self._drawn, self._ended, self._tokens = {}, {}, 0

    def resumed(self, request: SlotRequest) -> SlotRequest:
        """Return the call's next request, with the tokens that a dead process drew."""
        self._keys.append(request.slot_key)
        if request.turns is not None:  # its episodes are drawn again: replies stand between the draws
            return request
        known = self._drawn.get(request.slot_key, {})
        drawn, size = [], 0
        for number in sorted(known):
            prefix = _joined(number, known[number])
            size += prefix.ids.size
            if size <= MOST_SENT:
                drawn.append(prefix)
        return dataclasses.replace(request, drawn=tuple(drawn)) if drawn else request

    def add(self, request: int, drawn: Prefix) -> None:
        """Keep further tokens of a completion of request number `request`."""
        if self._tokens + drawn.ids.size <= MOST_TOKENS:
            self._tokens += drawn.ids.size
            of_group = self._drawn.setdefault(self._keys[request], {})
            of_group.setdefault(drawn.completion, []).append(drawn)
        elif self._keys[request] in self._drawn:  # a gap in a completion would make it useless
            self._forget(self._drawn[self._keys[request]].pop(drawn.completion, []))

    def finish(self, finished: Finished, group_size: int) -> None:
        """Keep a completion that has ended, until the last of its group has."""
        key, draw = self._keys[finished.request], finished.draw
        self._forget(self._drawn.get(key, {}).pop(finished.completion, []))
        if len(draw.spans) == 1 and draw.spans[0].head_id == self._head:
            self.add(finished.request, Prefix(finished.completion, draw.ids, draw.logprobs))
        ended = self._ended.setdefault(key, set())
        ended.add(finished.completion)
        if len(ended) == group_size:
            del self._ended[key]
            for pieces in self._drawn.pop(key, {}).values():
                self._forget(pieces)

    def _forget(self, pieces: Iterable[Prefix]) -> None:
        self._tokens -= sum(piece.ids.size for piece in pieces)


def _joined(number: int, pieces: list[Prefix]) -> Prefix:
    return Prefix(
        number,
        np.concatenate([piece.ids for piece in pieces]),
        np.concatenate([piece.logprobs for piece in pieces]),
    )
