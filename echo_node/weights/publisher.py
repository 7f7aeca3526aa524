"""Publish a trained state: write blobs, sign and keep the head, activate.

A head is signed once: its blobs are synced, then it is kept, and only then may a byte of it leave.
A restarted publisher finds the head that it kept last and gives the same bytes, so that a crash
never makes an honest leader equivocate. A head can be sent before its state is the active one:
`activate` may come later, or in the next process.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from echo_node.net.blobs.blob_registry import InFile
from echo_node.weights.chain_log import Head
from echo_node.weights.flat_view import FlatSource, ReadableState
from echo_node.weights.route_reader import ANCHOR_CODEC
from echo_node.weights.route_writer import RouteWriter
from echo_node.weights.store import WeightsStore
from echo_node.weights.version_archive import NoWayError
from protocol import ZERO, Identity, Roster, Route, WeightsHead, encode, merkle_root, open_sealed, seal

__all__ = ["ANCHOR_CODEC", "WHOLE", "Cadence", "Publication", "Publisher", "SignedVersion"]


@dataclasses.dataclass(frozen=True, slots=True)
class Cadence:
    """Routes of a version besides the delta from the version before."""

    squash_every: int = 8
    """Versions between routes that span as many versions in one step."""
    anchor_share: float = 0.5
    """Share of an anchor's size: once the deltas since the last one exceed it, a new one is due."""


WHOLE: Final = Cadence(anchor_share=-1.0)
"""Every version has an anchor: for very small models."""
_NOTHING: Final[Mapping[str, Any]] = MappingProxyType({})


@dataclasses.dataclass(frozen=True, slots=True)
class Publication:
    """A head, with the files of everything that a follower will ask for."""

    head: Head
    blobs: dict[bytes, InFile]


@dataclasses.dataclass(frozen=True, slots=True)
class SignedVersion:
    """A version whose head is signed and kept, and whose state is not active yet."""

    head: Head
    source: FlatSource
    hashes: list[bytes]
    """Hashes of its chunks."""


class Publisher:
    """Signs one chain of heads over a store. `luck` returns 32 random bytes for each."""

    def __init__(
        self,
        store: WeightsStore,
        identity: Identity,
        *,
        luck: Callable[[], bytes],
        cadence: Cadence | None = None,
    ) -> None:
        self._store = store
        self._identity = identity
        self._luck = luck
        self._cadence = cadence or Cadence()

    @property
    def store(self) -> WeightsStore:
        return self._store

    @property
    def tip(self) -> Head | None:
        """Return the newest head that was signed, whether or not it was sent."""
        return self._store.follower.tip

    def resume(self) -> Publication | None:
        """Return the newest head as it was signed, to be sent again.

        A crash may have come before its state was active.
        """
        with self._store.turn():
            newest = self.tip
            if newest is None:
                return None
            here = self._store.tip
            if here is None or here.id != newest.id:
                self._store.walk(self._store.archive.way(newest.id, () if here is None else (here.id,)))
            return self._publication(newest)

    def publish(
        self,
        state: ReadableState,
        *,
        step: int,
        roster: Roster,
        groups: Sequence[bytes],
        ext: Mapping[str, Any] = _NOTHING,
    ) -> Publication:
        """Sign the next version, and make it the active one."""
        with self._store.turn():
            signed = self.sign(state, step=step, roster=roster, groups=groups, ext=ext)
            self.activate(signed)
            return self._publication(signed.head)

    def sign(
        self,
        state: ReadableState,
        *,
        step: int,
        roster: Roster,
        groups: Sequence[bytes],
        ext: Mapping[str, Any] = _NOTHING,
    ) -> SignedVersion:
        """Sign the next version: weights, the groups trained on, and the roster.

        Blobs that `ext` names are in the store already. The state is read chunk by chunk, and must
        not change until `activate` has returned.
        """
        store = self._store
        with store.turn():
            self.resume()
            source = FlatSource(store.flat, state)
            writer = RouteWriter(store.flat, store.blobs, source)
            tip, term = self.tip, store.follower.term
            version = tip.message.version + 1 if tip else 0
            message = WeightsHead(
                groups=merkle_root(sorted(groups)),
                layout=store.flat.id,
                luck=self._luck(),
                previous=tip.id if tip else ZERO,
                root=merkle_root(writer.after),
                roster=store.blobs.put(encode(roster)),
                routes=tuple(self._routes(writer, version, term)),
                step=step,
                term=term,
                version=version,
                ext=ext,
            )
            run = store.follower.rules.run
            head = open_sealed(seal(message, self._identity, run), WeightsHead, run)
            store.blobs.sync()
            store.keep_head(head)
            return SignedVersion(head, source, writer.after)

    def activate(self, signed: SignedVersion) -> None:
        """Make a signed version the active one of the store."""
        self._store.swap(signed.head, signed.hashes, lambda chunk, _: signed.source.chunk(chunk))

    def _publication(self, head: Head) -> Publication:
        return Publication(head, self._store.held_of(head))

    def _routes(self, writer: RouteWriter, version: int, term: int) -> list[Route]:
        routes, tip = [], self.tip
        if tip is not None:
            routes.append(writer.delta(tip.id, self._store.chunk, self._store.hashes))
            routes += self._squash(writer, version)
        if tip is None or tip.message.term != term or self._is_anchor_due(routes[0]):
            routes.append(writer.anchor())
        return routes

    def _squash(self, writer: RouteWriter, version: int) -> list[Route]:
        """Write a route over many versions when due, if the old one can still be built."""
        back = self._cadence.squash_every
        heads = self._store.follower.heads
        if version % back or len(heads) < back or back < 2:
            return []
        base, archive = heads[-back], self._store.archive
        try:
            readers = archive.readers(archive.way(base.id))
            return [writer.delta(base.id, lambda chunk: archive.build(readers, chunk), archive.hashes(base))]
        except NoWayError:
            return []

    def _is_anchor_due(self, delta: Route) -> bool:
        weight = delta.size
        for head in reversed(self._store.follower.heads):
            if head.message.anchor is not None:
                break
            weight += sum(route.size for route in head.message.routes if route.base == head.message.previous)
        return weight > self._cadence.anchor_share * self._store.flat.anchor_size
