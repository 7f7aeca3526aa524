"""Continuous batching and new weights in flight, on every decoder: results do not change."""

from __future__ import annotations

import dataclasses
from contextlib import contextmanager

import numpy as np
import pytest

from echo_node.engine import local
from echo_node.engine.base import Change, Claim, Prefix, SlotRequest, Span, Update, generate_groups
from echo_node.engine.local import LocalEngine
from echo_node.errors import EngineError
from protocol import sampling
from tests.engine import models
from tests.engine.models import HEAD, LIMITS

LATER = b"l" * 32
LATEST = b"m" * 32
ENDLESS = dataclasses.replace(LIMITS, end_tokens=frozenset())
CLASSES = ("torch/f32", "llama/f32")


def decoder(engine_class, folder):
    medium, kind = engine_class.split("/")
    if medium == "torch":
        from echo_node.engine.torch_decoder import TorchDecoder

        return TorchDecoder(folder, device="cpu", dtype=kind, threads=1)
    from echo_node.engine.llama_decoder import LlamaDecoder

    return LlamaDecoder(folder, kind=kind, threads=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return models.folder(tmp_path_factory.mktemp("qwen3"), head_dim=10, tie_word_embeddings=True)


@pytest.fixture(scope="module", params=CLASSES)
def watched(request, folder):
    """A decoder that notes what is asked of it."""
    made = decoder(request.param, folder)
    made.load(models.weights(folder))
    noted = []
    for name in ("prefill", "decode", "make_room"):
        was = getattr(made, name)

        def call(*given, was=was, name=name):
            noted.append((name, *given))
            return was(*given)

        setattr(made, name, call)
    made.noted = noted
    yield made
    made.close()


@pytest.fixture
def engine_of(watched, folder):
    def make(rows):
        watched.noted.clear()
        engine = LocalEngine(watched, rows=rows)
        engine.load(HEAD, models.weights(folder))
        return engine

    return make


def check(engine, request, draw, completion, weights_of=None):
    """Every token is the one that the slot's random number draws.

    One prefill per span, under its own head.
    """
    luck = sampling.uniforms(request.slot_key, completion, draw.ids.size)
    cuts = [span.start for span in draw.spans] + [draw.ids.size]
    assert cuts == sorted(set(cuts))
    assert cuts[0] == 0
    for span, end in zip(draw.spans, cuts[1:], strict=True):
        if engine.loaded != span.head_id:
            engine.load(span.head_id, weights_of[span.head_id])
        before = np.concatenate((request.prompt, draw.ids[: span.start]))
        scores = engine.score(before, draw.ids[span.start : end], request.limits)
        assert scores.replay(luck[span.start : end]).d.max() < 1e-5
        assert np.abs(scores.logprobs - draw.logprobs[span.start : end]).max() < 1e-4


def mixed(count, *, seed=0, most=30):
    """Requests of all sizes: prompts, groups and limits."""
    luck = np.random.default_rng(seed)
    return [
        SlotRequest(
            luck.integers(0, LIMITS.vocab_size, luck.integers(1, 15)),
            luck.bytes(32),
            int(luck.integers(1, 9)),
            dataclasses.replace(LIMITS, max_tokens=int(luck.integers(1, most)), temperature=0.9),
        )
        for _ in range(count)
    ]


@pytest.mark.parametrize("rows", [1, 3, 8, 64])
def test_every_completion_is_its_own_lucks_whatever_runs_beside_it(engine_of, rows):
    engine = engine_of(rows)
    requests = mixed(12)
    for request, group in zip(requests, generate_groups(engine, requests), strict=True):
        assert len(group) == request.group_size
        for completion, draw in enumerate(group):
            assert draw.spans == (Span(0, HEAD),)
            check(engine, request, draw, completion)


@pytest.mark.parametrize("rows", [1, 3, 64])
def test_a_completion_goes_on_after_what_was_drawn_of_it_as_if_nothing_had_happened(engine_of, rows, watched):
    engine = engine_of(rows)
    requests = mixed(12)
    whole = generate_groups(engine, requests)
    luck = np.random.default_rng(5)
    resumed, kept = [], 0
    for request, group in zip(requests, whole, strict=True):
        drawn = []
        for number, draw in enumerate(group):
            cut = int(luck.integers(0, draw.ids.size + 1))  # nothing, a part, or all of it
            kept += cut
            if cut:
                drawn.append(Prefix(number, draw.ids[:cut], draw.logprobs[:cut]))
        resumed.append(dataclasses.replace(request, drawn=tuple(drawn)))
    watched.noted.clear()
    with engine.batch() as batch:
        for request in resumed:
            batch.add(request)
        ended = {}
        while not batch.idle:
            ended |= {(each.request, each.completion): each.draw for each in batch.step()}
        total = sum(draw.ids.size for group in whole for draw in group)
        assert batch.tokens == total - kept, "what was drawn is not drawn again"
    for number, (request, group) in enumerate(zip(requests, whole, strict=True)):
        for completion, draw in enumerate(group):
            again = ended[number, completion]
            assert again.ids.tolist() == draw.ids.tolist()
            assert again.finish == draw.finish
            check(engine, request, again, completion)


@pytest.mark.parametrize("piece", [1, 7, 64])
def test_long_claims_are_scored_in_pieces_as_in_one_pass(engine_of, watched, monkeypatch, piece):
    engine = engine_of(2)
    luck = np.random.default_rng(9)
    claims = [
        Claim(luck.integers(0, 32, before), luck.integers(0, 32, size)) for before, size in ((5, 40), (21, 3))
    ]
    whole = engine.score_many(claims, LIMITS)
    monkeypatch.setattr(local, "LONG", piece)
    asked = []
    was = watched.score_pieces

    def spied(*given):
        for logits in was(*given):
            asked.append(len(logits))
            yield logits

    monkeypatch.setattr(watched, "score_pieces", spied)
    again = engine.score_many(claims, LIMITS)
    assert max(asked, default=0) <= piece
    assert (not asked) == (piece == 64)
    for one, other in zip(whole, again, strict=True):
        for name in ("logprobs", "low", "high", "squares_low", "squares_high", "squares"):
            assert getattr(one, name) == pytest.approx(getattr(other, name), abs=1e-5)
    engine.score_many(claims[:1], LIMITS)
    generate_groups(engine, mixed(2))  # and rows are as usable as before


BAD_PREFIXES = {
    "of another completion": Prefix(2, np.array([1]), np.array([-1.0])),
    "too long": Prefix(0, np.ones(99, np.int64), np.ones(99)),
    "of foreign tokens": Prefix(0, np.array([10**6]), np.array([-1.0])),
    "without all log-probabilities": Prefix(0, np.array([1, 2]), np.array([-1.0])),
    "empty": Prefix(0, np.array([], np.int64), np.array([])),
}


@pytest.mark.parametrize("prefix", BAD_PREFIXES.values(), ids=BAD_PREFIXES.keys())
def test_a_prefix_that_does_not_fit_is_refused_before_any_work(engine_of, watched, prefix):
    engine = engine_of(4)
    request = SlotRequest(np.arange(3), bytes(32), 2, dataclasses.replace(LIMITS, max_tokens=8), (prefix,))
    with pytest.raises(EngineError, match="prefix"):
        generate_groups(engine, [request])
    assert not [name for name, *_ in watched.noted if name in {"prefill", "decode"}]


def test_a_place_is_taken_again_at_once_and_no_more_than_there_are(engine_of, watched):
    engine = engine_of(4)
    luck = np.random.default_rng(3)
    lengths = [2, 29, 5, 17, 3, 11, 8, 2, 26, 4, 9, 14]
    requests = [
        SlotRequest(
            luck.integers(0, 32, 6), luck.bytes(32), 1, dataclasses.replace(ENDLESS, max_tokens=length)
        )
        for length in lengths
    ]
    drawn, ended, waiting = [], [], list(requests)
    with engine.batch() as batch:
        while waiting or not batch.idle:
            while waiting and batch.room:
                batch.add(waiting.pop(0))
            before = batch.tokens
            ended += [finished.request for finished in batch.step()]
            drawn.append((batch.tokens - before, bool(waiting)))
    assert sorted(ended) == list(range(len(lengths)))
    assert ended[0] == 0
    assert ended[-1] in {8, 10, 11}
    assert sum(tokens for tokens, _ in drawn) == sum(lengths)
    assert all(tokens == 4 for tokens, more in drawn if more), "as many as there are places, at every step"
    assert max(tokens for tokens, _ in drawn) == 4
    assert max(len(given[0]) for name, *given in watched.noted if name == "decode") <= 4


def test_a_prompt_is_filled_in_once_for_its_group(engine_of, watched):
    engine = engine_of(16)
    generate_groups(engine, models.requests(2, group_size=8, limits=ENDLESS))
    prompts = [given[1] for name, *given in watched.noted if name == "prefill"]
    assert [len(each) for each in prompts] == [2]


def test_a_group_larger_than_the_engine_takes_over_its_prompt_from_those_that_run(engine_of, watched):
    engine = engine_of(4)
    request = models.requests(1, group_size=30, limits=LIMITS)[0]
    group = generate_groups(engine, [request])[0]
    assert len(group) == 30
    for completion, draw in enumerate(group):
        check(engine, request, draw, completion)
    filled = sum(1 for name, *_ in watched.noted if name == "prefill")
    assert filled < 6, "a sibling that runs has the prompt already"


def test_requests_are_taken_when_there_is_room_and_no_sooner(engine_of):
    engine = engine_of(4)
    taken = []

    def endlessly():
        for place, request in enumerate(models.requests(40, group_size=2, limits=ENDLESS)):
            taken.append(place)
            yield request

    completions = engine.generate(endlessly())
    next(completions)
    assert len(taken) <= 3
    completions.close()
    assert generate_groups(engine, models.requests(1)), "whoever goes away leaves a whole engine"


def test_a_longer_row_is_made_when_none_is_in_use(folder):
    made = decoder("torch/f32", models.folder(folder.parent / "long", max_position_embeddings=1024))
    engine = LocalEngine(made, rows=2)
    engine.load(HEAD, models.weights(folder.parent / "long"))
    luck = np.random.default_rng(0)
    requests = [
        SlotRequest(
            luck.integers(0, 32, length), luck.bytes(32), 2, dataclasses.replace(ENDLESS, max_tokens=tokens)
        )
        for length, tokens in ((4, 20), (100, 60), (3, 10), (2, 300))
    ]
    for request, group in zip(requests, generate_groups(engine, requests), strict=True):
        for completion, draw in enumerate(group):
            check(engine, request, draw, completion)


def test_rows_outlive_the_columns_that_they_began_in(folder):
    """Hundreds of short completions beside long ones reuse the block of columns many times."""
    long = models.folder(folder.parent / "longer", max_position_embeddings=512)
    engine = LocalEngine(decoder("torch/f32", long), rows=3)
    engine.load(HEAD, models.weights(long))
    luck = np.random.default_rng(1)
    requests = [
        SlotRequest(
            luck.integers(0, 32, int(luck.integers(1, 40))),
            luck.bytes(32),
            1,
            dataclasses.replace(ENDLESS, max_tokens=200 if place % 9 == 0 else int(luck.integers(1, 30))),
        )
        for place in range(60)
    ]
    for request, group in zip(requests, generate_groups(engine, requests), strict=True):
        check(engine, request, group[0], 0)


# Weights that change


def changed(weights, seed, share=0.02):
    """Other weights, and what is different in them: for an `Update` and for a fresh load."""
    luck = np.random.default_rng(seed)
    after, different = {}, []
    for name, tensor in sorted(weights.items()):
        bits = np.frombuffer(tensor.data, "<u2").copy()
        count = max(1, int(bits.size * share))
        positions = np.sort(luck.choice(bits.size, count, replace=False))
        bits[positions] ^= luck.integers(1, 128, count).astype(np.uint16)  # the mantissa: nothing explodes
        after[name] = dataclasses.replace(tensor, data=bits.tobytes())
        different.append((name, positions))
    return after, different


def update(since, head_id, after, different):
    @contextmanager
    def changes(granule):
        def each():
            for name, positions in different:
                bits = np.frombuffer(after[name].data, "<u2")
                runs = np.unique(positions // granule)
                within = (runs[:, None] * granule + np.arange(granule)).ravel()
                within = within[within < bits.size]
                yield Change(name, within.astype(np.int64), bits[within])

        yield each()

    return Update(since, head_id, changes)


@pytest.mark.parametrize("engine_class", ["torch/f32", "torch/bf16", "torch/f16"])
def test_after_fifty_changes_it_is_bit_for_bit_a_fresh_load(engine_class, folder):
    """The llama classes are held to the same in test_llamacpp."""
    weights, live, fresh = (
        models.weights(folder),
        decoder(engine_class, folder),
        decoder(engine_class, folder),
    )
    engine = LocalEngine(live)
    engine.load(HEAD, weights)
    head = HEAD
    for seed in range(50):
        weights, different = changed(weights, seed)
        engine.patch(update(head, bytes([seed]) * 32, weights, different))
        head = bytes([seed]) * 32
    assert engine.loaded == head
    fresh.load(weights)
    ids = np.arange(20)
    assert np.array_equal(live.score(ids, 20), fresh.score(ids, 20))


def test_an_update_of_other_weights_is_refused_and_changes_nothing(engine_of, folder):
    engine = engine_of(4)
    before = generate_groups(engine, models.requests(2))
    with pytest.raises(EngineError, match="other weights"):
        engine.patch(update(LATER, LATEST, *changed(models.weights(folder), 0)))
    assert engine.loaded == HEAD
    after = generate_groups(engine, models.requests(2))
    assert [d.ids.tolist() for g in after for d in g] == [d.ids.tolist() for g in before for d in g]


def test_an_update_that_breaks_off_leaves_no_heads_name(engine_of, folder):
    engine = engine_of(4)

    @contextmanager
    def breaks(_granule):
        def each():
            yield Change("model.norm.weight", np.array([0]), np.array([0], np.uint16))
            raise OSError("the disk is gone")

        yield each()

    with pytest.raises(EngineError, match="the disk is gone"):
        engine.patch(Update(HEAD, LATER, breaks))
    assert engine.loaded is None
    with pytest.raises(EngineError, match="no weights"):
        generate_groups(engine, models.requests(1))
    engine.load(HEAD, models.weights(folder))
    assert generate_groups(engine, models.requests(1))


def at(call, *updates):
    """News at the given calls, one after the other."""
    asked = [0]
    waiting = list(updates)

    def news():
        asked[0] += 1
        return waiting.pop(0) if waiting and asked[0] >= call else None

    return news


def test_in_flight_none_is_lost_and_every_span_is_its_own_heads(engine_of, folder):
    engine = engine_of(16)
    first = models.weights(folder)
    second, different = changed(first, 1, share=0.3)
    requests = models.requests(4, group_size=4, limits=dataclasses.replace(ENDLESS, max_tokens=24))
    groups = [{} for _ in requests]
    for finished in engine.generate(requests, news=at(9, update(HEAD, LATER, second, different))):
        groups[finished.request][finished.completion] = finished.draw
    assert engine.loaded == LATER
    undisturbed = engine_of(16)
    plain = generate_groups(undisturbed, requests)
    weights_of = {HEAD: first, LATER: second}
    differ = 0
    for request, group, before in zip(requests, groups, plain, strict=True):
        for completion in range(4):
            draw = group[completion]
            assert [span.head_id for span in draw.spans] == [HEAD, LATER]
            cut = draw.spans[1].start
            assert 0 < cut < 24
            assert np.array_equal(draw.ids[:cut], before[completion].ids[:cut])
            differ += not np.array_equal(draw.ids, before[completion].ids)
            check(undisturbed, request, draw, completion, weights_of)
    assert differ > 4, "other weights say other things"


def test_a_completion_changes_its_head_once_at_most(engine_of, folder):
    engine = engine_of(3)
    first = models.weights(folder)
    second, one = changed(first, 1, share=0.3)
    third, two = changed(second, 2, share=0.3)
    luck = np.random.default_rng(5)
    requests = [
        SlotRequest(
            luck.integers(0, 32, 4), luck.bytes(32), 1, dataclasses.replace(ENDLESS, max_tokens=tokens)
        )
        for tokens in (30, 6, 9, 20, 5, 25, 14, 8)
    ]
    draws = {}
    news = at(4, update(HEAD, LATER, second, one), update(LATER, LATEST, third, two))
    for finished in engine.generate(requests, news=news):
        draws[finished.request] = finished.draw
    assert sorted(draws) == list(range(8))
    assert engine.loaded == LATEST
    assert max(len(draw.spans) for draw in draws.values()) == 2
    assert {span.head_id for draw in draws.values() for span in draw.spans} == {HEAD, LATER, LATEST}
    weights_of = {HEAD: first, LATER: second, LATEST: third}
    for place, request in enumerate(requests):
        check(engine, request, draws[place], 0, weights_of)


def test_drained_first_the_running_ones_end_under_their_head_and_the_next_begin_under_the_new(
    engine_of, folder
):
    engine = engine_of(4)
    first = models.weights(folder)
    second, different = changed(first, 1, share=0.3)
    requests = models.requests(12, group_size=2, limits=ENDLESS)
    arrived = []

    def until_news():
        for request in requests:
            if len(arrived) >= 5:
                return
            yield request

    for finished in engine.generate(until_news()):
        arrived.append(finished)  # noqa: PERF402 - the next request depends on what is there already
    assert {span.head_id for each in arrived for span in each.draw.spans} == {HEAD}
    taken = 1 + max(each.request for each in arrived)
    assert len(arrived) == 2 * taken < 24
    engine.patch(update(HEAD, LATER, second, different))
    rest = generate_groups(engine, requests[taken:])
    for request, group in zip(requests[taken:], rest, strict=True):
        for completion, draw in enumerate(group):
            assert draw.spans == (Span(0, LATER),)
            check(engine, request, draw, completion)
