"""A version as engines see it: its head, its tensors over a mapped file, and what changed since another version.

Nobody writes to it while the block lasts in which it is given. Copy what is to last longer. It knows no locks.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import MappingProxyType

from echo_node.engine.base import Change, TensorBytes
from echo_node.weights.changes import changes
from echo_node.weights.journal import Head
from echo_node.weights.scratch import tensors
from echo_node.weights.truth import Truth


class Leased:
    """One whole version, to be read."""

    def __init__(
        self, truth: Truth, head: Head, flat_state: memoryview, state: dict[str, TensorBytes]
    ) -> None:
        self._truth = truth
        self._flat_state = flat_state
        self.head = head
        self.state: Mapping[str, TensorBytes] = MappingProxyType(state)

    def changes(self, since: bytes, granule: int = 1) -> Iterator[Change]:
        """What became of the state of head `since`: a superset of what changed, a chunk at a time."""
        return changes(self._truth, self._flat_state, since, self.head, granule)


@contextmanager
def leased(truth: Truth, head: Head, flat_state: memoryview) -> Generator[Leased]:
    """Views that end with the block, as far as nobody has built something else on them."""
    state = tensors(truth.flat, flat_state)
    try:
        yield Leased(truth, head, flat_state, state)
    finally:
        for view in (*(tensor.data for tensor in state.values()), flat_state):
            if isinstance(view, memoryview):
                with suppress(BufferError):
                    view.release()
