"""What happens to bytes on the way, in a network that is made up: loss, delay, duplication, reordering.

Luck is drawn per link (sender to receiver) from the swarm's seed, so that the fate of a link's n-th message
depends on nothing else. It knows no node and no message, only when things are due.
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
"""How long a message that is to be overtaken is held, where delays are shorter."""

P = TypeVar("P")


@dataclass(frozen=True, slots=True, kw_only=True)
class Weather:
    """Shares of gossip that is lost, doubled or overtaken, and the least and most delay of anything, in seconds.

    Requests are delayed too, and like a real stream neither lose, double nor reorder.
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
class Fate:
    """When each copy of a message is due, the first copy first; none if it is lost."""

    due: tuple[float, ...]
    reordered: bool = False


class Link:
    """The way from one peer to another. What goes over it keeps its order, unless the weather reorders."""

    def __init__(self, seed: int, sender: bytes, receiver: bytes) -> None:
        # Seeding by text is the same in every process; nothing here is a secret.
        self._luck = random.Random(f"{seed}/{sender.hex()}/{receiver.hex()}")  # noqa: S311
        self._last = 0.0

    def fate(self, weather: Weather, now: float) -> Fate:
        lost, twice, held = (self._luck.random() for _ in range(3))
        due = max(now + self.pause(weather), self._last)
        again = max(now + self.pause(weather), due)
        if lost < weather.loss:
            return Fate(())
        reordered = held < weather.reorder
        if reordered:
            due += max(HELD_SECONDS, weather.delay[1])
            again = max(again, due)
        else:
            self._last = due
        return Fate((due, again) if twice < weather.duplicate else (due,), reordered)

    def pause(self, weather: Weather) -> float:
        """How long one crossing takes."""
        return self._luck.uniform(*weather.delay)


class Courier(Generic[P]):
    """Hands over each parcel when it is due, in the order of their times and then of their sending.

    One task for all, so that the order does not hang on the scheduler's.
    """

    def __init__(self, hand_over: Callable[[P], None], capacity: int) -> None:
        self._hand_over = hand_over
        self._capacity = capacity
        self._under_way: list[tuple[float, int, P]] = []
        self._sent = 0
        self._news = trio.Event()

    def send(self, due: float, parcel: P) -> bool:
        """Take a parcel; False when too many are under way."""
        if len(self._under_way) >= self._capacity:
            return False
        heapq.heappush(self._under_way, (due, self._sent, parcel))
        self._sent += 1
        self._news.set()
        return True

    async def run(self) -> None:
        while True:
            due = self._under_way[0][0] if self._under_way else float("inf")
            if due <= trio.current_time():
                await trio.lowlevel.checkpoint()
                self._hand_over(heapq.heappop(self._under_way)[2])
                continue
            self._news = trio.Event()
            with trio.move_on_at(due):
                await self._news.wait()
