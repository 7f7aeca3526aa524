"""Simulated link faults: loss, delay, duplication and reordering.

Random numbers are drawn per link (sender to receiver) from the swarm's seed, so that the n-th
message of a link has the same faults whatever else is sent.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

import trio

from echo_node.errors import ConfigError

HELD_SECONDS: Final = 0.01
"""Seconds by which a reordered message is held back, where delays are shorter."""

P = TypeVar("P")


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFaults:
    """Shares of gossip that is lost, duplicated or reordered, and the range of delays.

    Delays are in seconds. Requests are delayed too but, like a real stream, neither lost,
    duplicated nor reordered.
    """

    loss: float = 0.0
    delay: tuple[float, float] = (0.0, 0.0)
    duplicate: float = 0.0
    reorder: float = 0.0

    def __post_init__(self) -> None:
        for name in ("loss", "duplicate", "reorder"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ConfigError(f"{name} is a share from 0 to 1, not {getattr(self, name)}")
        if not 0.0 <= self.delay[0] <= self.delay[1] < float("inf"):
            raise ConfigError(f"delay is (least, most) in seconds, not {self.delay}")


@dataclass(frozen=True, slots=True)
class Transmission:
    """Due times of the copies of a message, in order; empty if it is lost."""

    due: tuple[float, ...]
    reordered: bool = False


class Link:
    """The link from one peer to another. Messages keep their order unless reordered."""

    def __init__(self, seed: int, sender: bytes, receiver: bytes) -> None:
        # Seeding by text is the same in every process; nothing here is a secret.
        self._luck = random.Random(f"{seed}/{sender.hex()}/{receiver.hex()}")  # noqa: S311
        self._last = 0.0

    def transmit(self, faults: LinkFaults, now: float) -> Transmission:
        lost, twice, held = (self._luck.random() for _ in range(3))
        due = max(now + self.pause(faults), self._last)
        again = max(now + self.pause(faults), due)
        if lost < faults.loss:
            return Transmission(())
        reordered = held < faults.reorder
        if reordered:
            due += max(HELD_SECONDS, faults.delay[1])
            again = max(again, due)
        else:
            self._last = due
        return Transmission((due, again) if twice < faults.duplicate else (due,), reordered)

    def pause(self, faults: LinkFaults) -> float:
        """Return the delay of one transmission, in seconds."""
        return self._luck.uniform(*faults.delay)


class FaultyDelivery(Generic[P]):
    """Delivers each item when it is due, ties in the order of sending.

    One task for all, so that the order does not depend on the scheduler.
    """

    def __init__(self, deliver: Callable[[P], None], capacity: int) -> None:
        self._deliver = deliver
        self._capacity = capacity
        self._in_flight: list[tuple[float, int, P]] = []
        self._sent = 0
        self._news = trio.Event()

    def send(self, due: float, parcel: P) -> bool:
        """Accept an item; return False when too many are in flight."""
        if len(self._in_flight) >= self._capacity:
            return False
        heapq.heappush(self._in_flight, (due, self._sent, parcel))
        self._sent += 1
        self._news.set()
        return True

    async def run(self) -> None:
        while True:
            due = self._in_flight[0][0] if self._in_flight else float("inf")
            if due <= trio.current_time():
                await trio.lowlevel.checkpoint()
                self._deliver(heapq.heappop(self._in_flight)[2])
                continue
            self._news = trio.Event()
            with trio.move_on_at(due):
                await self._news.wait()
