"""The cheapest way to a version: against every way that there is, and over chains as trainers make
them.
"""

from __future__ import annotations

import random

import pytest

from echo_node.weights.route_graph import cheapest
from protocol import ZERO, Opened, Route, WeightsHead


def size_of(way) -> int:
    """Return the bytes of a way."""
    return sum(step.route.size for step in way)


def name(text: str) -> bytes:
    return text.encode().ljust(32, b".")


def head(version: int, routes) -> Opened[WeightsHead]:
    """`routes` are pairs of a version, or none for an anchor, and a size."""
    told = WeightsHead(
        groups=ZERO,
        layout=ZERO,
        luck=ZERO,
        previous=name(f"head {version - 1}") if version else ZERO,
        root=ZERO,
        roster=ZERO,
        routes=tuple(
            Route(None if base is None else name(f"head {base}"), "c", size, name(f"{base}>{version}"))
            for base, size in routes
        ),
        step=version,
        term=1,
        version=version,
    )
    return Opened(told, name(f"head {version}"), ZERO, ZERO, b"")


def chain(luck: random.Random, length: int, *, holes: float, squash: int = 8):
    """Deltas, squashes every so often, anchors now and then; some routes are missing, and so are
    some heads.
    """
    heads = {}
    for version in range(length):
        routes = [(None, luck.randint(40, 80))] if version == 0 or luck.random() < 0.15 else []
        if version:
            routes.append((version - 1, luck.randint(1, 12)))
        if version >= squash and version % squash == 0:
            routes.append((version - squash, luck.randint(5, 60)))
        kept = [route for route in routes if luck.random() > holes] or routes[:1]
        if luck.random() > holes / 4:
            heads[name(f"head {version}")] = head(version, kept)
    return heads


def every_way(heads, target, held):
    """All ways there are, by trying."""
    if target in held:
        yield ()
    elif target in heads:
        for route in heads[target].message.routes:
            if route.base is None:
                yield ((target, route),)
            else:
                for way in every_way(heads, route.base, held):
                    yield (*way, (target, route))


@pytest.mark.parametrize("seed", range(60))
def test_no_way_is_cheaper_than_the_one_that_is_chosen(seed):
    luck = random.Random(seed)
    heads = chain(luck, 26, holes=luck.choice([0.0, 0.1, 0.4]), squash=luck.choice([3, 8]))
    for version in (1, 9, 16, 25):
        target = name(f"head {version}")
        held = {name(f"head {luck.randrange(26)}")} if luck.random() < 0.7 else set()
        ways = list(every_way(heads, target, held))
        found = cheapest(heads, target, held)
        if not ways:
            assert found is None
            continue
        best = min(sum(route.size for _, route in way) for way in ways)
        assert size_of(found) == best
        assert [(step.head.id, step.route) for step in found] in [list(way) for way in ways]
        fewest = min(len(way) for way in ways if sum(route.size for _, route in way) == best)
        assert len(found) == fewest


def test_a_way_is_one_step_after_another_and_starts_where_something_is_held():
    heads = chain(random.Random(1), 100, holes=0.0)
    held = name("head 3")
    way = cheapest(heads, name("head 99"), {held})
    starts = [step.route.base for step in way]
    assert starts[0] in (held, None)
    assert starts[1:] == [step.head.id for step in way[:-1]]
    assert way[-1].head.id == name("head 99")


def test_whoever_is_there_has_no_way_to_go():
    heads = chain(random.Random(1), 5, holes=0.0)
    assert cheapest(heads, name("head 4"), {name("head 4")}) == ()
    assert cheapest(heads, name("nobody"), ()) is None


def test_whoever_slept_for_a_hundred_versions_takes_the_squashes():
    """Deltas of 10 bytes, squashes over 8 versions of 30, one anchor of 10,000: brute force agrees,
    over 101 versions.
    """
    heads = {
        name(f"head {version}"): head(
            version,
            [
                *([(version - 1, 10)] if version else []),
                *([(version - 8, 30)] if version >= 8 and version % 8 == 0 else []),
                *([(None, 10_000)] if version in (0, 50) else []),
            ],
        )
        for version in range(110)
    }
    way = cheapest(heads, name("head 104"), {name("head 4")})
    told = [(step.route.base, step.route.size) for step in way]
    assert size_of(way) == 4 * 10 + 12 * 30
    assert [size for _, size in told] == [10] * 4 + [30] * 12

    # Bellman-Ford over the same numbers, forwards.
    cost = {name("head 4"): 0}
    for version in range(5, 105):
        at = heads[name(f"head {version}")]
        known = [
            (0 if route.base is None else cost[route.base]) + route.size
            for route in at.message.routes
            if route.base is None or route.base in cost
        ]
        cost[at.id] = min(known)
    assert cost[name("head 104")] == size_of(way)


def test_what_a_route_costs_is_for_the_caller_to_say():
    heads = {each.id: each for each in (head(0, [(None, 100)]), head(1, [(0, 10), (None, 100)]))}
    target = name("head 1")
    dear = {name("0>1"): None}
    assert [step.route.base for step in cheapest(heads, target)] == [None], (
        "one anchor beats an anchor and a delta"
    )
    here = {name("None>0"): 0}
    way = cheapest(heads, target, cost=lambda route: here.get(route.table, route.size))
    assert [step.route.base for step in way] == [None, name("head 0")], "half of it is on disk"
    only = cheapest(heads, target, {name("head 0")}, lambda route: dear.get(route.table, route.size))
    assert [step.route.base for step in only] == [None]
    assert cheapest(heads, target, cost=lambda _: None) is None


def test_a_long_chain_is_planned_in_no_time():
    heads = chain(random.Random(2), 5_000, holes=0.0)
    assert cheapest(heads, name("head 4999"), {name("head 0")}) is not None
    deltas = {name(f"head {n}"): head(n, [(n - 1, 1)] if n else [(None, 1)]) for n in range(2_000)}
    assert len(cheapest(deltas, name("head 1999"))) == 2_000
