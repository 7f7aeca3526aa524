"""Read-only view of a version: head, tensors in a mapped file, and changes.

Nobody writes to it within the block in which it is given. Copy what is to last longer.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import MappingProxyType

from echo_node.engine.base import Change, TensorBytes
from echo_node.weights.chain_log import Head
from echo_node.weights.engine_patch import changes
from echo_node.weights.state_file import tensors
from echo_node.weights.version_archive import VersionArchive


class WeightsView:
    """One complete version, read-only."""

    def __init__(
        self, archive: VersionArchive, head: Head, flat_state: memoryview, state: dict[str, TensorBytes]
    ) -> None:
        self._archive = archive
        self._flat_state = flat_state
        self.head = head
        self.state: Mapping[str, TensorBytes] = MappingProxyType(state)

    def changes(self, since: bytes, granule: int = 1) -> Iterator[Change]:
        """Iterate over the changes from head `since`, a chunk at a time; may include more."""
        return changes(self._archive, self._flat_state, since, self.head, granule)


@contextmanager
def leased(archive: VersionArchive, head: Head, flat_state: memoryview) -> Generator[WeightsView]:
    """Give a view, and release its memory after the block where nothing else uses it."""
    state = tensors(archive.flat, flat_state)
    try:
        yield WeightsView(archive, head, flat_state, state)
    finally:
        for view in (*(tensor.data for tensor in state.values()), flat_state):
            if isinstance(view, memoryview):
                with suppress(BufferError):
                    view.release()
