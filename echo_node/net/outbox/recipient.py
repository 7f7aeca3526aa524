"""Delivery of an outbox's pending items to one peer by direct requests.

Items are delivered again and again until they are no longer pending. A peer that cannot be reached
is left alone for a while; an item that makes a delivery fail is found by bisection and then
retried by itself.
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
from echo_node.net.outbox.direct_delivery import deliver
from echo_node.net.outbox.outbox import LONGEST, Item, Outbox
from protocol import ProtocolError, limits, peer_id

log = logging.getLogger(__name__)

Pack: TypeAlias = Callable[[str, Sequence[bytes]], Sequence[bytes]]
"""Packs the data of a topic's items into as few gossip messages as hold them, such as
`protocol.fill_batches`."""
OnResponse: TypeAlias = Callable[[bytes, bytes], Awaitable[None]]
"""Handles a peer's non-empty response and updates the outbox. A `PeerError` or `ProtocolError` that
it raises is scored as that peer's fault."""
ExtraSeconds: TypeAlias = Callable[[bytes], float]
"""Returns the seconds that a peer needs for a message beyond those for its own bytes."""

_ITEM_FAILURES: Final = frozenset({"refused", "too-large", "internal-error"})
"""Failures that another selection of items may not have."""
_MOST_REFUSALS: Final = 3
"""Single items that a peer may refuse in a row before it counts as refusing everything."""


class Recipient:
    """The delivery schedule for one peer."""

    def __init__(
        self,
        peer: bytes,
        network: Network,
        outbox: Outbox,
        *,
        pack: Pack,
        on_response: OnResponse,
        patience: Patience,
        luck: random.Random,
        extra_seconds: ExtraSeconds = lambda _message: 0.0,
    ) -> None:
        self.peer = peer
        self.scope = trio.CancelScope()
        self._network = network
        self._outbox = outbox
        self._pack = pack
        self._on_response = on_response
        self._patience = patience
        self._luck = luck
        self._extra_seconds = extra_seconds
        self._schedule = Schedule()
        self._tries: dict[bytes, int] = {}
        self._mark = 0
        self._most = limits.BATCH
        """Items that may go together; fewer after a delivery that failed because of its items."""
        self._refused = 0
        self._failures = 0
        self._not_before = 0.0
        self._woken = trio.Event()

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

    def wake(self) -> None:
        """Wake up: there may be new items."""
        self._woken.set()

    def retry_soon(self) -> None:
        """Retry soon, as the peer has reconnected and may lack items.

        The delay is random, since many nodes may see the peer come back at once.
        """
        self._failures = 0
        self._not_before = trio.current_time() + self._luck.random() * self._patience.moment
        self._schedule.advance(self._not_before)
        self.wake()

    async def _wait(self) -> None:
        """Wait until an item is due and the peer may be tried."""
        while True:
            self._woken = trio.Event()
            fresh, self._mark = self._outbox.since(self._mark)
            for each in fresh:  # gossip comes first; what it brings to the peer has a receipt by then
                self._schedule.set(each, trio.current_time() + self._patience.moment)
            due = max(self._schedule.next(), self._not_before)
            with trio.move_on_at(due) as until:
                await self._woken.wait()
            if until.cancelled_caught:
                return

    def _due(self) -> list[bytes]:
        """Return pending items that are due, or nearly: as many as fit one gossip message."""
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
                    self._network,
                    self.peer,
                    topic,
                    message,
                    deadline=self._patience.deadline + self._extra_seconds(message),
                )
                if answer:
                    await self._on_response(self.peer, answer)
        except RequestError as error:
            if error.reason == "left":
                raise
            self._failed(items, error)
        except (PeerError, ProtocolError) as error:
            self._network.score(self.peer, getattr(error, "reason", "bad-answer"))
            self._schedule_all(items, self._back_off(error))
        else:
            self._failures = self._refused = 0
            self._most = min(limits.BATCH, 2 * self._most)
            self._reschedule(items)

    def _failed(self, items: Sequence[Item], error: RequestError) -> None:
        if error.reason in _ITEM_FAILURES or error.reason == "deadline":
            self._most = max(1, len(items) // 2)
        if error.reason not in _ITEM_FAILURES:
            self._schedule_all(items, self._back_off(error))
        elif len(items) > 1:
            self._schedule_all(items, trio.current_time())
        else:  # found: it waits longer and longer, and holds up no other
            self._reschedule(items)
            self._refused += 1
            if self._refused > _MOST_REFUSALS:
                self._back_off(error)

    def _back_off(self, error: Exception) -> float:
        """Send nothing to a peer that failed for a while; return until when."""
        pause = self._patience.pause(self._failures, self._luck.random())
        self._failures += 1
        self._not_before = trio.current_time() + pause
        log.info("%s is tried again in %.1f s: %s", peer_id(self.peer), pause, error)
        return self._not_before

    def _reschedule(self, items: Sequence[Item]) -> None:
        """Schedule what is still pending again.

        One jitter for all items, so that they stay together.
        """
        luck = self._luck.random()
        for item in items:
            if self._outbox.is_pending(item.id):
                tries = self._tries[item.id] = self._tries.get(item.id, 0) + 1
                pause = self._patience.moment + self._patience.pause(tries - 1, luck)
                self._schedule.set(item.id, trio.current_time() + pause)
            else:
                self._tries.pop(item.id, None)

    def _schedule_all(self, items: Sequence[Item], due: float) -> None:
        for item in items:
            self._schedule.set(item.id, due)


def packed(items: Sequence[Item], pack: Pack) -> list[tuple[str, bytes]]:
    """Pack items into gossip messages, with their topics.

    An item that cannot be packed is a bug of this program.
    """
    by_topic: dict[str, list[bytes]] = {}
    for item in items:
        by_topic.setdefault(item.topic, []).append(item.data)
    with boundary(DefectError, "packing items"):
        return [(topic, message) for topic, data in by_topic.items() for message in pack(topic, data)]
