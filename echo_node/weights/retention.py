"""Retention of a follower's store: write anchors from states, remove older blobs.

A follower fetches deltas, and all of them since its last anchor must stay until there is a newer
one. The bytes of an anchor follow from the state, so it is written here, and not fetched.
"""

from __future__ import annotations

import logging

from echo_node.weights.chain_log import Head
from echo_node.weights.engine_sync import opened
from echo_node.weights.flat_view import FlatSource
from echo_node.weights.route_writer import RouteWriter
from echo_node.weights.store import WeightsStore
from protocol import Route

log = logging.getLogger(__name__)


class Retention:
    """Retention of one store: the last `versions` stay buildable, as far as they were."""

    def __init__(self, store: WeightsStore, versions: int) -> None:
        self._store = store
        self._versions = versions
        self._unlike: set[bytes] = set()
        """Anchors, by table, that this node would have written with other bytes."""

    def settle(self) -> int:
        """Remove blobs that are too old and return the bytes freed. Blocks.

        Nothing may be fetched meanwhile.
        """
        tip = self._store.tip
        if tip is None:
            return 0
        for head, route in self._due(tip):
            if self._write(head, route):
                break
        return self._store.prune(versions=self._versions, settled=tip.id)

    def _due(self, tip: Head) -> list[tuple[Head, Route]]:
        """Return missing anchors, newest first; none while the last one here is young.

        More anchors would only take room.
        """
        due: list[tuple[Head, Route]] = []
        for head in reversed(self._store.follower.heads):
            version, route = head.message.version, head.message.anchor
            if route is None or version > tip.message.version:
                continue
            if self._store.archive.is_whole(route):
                return due if version <= tip.message.version - self._versions else []
            due.append((head, route))
        return due

    def _write(self, head: Head, route: Route) -> bool:
        """Write an anchor if its state can be built and gives the signed bytes.

        It is durable as a whole, or not counted.
        """
        store = self._store
        if route.table in self._unlike or not store.archive.can_build(head.id):
            return False  # whoever jumped over that version cannot make it
        with opened(store, head.id) as held:
            writer = RouteWriter(store.flat, store.blobs, FlatSource(store.flat, held.state))
            if writer.anchor_named() != route:
                self._unlike.add(route.table)
                log.info("the anchor of version %d is not as this node writes one", head.message.version)
                return False
            writer.anchor()
        store.blobs.sync()
        return True
