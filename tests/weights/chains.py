"""Small states, and a leader that publishes them, honestly or as a test wants it: what it says
stands alone, as bytes.
"""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
import weakref
from pathlib import Path

import numpy as np

from echo_node.engine.base import TensorBytes
from echo_node.weights.publisher import WHOLE, Cadence, Publication, Publisher
from echo_node.weights.store import WeightsStore
from echo_node.weights.tensors import layout_of
from protocol import Identity, Rules, WeightsHead, open_sealed, seal
from tests.weights.keys import FOLLOWER, LEADER, NOBODY, RUN, STRANGER, counting, rules_of

__all__ = ["FOLLOWER", "LEADER", "NOBODY", "RUN", "STRANGER"]

SIZES = {"bf16": 2, "f16": 2, "f32": 4}


def tensor(dtype: str, *shape: int, seed: int = 0) -> TensorBytes:
    size = SIZES[dtype] * int(np.prod(shape, dtype=int))
    return TensorBytes(dtype, shape, np.random.default_rng([seed, *shape]).bytes(size))


def state(seed: int = 0) -> dict[str, TensorBytes]:
    """Two types, three ranks, 28 elements."""
    return {
        "b.weight": tensor("bf16", 3, 5, seed=seed),
        "a.scale": tensor("f32", seed=seed),
        "c.bias": tensor("f32", 2, 3, 2, seed=seed),
    }


def rules(of=None, *, leader: Identity = LEADER, run: bytes = RUN) -> Rules:
    return rules_of(of or state(), leader=leader, run=run)


class LooseLeader:
    """A publisher over a store of its own, which gives publications that stand alone: blobs are
    bytes.
    """

    def __init__(self, identity: Identity, run: bytes, cadence: Cadence) -> None:
        self._identity, self._run, self._cadence = identity, run, cadence
        self._folder = Path(tempfile.mkdtemp())
        self._rules: Rules | None = None
        self.luck = counting()
        self.tip = None
        weakref.finalize(self, shutil.rmtree, self._folder)

    def publish(self, weights, **told) -> Publication:
        """The first state that is published is the run's."""
        self._rules = self._rules or rules(weights, leader=self._identity, run=self._run)
        layout = layout_of(weights)
        with WeightsStore.open(self._folder, self._rules, layout, durable=False) as store:
            by = Publisher(store, self._identity, luck=self.luck, cadence=self._cadence)
            made = by.publish(weights, **told)
            self.tip = by.tip
            return Publication(made.head, {blob: store.blobs.read(blob) for blob in made.blobs})


def publisher(identity: Identity = LEADER, run: bytes = RUN, cadence: Cadence = WHOLE) -> LooseLeader:
    return LooseLeader(identity, run, cadence)


def publish(count: int, by: LooseLeader | None = None) -> list[Publication]:
    """A chain of so many versions, each with an anchor."""
    made = by or publisher()
    return [made.publish(state(n), step=n, roster=NOBODY, groups=()) for n in range(count)]


def told_otherwise(made: Publication, **changes) -> Publication:
    """What a leader that lies would sign instead."""
    head = dataclasses.replace(made.head.message, **changes)
    return Publication(open_sealed(seal(head, LEADER, RUN), WeightsHead, RUN), made.blobs)
