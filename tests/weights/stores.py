"""Stores for tests: small states that change a little from version to version, and frames that go
from hand to hand.
"""

from __future__ import annotations

from contextlib import contextmanager

import numpy as np

from echo_node.engine.base import TensorBytes
from echo_node.weights.publisher import Cadence, Publisher
from echo_node.weights.route_graph import cheapest
from echo_node.weights.store import WeightsStore
from echo_node.weights.tensors import layout_of
from tests.weights.keys import LEADER, NOBODY, counting, rules_of

SHAPES = {
    "a.scale": ("f32", ()),
    "b.weight": ("bf16", (17, 31)),
    "c.bias": ("f32", (9, 5)),
    "d.weight": ("f16", (90,)),
}
OFTEN = Cadence(squash_every=4, anchor_share=2.0)
"""Squashes and anchors within few versions of such small states."""


def weights(version: int) -> dict[str, TensorBytes]:
    """The state of a version: each differs from the one before in a few elements, and anybody can
    make it again.
    """
    luck = np.random.default_rng(0)
    flat = {
        name: luck.integers(0, 2**16 if dtype != "f32" else 2**32, int(np.prod(shape, dtype=int)))
        for name, (dtype, shape) in SHAPES.items()
    }
    for each in range(1, version + 1):
        luck = np.random.default_rng(each)
        for values in flat.values():
            chosen = luck.random(values.size) < 0.05
            values[chosen] += luck.choice([-1, 1, 700], int(chosen.sum()))
    return {
        name: TensorBytes(dtype, shape, flat[name].astype("<u4" if dtype == "f32" else "<u2").tobytes())
        for name, (dtype, shape) in SHAPES.items()
    }


LAYOUT = layout_of(weights(0))


@contextmanager
def opened(folder, **options):
    with WeightsStore.open(folder, rules_of(weights(0)), LAYOUT, **options) as store:
        yield store


def publisher(store: WeightsStore, cadence: Cadence = OFTEN, start: int = 0) -> Publisher:
    return Publisher(store, LEADER, luck=counting(start), cadence=cadence)


def publish(store: WeightsStore, count: int, cadence: Cadence = OFTEN):
    """So many further versions."""
    by = publisher(store, cadence)
    made = []
    for _ in range(count):
        version = by.tip.message.version + 1 if by.tip else 0
        made.append(by.publish(weights(version), step=version, roster=NOBODY, groups=()))
    return made


def bits(state) -> dict[str, tuple]:
    """A state that outlives its lease."""
    return {name: (one.dtype, one.shape, bytes(one.data)) for name, one in state.items()}


def held(store: WeightsStore) -> dict[str, tuple]:
    with store.lease() as lease:
        assert lease.head == store.tip
        return bits(lease.state)


def hand_over(source: WeightsStore, target: WeightsStore, route) -> None:
    """Every blob of a route, from one folder to the other."""
    for blob in source.archive.names_of(route):
        target.blobs.put(source.blobs.read(blob))


def follow(source: WeightsStore, target: WeightsStore, version: int, *, at_once: bool = True) -> None:
    """Be at a version of another store, over the cheapest way."""
    heads = {head.id: head for head in source.follower.heads}
    for head in heads.values():
        if head.message.version <= version:
            target.keep_head(head)
    wanted = next(head for head in heads.values() if head.message.version == version)
    start = () if target.tip is None else (target.tip.id,)
    way = cheapest(heads, wanted.id, start, source.archive._cost)
    for step in way:
        hand_over(source, target, step.route)
    if at_once:
        target.walk(way)
    else:
        for step in way:
            target.advance(step.head, step.route)


def files(folder) -> dict[str, bytes]:
    """Everything that a store has on disk, but for what may differ without a difference."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in {"lock", "state.whole"}
    }
