"""Weights for an engine: all of them at first, and after that what changed. Knows no network.

An engine copies out under a lease, and whoever wants to write to the store waits for it.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator
from contextlib import contextmanager

from echo_node.engine.base import Change, Engine, Update
from echo_node.errors import EngineError, StoreError
from echo_node.weights.leased import Leased
from echo_node.weights.store import WeightsStore

log = logging.getLogger(__name__)


@contextmanager
def opened(store: WeightsStore, head_id: bytes) -> Generator[Leased]:
    """The state of a head that the store holds, or can build from what it holds."""
    with store.lease() as held:
        if held.head.id == head_id:
            yield held
            return
    with store.materialise(head_id) as other:
        yield other


def hand_over(held: Leased, engine: Engine) -> None:
    """Bring an engine to the state that is held, by the elements that changed where it is at another already."""
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
    """What an engine needs to go from one head to another while it generates. The lease begins when it is opened."""

    @contextmanager
    def changes(granule: int) -> Generator[Iterator[Change]]:
        with opened(store, head_id) as held:
            yield held.changes(since, granule)

    return Update(since, head_id, changes)


class Handing:
    """One engine, brought to whichever head is asked for. In a thread: it takes a while."""

    def __init__(self, store: WeightsStore, engine: Engine) -> None:
        self._store = store
        self._engine = engine

    def at(self, head_id: bytes) -> Engine:
        """The engine with the weights of a head."""
        if self._engine.loaded != head_id:
            with opened(self._store, head_id) as held:
                hand_over(held, self._engine)
        return self._engine

    def afresh(self, head_id: bytes) -> Engine:
        """The same, with all of them put in anew, whatever the engine says that it has."""
        with opened(self._store, head_id) as held:
            self._engine.load(head_id, held.state)
        return self._engine
