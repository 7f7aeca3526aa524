"""Plan the cheapest way to a version for what this store holds already."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from echo_node.errors import PeerError
from echo_node.weights.chain_log import Head
from echo_node.weights.errors import UnprovenError
from echo_node.weights.route_graph import Way, cheapest
from echo_node.weights.route_reader import ANCHOR_CODEC
from echo_node.weights.store import WeightsStore
from protocol import Route

TABLE_ROW_BYTES: Final = 68
"""Bytes of a table per chunk: two hashes and a size."""


class RoutePlanner:
    """Planner for one store."""

    def __init__(self, store: WeightsStore) -> None:
        self._store = store
        self.refused: dict[bytes, UnprovenError] = {}
        """Routes, by table, that do not match their signed heads."""

    def plan(self, target: Head, without: Collection[bytes]) -> Way:
        """Return the cheapest way to a head, by none of the tables in `without`."""
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
        """Return the same way, or None."""
        held = self._store.tip

        def cost(route: Route) -> int | None:
            return None if route.table in without or self._is_absurd(route) else self._cost(route)

        known = self._store.archive.journal.known
        return cheapest(known, target.id, () if held is None else (held.id,), cost)

    def _cost(self, route: Route) -> int:
        """Return the bytes of a route that are not here yet."""
        if self._store.blobs.has(route.table):
            return sum(size or 0 for _, size in self._store.missing(route))
        return route.size + TABLE_ROW_BYTES * len(self._store.flat.chunks)

    def _is_absurd(self, route: Route) -> bool:
        """Return whether a route was refused, or has a size that no honest one has.

        Known before a byte is fetched.
        """
        if route.table in self.refused:
            return True
        flat = self._store.flat
        most = flat.anchor_size if route.codec == ANCHOR_CODEC else 2 * flat.size + 65_536 * len(flat.chunks)
        if route.size <= most:
            return False
        what = f"a route of {route.size} bytes, where no honest one has more than {most}"
        self.refused[route.table] = UnprovenError("too-large", what)
        return True
