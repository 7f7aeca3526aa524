"""Anything in any order: a leader and a follower on disk are at every moment what a list of states
says that they are.
"""

from __future__ import annotations

import errno
import shutil
import tempfile
from contextlib import ExitStack, suppress
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from echo_node.errors import StoreError
from echo_node.weights.publisher import Publisher
from echo_node.weights.store import WeightsStore
from echo_node.weights.tensors import layout_of
from protocol import limits
from tests.weights.disk_faults import failing
from tests.weights.keys import LEADER, NOBODY, counting, rules_of
from tests.weights.stores import OFTEN, bits, follow, held, weights

BUILDABLE = 3
"""Versions back that pruning must leave buildable."""
lucks = st.integers(0, 2**32 - 1)
touches = st.integers(1, 80)
choices = st.integers(0, 2**16 - 1)
"""Which of several: drawn without looking at them, since which touch of the disk fails is a matter
of threads.

A draw, or a precondition, that looked at the stores would differ between two runs of one example.
"""


def chosen(several, choice):
    return several[choice % len(several)] if several else None


class TwoStores(RuleBasedStateMachine):
    """What they publish and hold, against plain dictionaries."""

    def __init__(self) -> None:
        super().__init__()
        self.chunk_elements, limits.CHUNK_ELEMENTS = limits.CHUNK_ELEMENTS, 100
        self.folder = Path(tempfile.mkdtemp())
        self.states = [weights(0)]
        self.next = None
        self.at = -1
        self.luck = counting()
        self.stacks = {name: ExitStack() for name in ("leader", "store")}
        self.reopen("leader")
        self.reopen("store")

    def teardown(self) -> None:
        for stack in self.stacks.values():
            stack.close()
        shutil.rmtree(self.folder)
        limits.CHUNK_ELEMENTS = self.chunk_elements

    def reopen(self, name: str) -> None:
        self.stacks[name].close()
        opening = WeightsStore.open(
            self.folder / name, rules_of(self.states[0]), layout_of(self.states[0]), durable=False
        )
        setattr(self, name, self.stacks[name].enter_context(opening))

    def sign(self, state) -> None:
        version = len(self.leader.follower.heads)
        by = Publisher(self.leader, LEADER, luck=self.luck, cadence=OFTEN)
        self.next = state
        by.publish(state, step=version, roster=NOBODY, groups=())

    def catch_up_model(self) -> None:
        """A head that was signed is a version, whatever came after."""
        if len(self.leader.follower.heads) > len(self.states):
            self.states.append(self.next)

    @initialize()
    def begin(self) -> None:
        self.sign(self.states[0])

    def changed(self, luck: int, share: float):
        draw = np.random.default_rng(luck)
        made = {}
        for name, tensor in self.states[-1].items():
            data = np.frombuffer(tensor.data, np.uint8).copy()
            altered = draw.random(data.size) < share
            data[altered] = draw.integers(0, 256, int(altered.sum()))
            made[name] = type(tensor)(tensor.dtype, tensor.shape, data.tobytes())
        return made

    @rule(luck=lucks, share=st.sampled_from([0.0, 0.01, 0.2, 1.0]))
    def publish(self, luck, share) -> None:
        self.sign(self.changed(luck, share))
        self.catch_up_model()

    @rule(luck=lucks, touch=touches, full=st.booleans())
    def publish_on_a_failing_disk(self, luck, touch, full) -> None:
        with failing(touch, errno.ENOSPC if full else errno.EIO, for_ever=full), suppress(StoreError):
            self.sign(self.changed(luck, 0.05))
        self.reopen("leader")
        self.catch_up_model()
        Publisher(self.leader, LEADER, luck=self.luck, cadence=OFTEN).resume()

    def ahead(self) -> list[int]:
        """Versions that the follower can still go to: what the leader can build."""
        there = []
        for head in self.leader.follower.heads[self.at + 1 :]:
            try:
                self.leader.archive.way(head.id, () if self.store.tip is None else (self.store.tip.id,))
                there.append(head.message.version)
            except StoreError:
                continue
        return there

    @rule(choice=choices, at_once=st.booleans())
    def advance(self, choice, at_once) -> None:
        version = chosen(self.ahead(), choice)
        if version is None:
            return
        follow(self.leader, self.store, version, at_once=at_once)
        self.at = version

    @rule(choice=choices, touch=touches, full=st.booleans(), again=st.booleans())
    def advance_on_a_failing_disk(self, choice, touch, full, again) -> None:
        version = chosen(self.ahead(), choice)
        if version is None:
            return
        with failing(touch, errno.ENOSPC if full else errno.EIO, for_ever=full), suppress(StoreError):
            follow(self.leader, self.store, version)
        if again:
            self.reopen("store")
        now = self.store.tip.message.version if self.store.tip else -1
        assert now in {self.at, version}
        self.at = now

    @rule(name=st.sampled_from(["leader", "store"]))
    def start_again(self, name) -> None:
        self.reopen(name)

    @rule(name=st.sampled_from(["leader", "store"]), luck=lucks)
    def crash_with_a_torn_scratch(self, name, luck) -> None:
        self.stacks[name].close()
        (self.folder / name / "state.whole").unlink(missing_ok=True)
        state = self.folder / name / "state"
        data = np.frombuffer(state.read_bytes(), np.uint8).copy()
        start, end = sorted(np.random.default_rng(luck).integers(0, data.size, 2))
        data[start:end] ^= 0x55
        state.write_bytes(data.tobytes())
        self.reopen(name)

    @rule(name=st.sampled_from(["leader", "store"]), choice=choices)
    def prune(self, name, choice) -> None:
        store = getattr(self, name)
        anchors = [head.id for head in store.follower.heads if head.message.anchor]
        settled = chosen([None, *anchors], choice)
        store.prune(versions=BUILDABLE, settled=settled)

    @rule(back=st.integers(0, BUILDABLE - 1))
    def materialise(self, back) -> None:
        head = self.leader.follower.heads[-1 - min(back, len(self.states) - 1)]
        with self.leader.materialise(head.id) as other:
            assert bits(other.state) == bits(self.states[head.message.version])

    @invariant()
    def both_hold_what_the_model_says(self) -> None:
        if self.leader.tip is not None:
            assert len(self.leader.follower.heads) == len(self.states)
            assert self.leader.tip.message.version == len(self.states) - 1
            assert held(self.leader) == bits(self.states[-1])
            assert self.leader.verify() == []
        tip = self.store.tip
        assert (tip.message.version if tip else -1) == self.at
        if tip is not None:
            assert held(self.store) == bits(self.states[self.at])
            assert self.store.verify() == []


TestTwoStores = TwoStores.TestCase
TestTwoStores.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)
