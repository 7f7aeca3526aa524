"""The way of pending items to one peer: delivered by hand, again and again, until the outbox no longer has them pending.

A peer that cannot be reached is left alone for a while; an item that spoils a delivery is found by halving and then waits
by itself. It knows no other route, and nothing of what the items mean.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, TypeAlias

import trio

from echo_node.errors import DefectError, PeerError, boundary
from echo_node.net.base import Network, RequestError
from echo_node.net.outbox.backoff import Patience, Schedule
from echo_node.net.outbox.deliveries import deliver
from echo_node.net.outbox.item import LONGEST, Item
from echo_node.net.outbox.outbox import Outbox
from protocol import ProtocolError, limits, peer_id

log = logging.getLogger(__name__)

Pack: TypeAlias = Callable[[str, Sequence[bytes]], Sequence[bytes]]
"""From a topic and the data of items to as few gossip messages as hold them, such as `protocol.fill_batches` writes."""
Heard: TypeAlias = Callable[[bytes, bytes], Awaitable[None]]
"""Reads a peer's answer that is not empty, and tells the outbox. What it raises as `PeerError` or `ProtocolError` is
that peer's fault."""

_OF_THE_CARGO: Final = frozenset({"refused", "too-large", "internal-error"})
"""Failures that another choice of items may not have."""
_IN_A_ROW: Final = 3
"""Single items that a peer may refuse one after the other, before it is taken for one that refuses everything."""


class Route:
    """One peer, what is due to it and when."""

    def __init__(
        self,
        peer: bytes,
        network: Network,
        outbox: Outbox,
        *,
        pack: Pack,
        heard: Heard,
        patience: Patience,
        luck: random.Random,
    ) -> None:
        self.peer = peer
        self.scope = trio.CancelScope()
        self._network = network
        self._outbox = outbox
        self._pack = pack
        self._heard = heard
        self._patience = patience
        self._luck = luck
        self._schedule = Schedule()
        self._tries: dict[bytes, int] = {}
        self._mark = 0
        self._most = limits.BATCH
        """Items that may go together; fewer, after a delivery that failed for what was in it."""
        self._refused = 0
        self._failures = 0
        self._not_before = 0.0
        self._stirred = trio.Event()

    async def run(self) -> None:
        """Deliver until the scope is cancelled, or this node leaves the network."""
        with self.scope:
            leftovers, self._mark = self._outbox.since(0)
            soon = trio.current_time() + self._luck.random() * self._patience.moment
            for each in leftovers:
                self._schedule.set(each, soon)
            while True:
                await self._wait()
                if items := await self._outbox.read(self._due()):
                    await self._deliver(items)

    def stir(self) -> None:
        """There may be new items."""
        self._stirred.set()

    def hurry(self) -> None:
        """The peer has come back: it may lack whatever it had not acknowledged. Not all at once, where many see it come."""
        self._failures = 0
        self._not_before = trio.current_time() + self._luck.random() * self._patience.moment
        self._schedule.hurry(self._not_before)
        self.stir()

    async def _wait(self) -> None:
        """Until something is due and the peer may be tried."""
        while True:
            self._stirred = trio.Event()
            fresh, self._mark = self._outbox.since(self._mark)
            for each in fresh:  # gossip comes first; what it brings to the peer has a receipt by then
                self._schedule.set(each, trio.current_time() + self._patience.moment)
            due = max(self._schedule.next(), self._not_before)
            with trio.move_on_at(due) as until:
                await self._stirred.wait()
            if until.cancelled_caught:
                return

    def _due(self) -> list[bytes]:
        """What is due, or nearly, and still pending: as much as goes into one gossip message."""
        chosen: list[bytes] = []
        room = LONGEST
        horizon = trio.current_time() + self._patience.gather
        while len(chosen) < self._most and (each := self._schedule.pop(horizon)) is not None:
            if not (size := self._outbox.size(each)):
                self._tries.pop(each, None)
                continue
            room -= size + 5
            if room < 0 and chosen:
                self._schedule.set(each, trio.current_time())
                break
            chosen.append(each)
        return chosen

    async def _deliver(self, items: Sequence[Item]) -> None:
        messages = packed(items, self._pack)
        try:
            for topic, message in messages:
                answer = await deliver(
                    self._network, self.peer, topic, message, deadline=self._patience.deadline
                )
                if answer:
                    await self._heard(self.peer, answer)
        except RequestError as error:
            if error.reason == "left":
                raise
            self._failed(items, error)
        except (PeerError, ProtocolError) as error:
            self._network.score(self.peer, getattr(error, "reason", "bad-answer"))
            self._set(items, self._leave_alone(error))
        else:
            self._failures = self._refused = 0
            self._most = min(limits.BATCH, 2 * self._most)
            self._again(items)

    def _failed(self, items: Sequence[Item], error: RequestError) -> None:
        if error.reason in _OF_THE_CARGO or error.reason == "deadline":
            self._most = max(1, len(items) // 2)
        if error.reason not in _OF_THE_CARGO:
            self._set(items, self._leave_alone(error))
        elif len(items) > 1:
            self._set(items, trio.current_time())
        else:  # found: it waits longer and longer, and holds up no other
            self._again(items)
            self._refused += 1
            if self._refused > _IN_A_ROW:
                self._leave_alone(error)

    def _leave_alone(self, error: Exception) -> float:
        """It is the peer that failed: nothing goes to it for a while. Returns until when."""
        pause = self._patience.pause(self._failures, self._luck.random())
        self._failures += 1
        self._not_before = trio.current_time() + pause
        log.info("%s is tried again in %.1f s: %s", peer_id(self.peer), pause, error)
        return self._not_before

    def _again(self, items: Sequence[Item]) -> None:
        """Have what is still pending due again. One draw of luck for all, so that they stay together."""
        luck = self._luck.random()
        for item in items:
            if self._outbox.is_pending(item.id):
                tries = self._tries[item.id] = self._tries.get(item.id, 0) + 1
                pause = self._patience.moment + self._patience.pause(tries - 1, luck)
                self._schedule.set(item.id, trio.current_time() + pause)
            else:
                self._tries.pop(item.id, None)

    def _set(self, items: Sequence[Item], due: float) -> None:
        for item in items:
            self._schedule.set(item.id, due)


def packed(items: Sequence[Item], pack: Pack) -> list[tuple[str, bytes]]:
    """The gossip messages that hold these items, with their topics. An item that cannot be packed is a bug of ours."""
    by_topic: dict[str, list[bytes]] = {}
    for item in items:
        by_topic.setdefault(item.topic, []).append(item.data)
    with boundary(DefectError, "packing items"):
        return [(topic, message) for topic, data in by_topic.items() for message in pack(topic, data)]
