"""Weights that change as fast as they can under engines in processes of their own: no token is
drawn, and none is scored, by other weights than those of the head that it names, whatever breaks
off, fails half-way or dies meanwhile.
"""

from __future__ import annotations

import os
import random
import signal
import threading
from collections import Counter
from contextlib import closing, contextmanager
from importlib.util import find_spec
from itertools import islice, pairwise

import numpy as np
import pytest

from echo_node.engine.base import Claim, Update
from echo_node.engine.engine_classes import EngineSpec, make_engine
from echo_node.engine.worker.client import Backoff, WorkerEngine
from echo_node.errors import EngineError, StoreError
from echo_node.weights.engine_sync import hand_over, opened, update_to
from echo_node.weights.publisher import Cadence, Publisher
from echo_node.weights.retention import Retention
from echo_node.weights.store import WeightsStore
from echo_node.weights.tensors import layout_of
from protocol import limits
from tests.engine import models
from tests.engine.deltas import Training
from tests.weights.keys import LEADER, NOBODY, counting, rules_of
from tests.weights.stores import follow

KEPT = 6
"""Versions that can be built."""
OFF = 1e-4
"""Honest log-probabilities in float32 are a hundredth of that apart, those of neighbouring versions
a hundred times as far.
"""
LIGHT = "llama/f32" if find_spec("llama_cpp") else "torch/f32"


class Hurry:
    """A chain that grows without a pause, a follower of it, and what the weights of each head truly
    are.
    """

    def __init__(self, folder, at):
        self._first = models.weights(folder)
        self._at = at
        self.archive = {}
        self.over = threading.Event()
        self.begun = threading.Event()

    @contextmanager
    def follower(self):
        rules, layout = rules_of(self._first), layout_of(self._first)
        with (
            WeightsStore.open(self._at / "leader", rules, layout, durable=False) as leader,
            WeightsStore.open(self._at / "follower", rules, layout, durable=False) as store,
        ):
            going = threading.Thread(target=self._go_on, args=(leader, store))
            going.start()
            try:
                assert self.begun.wait(60)
                yield store
            finally:
                self.over.set()
                going.join()

    def _go_on(self, leader, store):
        by = Publisher(leader, LEADER, luck=counting(), cadence=Cadence(squash_every=4, anchor_share=1.0))
        training, settling = Training(self._first), Retention(store, KEPT)
        version = 0
        while not self.over.is_set():
            weights = training.weights()
            head = by.publish(weights, step=version, roster=NOBODY, groups=()).head
            self.archive[head.id] = weights
            follow(leader, store, version)
            settling.settle()
            self.begun.set()
            version += 1
            for _ in range(3):
                for _change in training.step(1):
                    pass


class Sampler:
    """Draws under the newest head, one shortly before it or the same again, and goes wrong now and
    then in the middle of it.
    """

    def __init__(self, store, engine, luck, *, kills):
        self._store, self._engine, self._luck, self._kills = store, engine, luck, kills
        self._last = None
        self.drawn = []
        """Each completion with its request."""
        self.happened = Counter()

    def fill(self, seed):
        luck, store, engine = self._luck, self._store, self._engine
        head = luck.choice((store.tip, store.tip, *store.follower.heads[-3:], self._last or store.tip))
        self._last = head
        requests = models.requests(3, group_size=4, seed=seed, lengths=(3, 6))
        enough = luck.choice((2, 5, 100))
        dies = self._kills and luck.random() < 0.1
        try:
            with opened(store, head.id) as held:
                hand_over(_Breaking(held, luck), engine)
            assert engine.loaded == head.id
            most = len(self.drawn) + enough
            for finished in engine.generate(requests, stop=lambda: len(self.drawn) >= most, news=self._news):
                assert finished.draw.spans[0].start == 0
                self.drawn.append((requests[finished.request], finished.draw))
                self.happened["changed in flight"] += len(finished.draw.spans) > 1
                if dies:
                    os.kill(engine.pid, signal.SIGKILL)
        except (EngineError, StoreError) as error:
            self.happened[type(error).__name__] += 1

    def _news(self):
        newest = self._store.tip.id
        if self._engine.loaded in {None, newest} or self._luck.random() < 0.3:
            return None
        update = update_to(self._store, self._engine.loaded, newest)

        @contextmanager
        def breaking(granule):
            with update.changes(granule) as changes:
                yield _cut_off(changes, self._luck)

        return Update(update.since, update.head_id, breaking)


class _Breaking:
    """A lease whose changes end at times before their end, as when a frame was pruned meanwhile."""

    def __init__(self, held, luck):
        self._held, self._luck = held, luck
        self.head, self.state = held.head, held.state

    def changes(self, since, granule=1):
        return _cut_off(self._held.changes(since, granule), self._luck)


