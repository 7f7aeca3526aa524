"""Which way to a version is the cheapest of those that are not known to lie, for what this store holds already.

It fetches nothing, and knows nobody who could give anything.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from echo_node.errors import PeerError
from echo_node.weights.journal import Head
from echo_node.weights.passage import ANCHOR_CODEC
from echo_node.weights.refusal import UnprovenError
from echo_node.weights.routes import Way, cheapest
from echo_node.weights.store import WeightsStore
from protocol import Route

TABLE_ROW_BYTES: Final = 68
"""What a table has for each chunk: two hashes and a size."""


class Planning:
    """The ways of one store."""

    def __init__(self, store: WeightsStore) -> None:
        self._store = store
        self.refused: dict[bytes, UnprovenError] = {}
        """Routes, by their tables, that are not what their signed heads say of them."""

    def plan(self, target: Head, without: Collection[bytes]) -> Way:
        """The cheapest way to a head, by none of the tables in `without`."""
        way = self.find(target, without)
        if way is None:
            for route in target.message.routes:
                if route.table in self.refused:
                    raise self.refused[route.table]
            raise PeerError(
                f"no way to version {target.message.version} can be had from anybody now",
                advice="it stays at the version that it holds; try again when more peers are there",
            )
        return way

    def find(self, target: Head, without: Collection[bytes]) -> Way | None:
        """The same, or None."""
        held = self._store.tip

        def cost(route: Route) -> int | None:
            return None if route.table in without or self._is_absurd(route) else self._cost(route)

        known = self._store.truth.journal.known
        return cheapest(known, target.id, () if held is None else (held.id,), cost)

    def _cost(self, route: Route) -> int:
        """The bytes of a route that are not here yet."""
        if self._store.blobs.has(route.table):
            return sum(size or 0 for _, size in self._store.missing(route))
        return route.size + TABLE_ROW_BYTES * len(self._store.flat.chunks)

    def _is_absurd(self, route: Route) -> bool:
        """Whether a route is known to lie, or is of a size that no honest one has: seen before a byte is fetched."""
        if route.table in self.refused:
            return True
        flat = self._store.flat
        most = flat.anchor_size if route.codec == ANCHOR_CODEC else 2 * flat.size + 65_536 * len(flat.chunks)
        if route.size <= most:
            return False
        what = f"a route of {route.size} bytes, where no honest one has more than {most}"
        self.refused[route.table] = UnprovenError("too-large", what)
        return True
