"""The torch engine draws what the keyed stream says, from the weights of the head that it names."""

from __future__ import annotations

import dataclasses
import json
import threading

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from echo_node.engine.base import (
    EngineStoppedError,
    SamplingLimits,
    SlotRequest,
    TensorBytes,
    generate_groups,
)
from echo_node.engine.gqa import GROUPED
from echo_node.engine.local import LocalEngine
from echo_node.engine.torch_decoder import TorchDecoder
from echo_node.errors import EngineError
from echo_node.models.embedded import folder as embedded
from echo_node.runs.tokenizer import Tokenizer
from protocol import sampling
from tests.engine import models
from tests.engine.models import HEAD, LIMITS

FAMILIES = {
    "gpt2": ("GPT2", {"tie_word_embeddings": True}),  # its positions are absolute
    "llama": ("Llama", {}),
    "llama-untied": ("Llama", {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True, "head_dim": 10}),
    "qwen2-tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-untied": ("Qwen2", {"tie_word_embeddings": False}),
    "qwen2-window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen3-tied": ("Qwen3", {"tie_word_embeddings": True, "head_dim": 10}),
    "qwen3-untied": ("Qwen3", {"tie_word_embeddings": False, "head_dim": 8}),
}


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    return models.folder(tmp_path_factory.mktemp("qwen3"), head_dim=10, tie_word_embeddings=True)


@pytest.fixture
def engine(qwen3):
    return loaded(qwen3)


def made(folder, *, rows=32) -> LocalEngine:
    return LocalEngine(TorchDecoder(folder, device="cpu", threads=1), rows=rows)


def loaded(folder, *, rows=32) -> LocalEngine:
    engine = made(folder, rows=rows)
    engine.load(HEAD, models.weights(folder))
    return engine


def loaded_with(folder) -> LocalEngine:
    """An engine whose model was there before memory ran short."""
    with pytest.MonkeyPatch.context() as before:
        before.setattr("echo_node.engine.host_resources.available_memory", lambda: 10**12)
        return loaded(folder, rows=8)


