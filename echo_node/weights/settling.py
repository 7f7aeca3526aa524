"""What a follower does about its disk: it writes anchors that heads name from the states themselves, and lets older blobs go.

A follower fetches changes, and all of them since its last anchor have to stay until there is a newer one to build from. The
bytes of an anchor follow from the state, so it is made here, and not fetched. It knows no network.
"""

from __future__ import annotations

import logging

from echo_node.weights.handing import opened
from echo_node.weights.journal import Head
from echo_node.weights.source import FlatSource
from echo_node.weights.store import WeightsStore
from echo_node.weights.writing import RouteWriter
from protocol import Route

log = logging.getLogger(__name__)


class Settling:
    """One follower's store, from which the last `versions` can always be built, as far as they ever could."""

    def __init__(self, store: WeightsStore, versions: int) -> None:
        self._store = store
        self._versions = versions
        self._unlike: set[bytes] = set()
        """Anchors, by their tables, that this node would have written otherwise."""

    def settle(self) -> int:
        """Let go of what is too old, and say how many bytes that freed. Blocks; nothing may be fetched meanwhile."""
        tip = self._store.tip
        if tip is None:
            return 0
        for head, route in self._due(tip):
            if self._write(head, route):
                break
        return self._store.prune(versions=self._versions, settled=tip.id)

    def _due(self, tip: Head) -> list[tuple[Head, Route]]:
        """Anchors that are not here, newest first. None, while the last one that is here is young: more would only take room."""
        due: list[tuple[Head, Route]] = []
        for head in reversed(self._store.follower.heads):
            version, route = head.message.version, head.message.anchor
            if route is None or version > tip.message.version:
                continue
            if self._store.truth.is_whole(route):
                return due if version <= tip.message.version - self._versions else []
            due.append((head, route))
        return due

    def _write(self, head: Head, route: Route) -> bool:
        """Write an anchor, if its state can be built, and its bytes are those that were signed. All of it lasts, or it is none."""
        store = self._store
        if route.table in self._unlike or not store.truth.can_build(head.id):
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
