"""Cheapest way to a version in bytes, over the routes of known heads. Pure.

A way begins at a state that is held, or at nothing with an anchor. The caller says what a route
costs: to a node that has half of an anchor on disk the other half is cheap.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from protocol import Opened, Route, WeightsHead

Head: TypeAlias = Opened[WeightsHead]
Cost: TypeAlias = Callable[[Route], int | None]
"""Function from a route to the bytes still to fetch; None if it cannot be taken."""


@dataclass(frozen=True, slots=True)
class Step:
    """Step to the state of a head by one of its routes."""

    head: Head
    route: Route


Way: TypeAlias = tuple[Step, ...]


def whole(route: Route) -> int:
    """Return the cost of a route for a node that has nothing of it but its table."""
    return route.size


def cheapest(
    heads: Mapping[bytes, Head], target: bytes, held: Collection[bytes] = (), cost: Cost = whole
) -> Way | None:
    """Return the steps to head `target` from a state in `held` or from nothing.

    None: there is no way. Of two ways of one cost, the one with fewer steps. The search goes
    backwards from the target, so that it meets no version that does not lead there.
    """
    ranks = itertools.count()
    queue: list[tuple[int, int, int, bytes | None, Way]] = [(0, 0, next(ranks), target, ())]
    settled = set[bytes]()
    while queue:
        size, steps, _, at, way = heapq.heappop(queue)
        if at is None or at in held:
            return way
        if at in settled or (head := heads.get(at)) is None:
            continue
        settled.add(at)
        for route in head.message.routes:
            price = cost(route)
            if price is not None:
                step = Step(head, route)
                heapq.heappush(queue, (size + price, steps + 1, next(ranks), route.base, (step, *way)))
    return None