def _cut_off(changes, luck):
    if luck.random() < 0.8:
        yield from changes
        return
    yield from islice(changes, luck.randrange(4))
    raise StoreError("a frame is gone")


class Verifier:
    """Scores what was drawn, each stretch at its head, and says what it found."""

    def __init__(self, store, engine):
        self._store, self._engine = store, engine
        self.found = []

    def look(self, request, draw):
        for place, (start, end) in enumerate(pairwise([*(span.start for span in draw.spans), draw.ids.size])):
            head = draw.spans[place].head_id
            try:
                if self._engine.loaded != head:
                    with opened(self._store, head) as held:
                        hand_over(held, self._engine)
                scores = self._engine.score(
                    np.concatenate((request.prompt, draw.ids[:start])), draw.ids[start:end], request.limits
                )
            except StoreError:
                continue  # it is too old to be built
            self.found.append((head, request, draw, start, end, scores.logprobs))


def worst_gaps(folder, truth, drawn, found):
    """How far what was drawn, and what was found, lie from what weights give that nothing was ever
    done to but to load them.
    """
    clean = make_engine(EngineSpec("torch/f32", folder, "cpu", 4, 1))
    claimed = [
        (span.head_id, request, draw, span.start, end, draw.logprobs[span.start : end])
        for request, draw in drawn
        for span, end in zip(draw.spans, [*(one.start for one in draw.spans[1:]), draw.ids.size], strict=True)
    ]
    worst = []
    with closing(clean):
        for each in (claimed, found):
            gaps = [0.0]
            for head, request, draw, start, end, logprobs in sorted(each, key=lambda one: one[0]):
                if clean.loaded != head:
                    clean.load(head, truth[head])
                claim = Claim(np.concatenate((request.prompt, draw.ids[:start])), draw.ids[start:end])
                true = clean.score_many([claim], request.limits)[0].logprobs
                gaps.append(float(np.abs(true - logprobs).max()))
            worst.append(max(gaps))
    return worst


def hurry(tmp_path, engine_class, rounds, *, kills, seed=0):
    folder = models.folder(tmp_path / "model")
    spec = EngineSpec(engine_class, folder, "cpu", rows=8, threads=1)
    chain = Hurry(folder, tmp_path)
    backoff = Backoff(first_seconds=0.01, most_seconds=0.02)
    with (
        WorkerEngine(spec, backoff=backoff) as ours,
        WorkerEngine(spec) as theirs,
        chain.follower() as store,
    ):
        sampler, verifier = Sampler(store, ours, random.Random(seed), kills=kills), Verifier(store, theirs)
        for number in range(rounds):
            before = len(sampler.drawn)
            sampler.fill(number)
            for request, draw in sampler.drawn[before : before + 3]:
                verifier.look(request, draw)
    assert len({span.head_id for _, draw in sampler.drawn for span in draw.spans}) > rounds // 4
    assert verifier.found
    by_sampler, by_verifier = worst_gaps(folder, chain.archive, sampler.drawn, verifier.found)
    assert by_sampler < OFF, "a token was drawn by other weights than those it names"
    assert by_verifier < OFF, "a token was scored by other weights than those it names"
    return sampler.happened


def neighbours_are_far_apart(folder):
    """Whether the weights of the next version would be noticed."""
    training = Training(models.weights(folder))
    engines = [make_engine(EngineSpec("torch/f32", folder, "cpu", 4, 1)) for _ in range(2)]
    request = models.requests(1, seed=1)[0]
    claim = Claim(request.prompt, request.prompt)
    seen = []
    for engine in engines:
        with closing(engine):
            engine.load(models.HEAD, training.weights())
            seen.append(engine.score_many([claim], request.limits)[0].logprobs)
        for _ in range(3):
            for _change in training.step(1):
                pass
    return float(np.abs(seen[0] - seen[1]).max())


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(limits, "CHUNK_ELEMENTS", 512)


@pytest.mark.timeout(300)
def test_no_token_is_of_other_weights_than_it_names_while_versions_fly_by(tmp_path):
    happened = hurry(tmp_path, LIGHT, 25, kills=LIGHT.startswith("llama"))
    assert happened["EngineStoppedError"], happened
    assert neighbours_are_far_apart(tmp_path / "model") > 10 * OFF


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("engine_class", ["torch/f32", "llama/f32"])
def test_nor_in_a_thousand_calls_that_break_off_fail_half_way_and_die(engine_class, seed, tmp_path):
    if engine_class.startswith("llama"):
        pytest.importorskip("llama_cpp")
    happened = hurry(tmp_path, engine_class, 125, kills=True, seed=seed)
    assert happened["changed in flight"], happened
    assert happened["EngineError"], happened
    assert happened["EngineStoppedError"], happened
