"""From a trained state to a signed head and the blobs that it names, all of it on disk first. Knows no trainer, no network.

A head is signed once: its blobs are synced, then it is kept, and only then may a byte of it leave. A publisher that
starts again finds the head that it kept last, and gives the same bytes. So an honest crash never tells two stories.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from echo_node.net.blobs.shelf import InFile
from echo_node.weights.journal import Head
from echo_node.weights.passage import ANCHOR_CODEC
from echo_node.weights.source import FlatSource
from echo_node.weights.state import State
from echo_node.weights.store import WeightsStore
from echo_node.weights.truth import NoWayError
from echo_node.weights.writing import RouteWriter
from protocol import ZERO, Identity, Roster, Route, WeightsHead, encode, merkle_root, open_sealed, seal

__all__ = ["ANCHOR_CODEC", "WHOLE", "Cadence", "Publication", "Publisher"]


@dataclasses.dataclass(frozen=True, slots=True)
class Cadence:
    """Which routes a version has, besides the one from the version before it."""

    squash_every: int = 8
    """Every so many versions, one from so many versions back."""
    anchor_share: float = 0.5
    """An anchor, when the deltas since the last one weigh more than this share of it."""


WHOLE: Final = Cadence(anchor_share=-1.0)
"""Every version has an anchor: for models so small that it does not matter."""
_NOTHING: Final[Mapping[str, Any]] = MappingProxyType({})


@dataclasses.dataclass(frozen=True, slots=True)
class Publication:
    """A head, with the files of everything that a follower will ask for."""

    head: Head
    blobs: dict[bytes, InFile]


class Publisher:
    """Signs one chain of heads, over the store in which it stands. `luck` gives 32 random bytes for each."""

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
        """The newest head that was signed, whether or not anybody has heard of it."""
        return self._store.follower.tip

    def resume(self) -> Publication | None:
        """The newest head, as it was signed, to be sent again. A crash may have come before its state was held."""
        with self._store.turn():
            newest = self.tip
            if newest is None:
                return None
            here = self._store.tip
            if here is None or here.id != newest.id:
                self._store.walk(self._store.truth.way(newest.id, () if here is None else (here.id,)))
            return self._publication(newest)

    def publish(
        self,
        state: State,
        *,
        step: int,
        roster: Roster,
        groups: Sequence[bytes],
        ext: Mapping[str, Any] = _NOTHING,
    ) -> Publication:
        """The next version: these weights, trained on these groups, to be sampled by this roster. Blobs that `ext` names
        are in the store already.
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
            store.swap(head, writer.after, lambda chunk, _: source.chunk(chunk))
            return self._publication(head)

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
        """Now and then, one step over many versions, if the old one can still be built."""
        back = self._cadence.squash_every
        heads = self._store.follower.heads
        if version % back or len(heads) < back or back < 2:
            return []
        base, truth = heads[-back], self._store.truth
        try:
            passages = truth.passages(truth.way(base.id))
            return [writer.delta(base.id, lambda chunk: truth.build(passages, chunk), truth.hashes(base))]
        except NoWayError:
            return []

    def _is_anchor_due(self, delta: Route) -> bool:
        weight = delta.size
        for head in reversed(self._store.follower.heads):
            if head.message.anchor is not None:
                break
            weight += sum(route.size for route in head.message.routes if route.base == head.message.previous)
        return weight > self._cadence.anchor_share * self._store.flat.anchor_size