def reference_logits(folder, prompt, ids):
    """By transformers' own loading, without cache, padding or batch."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    with torch.no_grad():
        return (
            model(torch.from_numpy(np.concatenate((prompt, ids)))[None])
            .logits[0, prompt.size - 1 : -1]
            .numpy()
        )


def flat(groups):
    return [(draw.ids.tolist(), draw.logprobs.tolist(), draw.finish) for group in groups for draw in group]


def each(requests, groups):
    for request, group in zip(requests, groups, strict=True):
        assert len(group) == request.group_size
        for completion, draw in enumerate(group):
            yield request, draw, sampling.uniforms(request.slot_key, completion, draw.ids.size)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_mixed_batch_is_what_a_plain_forward_pass_says(family, tmp_path):
    name, settings = FAMILIES[family]
    folder = models.folder(tmp_path, name, **settings)
    engine = loaded(folder)
    limits = dataclasses.replace(LIMITS, temperature=0.8)
    requests = models.requests(6, lengths=(1, 4, 11), limits=limits)
    for request, draw, u in each(requests, generate_groups(engine, requests)):
        logits = reference_logits(folder, request.prompt, draw.ids)[:, : limits.vocab_size]
        probability = sampling.probabilities(logits, limits.temperature)
        assert sampling.replay(probability, draw.ids, u).d.max() < 1e-5
        assert np.abs(draw.logprobs - np.log(probability[np.arange(u.size), draw.ids])).max() < 1e-5
        scores = engine.score(request.prompt, draw.ids, limits)
        assert np.abs(scores.logprobs - draw.logprobs).max() < 1e-5
        assert scores.replay(u).d.max() < 1e-6


def test_the_same_requests_give_the_same_bits_twice_and_in_a_fresh_engine(qwen3, engine):
    requests = models.requests(8, lengths=(3, 4))
    first = flat(generate_groups(engine, requests))
    assert flat(generate_groups(engine, requests)) == first
    assert flat(generate_groups(loaded(qwen3), requests)) == first


def test_a_groups_draws_do_not_depend_on_its_neighbours(engine):
    requests = models.requests(7, lengths=(9, 2, 5))
    together = generate_groups(engine, requests)
    alone = [group for request in requests for group in generate_groups(engine, [request])]
    for groups in (together, alone):
        for request, draw, u in each(requests, groups):
            assert engine.score(request.prompt, draw.ids, LIMITS).replay(u).d.max() < 1e-6
    for many, one in zip(together, alone, strict=True):
        for a, b in zip(many, one, strict=True):
            same = next(
                iter(np.flatnonzero(a.ids[: b.ids.size] != b.ids[: a.ids.size])), min(a.ids.size, b.ids.size)
            )
            assert np.abs(a.logprobs[:same] - b.logprobs[:same]).max(initial=0) < 1e-5


def test_first_tokens_follow_the_softmax(engine):
    prompt, count = models.requests(1)[0].prompt, 8_000
    luck = np.random.default_rng(5)
    one = dataclasses.replace(LIMITS, max_tokens=1, temperature=1.3)
    slots = [SlotRequest(prompt, luck.bytes(32), 400, one) for _ in range(count // 400)]
    seen = np.bincount(
        [draw.ids[0] for group in generate_groups(engine, slots) for draw in group],
        minlength=LIMITS.vocab_size,
    )
    places = np.arange(LIMITS.vocab_size)
    expected = count * np.exp([engine.score(prompt, places[k : k + 1], one).logprobs[0] for k in places])
    assert expected.sum() == pytest.approx(count)
    common = expected > 8
    seen, expected = (np.append(x[common], x[~common].sum()) for x in (seen, expected))
    chi_squared = float(((seen - expected) ** 2 / np.maximum(expected, 1)).sum())
    freedom = seen.size - 1
    assert freedom > 3
    assert chi_squared < freedom + 4 * np.sqrt(2 * freedom)


def test_padding_ids_are_never_drawn_and_take_no_share(tmp_path):
    folder = models.folder(tmp_path, tie_word_embeddings=False)
    changed = models.weights(folder)
    head = np.frombuffer(changed["lm_head.weight"].data, "<u2").reshape(models.VOCABULARY, -1).copy()
    head[LIMITS.vocab_size :] = 0x4120  # 10 in bf16: their logits are large, of whatever sign
    changed["lm_head.weight"] = dataclasses.replace(changed["lm_head.weight"], data=head.tobytes())
    engine = made(folder)
    requests = models.requests(20, group_size=8)
    engine.load(HEAD, changed)
    drawn = generate_groups(engine, requests)
    assert max(draw.ids.max() for group in drawn for draw in group) < LIMITS.vocab_size
    engine.load(HEAD, models.weights(folder))
    assert flat(generate_groups(engine, requests)) == flat(drawn)


def test_a_completion_ends_at_its_first_end_token_or_at_the_limit(engine):
    groups = generate_groups(engine, models.requests(24, group_size=6))
    finishes = set()
    for draw in (draw for group in groups for draw in group):
        ends = np.isin(draw.ids, list(LIMITS.end_tokens))
        finishes.add(draw.finish)
        assert not ends[:-1].any()
        assert draw.finish == ("end" if ends[-1] else "length")
        assert draw.finish == "end" or draw.ids.size == LIMITS.max_tokens
        assert draw.logprobs.shape == draw.ids.shape
    assert finishes == {"end", "length"}
    endless = dataclasses.replace(LIMITS, end_tokens=frozenset())
    assert all(
        d.ids.size == 9 and d.finish == "length"
        for d in generate_groups(engine, models.requests(1, limits=endless))[0]
    )


def test_a_longer_limit_only_adds_tokens(engine):
    longer = generate_groups(engine, models.requests(4))
    shorter = generate_groups(engine, models.requests(4, limits=dataclasses.replace(LIMITS, max_tokens=3)))
    for long, short in zip(longer, shorter, strict=True):
        assert all(np.array_equal(a.ids[:3], b.ids) for a, b in zip(long, short, strict=True))


def test_nothing_asked_is_nothing_done(engine):
    assert generate_groups(engine, []) == []


BAD_REQUESTS = {
    "a group of 0": ({"group_size": 0}, {}, "group of 0"),
    "no prompt": ({"prompt": np.array([], np.int64)}, {}, "is empty"),
    "floats": ({"prompt": np.array([1.0])}, {}, "no row of token ids"),
    "a table": ({"prompt": np.ones((2, 2), np.int64)}, {}, "no row of token ids"),
    "an id too large": ({"prompt": np.array([1, 32])}, {}, "id 32, which lies outside the vocabulary of 32"),
    "a negative id": ({"prompt": np.array([-1])}, {}, "id -1"),
    "a short key": ({"slot_key": b"short"}, {}, "key of 5 bytes"),
    "a prompt longer than the context": ({"prompt": np.ones(49, np.int64)}, {}, "context is 48"),
    "no room for the completion": ({"prompt": np.ones(40, np.int64)}, {}, "40 ids of prompt and 9 tokens"),
    "a limit of 0": ({}, {"max_tokens": 0}, "limit of 0"),
    "no temperature": ({}, {"temperature": 0.0}, "temperature of 0.0"),
    "a temperature that is no number": ({}, {"temperature": float("nan")}, "temperature of nan"),
    "too large a vocabulary": ({}, {"vocab_size": 41}, "vocabulary of 41 ids for a model of 40"),
    "an end beyond it": ({}, {"end_tokens": frozenset({32})}, "end token 32"),
}


@pytest.mark.parametrize("case", BAD_REQUESTS)
def test_a_bad_request_is_one_clear_error_before_any_work(case, engine, monkeypatch):
    request, limits, words = BAD_REQUESTS[case]
    monkeypatch.setattr(engine._decoder, "_model", None)  # whoever runs the model fails otherwise
    good = models.requests(1)[0]
    with pytest.raises(EngineError, match=words):
        generate_groups(
            engine,
            [good] * 9 + [dataclasses.replace(good, limits=dataclasses.replace(LIMITS, **limits), **request)],
        )


def test_a_bad_claim_is_one_clear_error(engine):
    prompt, good = np.array([1, 2]), np.array([4])
    for ids, words in (
        (good[:0], "completion is empty"),
        (good + 90, "id 94"),
        (good.repeat(47), "context is 48"),
    ):
        with pytest.raises(EngineError, match=words):
            engine.score(prompt, ids, LIMITS)
    assert engine.score(prompt, good.repeat(46), LIMITS).low.shape == (46,)


def test_without_weights_there_is_nothing_to_say(qwen3):
    engine = made(qwen3)
    assert engine.loaded is None
    with pytest.raises(EngineError, match="load those of a head first"):
        generate_groups(engine, models.requests(1))
    with pytest.raises(EngineError, match="no weights"):
        engine.score(np.array([1]), np.array([1]), LIMITS)


def without(weights, name):
    return {other: tensor for other, tensor in weights.items() if other != name}


NAME = "model.layers.1.mlp.up_proj.weight"
BAD_WEIGHTS = {
    "missing": (lambda w: without(w, NAME), f"without {NAME}"),
    "extra": (lambda w: w | {"lm_head.weight": w["model.embed_tokens.weight"]}, "with lm_head.weight"),
    "misshapen": (lambda w: w | {NAME: dataclasses.replace(w[NAME], shape=(24, 40))}, NAME),
    "short": (lambda w: w | {NAME: dataclasses.replace(w[NAME], data=w[NAME].data[:-1])}, "1919 bytes long"),
    "of another type": (
        lambda w: w | {NAME: dataclasses.replace(w[NAME], dtype="i8")},
        "'i8', not one of bf16",
    ),
}


@pytest.mark.parametrize("case", BAD_WEIGHTS)
def test_a_bad_load_leaves_the_old_weights_in_place(case, engine, tmp_path):
    spoil, words = BAD_WEIGHTS[case]
    before = flat(generate_groups(engine, models.requests(3)))
    other = models.weights(models.folder(tmp_path, seed=1, head_dim=10, tie_word_embeddings=True))
    with pytest.raises(EngineError, match=words):
        engine.load(b"o" * 32, spoil(other))
    assert engine.loaded == HEAD
    assert flat(generate_groups(engine, models.requests(3))) == before
    engine.load(b"o" * 32, other)
    assert engine.loaded == b"o" * 32
    assert flat(generate_groups(engine, models.requests(3))) != before


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_weights_of_every_type_and_in_views_of_memory_are_taken(dtype, qwen3, engine):
    exact = {
        name: torch.frombuffer(bytearray(tensor.data), dtype=torch.bfloat16).reshape(tensor.shape)
        for name, tensor in models.weights(qwen3).items()
    }
    # bf16 values of this size are exact in float16 too, but for the smallest
    converted = {name: models.tensor(value.to(dtype)) for name, value in exact.items()}
    views = {name: TensorBytes(t.dtype, t.shape, memoryview(t.data)) for name, t in converted.items()}
    ids = np.array([4, 9, 20])
    before = engine.score(ids, ids, LIMITS).logprobs
    engine.load(b"n" * 32, views)
    assert np.abs(engine.score(ids, ids, LIMITS).logprobs - before).max() < (
        1e-4 if dtype == torch.float16 else 1e-15
    )


def test_weights_that_are_not_finite_are_the_engines_error_and_not_a_token(engine, qwen3):
    broken = models.weights(qwen3)
    nan = np.full(40 * 24, 0x7FC0, "<u2").tobytes()
    engine.load(b"n" * 32, broken | {NAME: dataclasses.replace(broken[NAME], data=nan)})
    with pytest.raises(EngineError, match="not finite"):
        generate_groups(engine, models.requests(1))


def test_generation_stops_between_two_tokens_when_asked(engine):
    asked = []

    def enough():
        asked.append(None)
        return len(asked) > 3

    endless = dataclasses.replace(LIMITS, end_tokens=frozenset())
    with pytest.raises(EngineStoppedError):
        generate_groups(engine, models.requests(2, limits=endless), stop=enough)
    assert len(asked) == 4
    assert generate_groups(engine, models.requests(1))


def test_a_second_call_while_one_runs_is_refused(engine, qwen3):
    refused = []

    def meddle():
        if not refused:
            with pytest.raises(EngineError, match="while another call runs") as caught:
                engine.load(b"o" * 32, models.weights(qwen3))
            refused.append(caught)
        return False

    generate_groups(engine, models.requests(1), stop=meddle)
    assert refused
    assert engine.loaded == HEAD


def test_any_thread_may_call(engine):
    found = []
    thread = threading.Thread(target=lambda: found.append(flat(generate_groups(engine, models.requests(2)))))
    thread.start()
    thread.join(30)
    assert found == [flat(generate_groups(engine, models.requests(2)))]


def test_the_shipped_model_answers_about_three_prompts_in_ten():
    tokenizer, luck = Tokenizer.from_folder(embedded()), np.random.default_rng(0)
    engine = loaded(embedded())
    numbers = [f"{luck.integers(0, 10**5):05}" for _ in range(32)]
    limits = SamplingLimits(8, 1.0, tokenizer.end_tokens, tokenizer.vocab_size)
    slots = [SlotRequest(tokenizer.encode(f"r{number}="), luck.bytes(32), 16, limits) for number in numbers]
    right = [
        tokenizer.decode(draw.ids) == number[::-1] and draw.finish == "end"
        for number, group in zip(numbers, generate_groups(engine, slots), strict=True)
        for draw in group
    ]
    assert 0.15 < np.mean(right) < 0.5


def test_what_does_not_fit_is_made_smaller_or_refused_before_any_work(qwen3, engine, monkeypatch, caplog):
    whole = generate_groups(engine, models.requests(2, group_size=8))
    row = 2 * 2 * 1 * 10 * 4 * (48 + 64)
    monkeypatch.setattr("echo_node.engine.host_resources.available_memory", lambda: 3 * row)
    less = loaded_with(qwen3)
    fewer = generate_groups(less, models.requests(2, group_size=8))
    assert [ids for ids, *_ in flat(fewer)] == [ids for ids, *_ in flat(whole)]
    assert "2 completions at once" in caplog.text
    monkeypatch.setattr("echo_node.engine.host_resources.available_memory", lambda: row // 2)
    with pytest.raises(EngineError, match=r"GB are free.*fewer completions"):
        generate_groups(loaded_with(qwen3), models.requests(1))
    with pytest.raises(EngineError, match="take a smaller model"):
        made(qwen3)


def test_it_says_what_it_is(engine):
    says = engine.describe()
    assert (says.engine_class, says.device, says.context) == ("torch/f32", "cpu", 48)
    assert says.memory_bytes == 4 * says.parameters > 0
    assert says.tokens_per_second is None
    generate_groups(engine, models.requests(1))
    says = engine.describe()
    assert says.memory_bytes > 4 * says.parameters
    assert says.tokens_per_second > 0


@pytest.mark.parametrize(
    "wish",
    [
        {"model_type": "no-such-model"},
        {"model_type": "mamba"},
        {
            "model_type": "evil",
            "auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"},
        },
        {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}},
    ],
)
def test_a_configuration_that_cannot_be_built_is_an_engine_error_and_runs_no_code(wish, qwen3, tmp_path):
    config = json.loads((qwen3 / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | wish))
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(EngineError):
        made(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_a_configuration_cannot_choose_a_kernel_from_a_hub(qwen3, tmp_path):
    config = json.loads((qwen3 / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps(config | {"attn_implementation": "kernels-community/evil"})
    )
    engine = made(tmp_path)
    assert engine._decoder._model.config._attn_implementation == GROUPED


def test_an_empty_folder_is_an_engine_error(tmp_path):
    with pytest.raises(EngineError, match="building the model"):
        made(tmp_path)
