"""Bring an engine to a version: all weights first, then what changed.

An engine copies under a lease, and writers of the store wait for it.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator
from contextlib import contextmanager

from echo_node.engine.base import Change, Engine, Update
from echo_node.errors import EngineError, StoreError
from echo_node.weights.store import WeightsStore
from echo_node.weights.weights_view import WeightsView

log = logging.getLogger(__name__)


@contextmanager
def opened(store: WeightsStore, head_id: bytes) -> Generator[WeightsView]:
    """Open the state of a head that the store holds or can build."""
    with store.lease() as held:
        if held.head.id == head_id:
            yield held
            return
    with store.materialise(head_id) as other:
        yield other


def hand_over(held: WeightsView, engine: Engine) -> None:
    """Load an open version into an engine.

    Only changed elements are loaded where it has another version.
    """
    if engine.loaded == held.head.id:
        return
    if engine.loaded is not None:

        @contextmanager
        def changes(granule: int, since: bytes = engine.loaded) -> Generator[Iterator[Change]]:
            yield held.changes(since, granule)

        try:
            engine.patch(Update(engine.loaded, held.head.id, changes))
        except (EngineError, StoreError) as error:  # what led there may be pruned meanwhile
            log.warning("the weights are put into the engine afresh, since changing them failed: %s", error)
        else:
            return
    engine.load(held.head.id, held.state)


def update_to(store: WeightsStore, since: bytes, head_id: bytes) -> Update:
    """Return an engine's update from one head to another while it generates.

    The lease begins when the update is opened.
    """

    @contextmanager
    def changes(granule: int) -> Generator[Iterator[Change]]:
        with opened(store, head_id) as held:
            yield held.changes(since, granule)

    return Update(since, head_id, changes)


class EngineSync:
    """Keeps one engine at the requested head. Blocks: call it from a thread."""

    def __init__(self, store: WeightsStore, engine: Engine) -> None:
        self._store = store
        self._engine = engine

    def at(self, head_id: bytes) -> Engine:
        """Return the engine with the weights of a head."""
        if self._engine.loaded != head_id:
            with opened(self._store, head_id) as held:
                hand_over(held, self._engine)
        return self._engine

    def afresh(self, head_id: bytes) -> Engine:
        """Return the engine with all weights of a head loaded anew."""
        with opened(self._store, head_id) as held:
            self._engine.load(head_id, held.state)
        return self._engine
