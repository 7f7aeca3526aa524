"""Every family: trainer, engines and a plain eager forward pass agree, before and after a delta."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from echo_node.engine.base import Claim, SamplingLimits, generate_groups
from echo_node.engine.llama_decoder import LlamaDecoder
from echo_node.engine.local import LocalEngine
from echo_node.engine.torch_decoder import TorchDecoder
from echo_node.errors import EngineError
from echo_node.models.families import FAMILIES, check_family, read_config
from echo_node.runs.algorithm import StepSettings
from echo_node.trainer import tree_attention
from echo_node.trainer.step import TrainStep
from echo_node.trainer.tree_packing import TrainingGroup, pack
from tests.engine import models
from tests.engine.deltas import Training
from tests.families import zoo
from tests.records import columns

CPU = torch.device("cpu")
LIMITS = SamplingLimits(
    max_tokens=24, temperature=0.9, end_tokens=frozenset({3}), vocab_size=zoo.VOCABULARY - 5
)
EXACT = 1e-4
"""Largest gap between two log-probabilities that are both computed in float32."""
CLOSE = {"f16": 0.006, "bf16": 0.03, "q8_0": 0.12}
"""Mean gap between log-probabilities, as a part of their spread, per type of weights."""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    known = {}

    def make(name, **changes):
        key = (name, *sorted(changes))
        if key not in known:
            known[key] = zoo.make(tmp_path_factory.mktemp("model"), name, **changes)
        return known[key]

    return make


def eager(folder, **settings):
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", **settings
    )
    return model.eval()


def plain_log_probs(model, prompt, ids, limits=LIMITS):
    """All log-probabilities at each token of a completion, without any packing."""
    whole = torch.from_numpy(np.concatenate((prompt, ids)))[None]
    logits = model(whole).logits[0, len(prompt) - 1 : -1, : limits.vocab_size]
    return torch.log_softmax(logits / limits.temperature, dim=-1)


def tree_group(seed=0):
    """A prompt longer than every window; completions that branch early, late, or end at once."""
    draws = np.random.default_rng(seed)
    trunk = draws.integers(0, LIMITS.vocab_size, 26)
    completions = []
    for shared, length in ((0, 26), (4, 20), (13, 26), (25, 26), (13, 14), (0, 1)):
        ids = draws.integers(0, LIMITS.vocab_size, length)
        ids[: min(shared, length)] = trunk[: min(shared, length)]
        completions.append((ids, np.full(length, -3.0), draws.random()))
    return TrainingGroup(draws.integers(0, LIMITS.vocab_size, 11), *columns(completions))


def new_step(folder, **settings):
    own = {"temperature": LIMITS.temperature, "vocab_size": LIMITS.vocab_size, **settings}
    return TrainStep(folder, StepSettings(**own), threads=1, device="cpu")


def test_the_zoo_has_every_family(made):
    assert {check_family(read_config(made(name))).name for name in zoo.MODELS} == set(FAMILIES)


@pytest.mark.parametrize(("piece", "way"), [(10_000, "dense"), (7, "blocks")])
@pytest.mark.parametrize("name", zoo.MODELS)
def test_the_trainers_log_probabilities_and_gradients_are_those_of_an_eager_forward(
    made, name, piece, way, monkeypatch
):
    folder, group = made(name), tree_group()
    if way != "dense":
        monkeypatch.setattr(tree_attention, "DENSE", 0)
        monkeypatch.setattr(tree_attention, "BLOCK", 16)
    step, plain = new_step(folder), eager(folder)
    step._policy.head.piece = piece
    (row,) = step._rows(group)
    log_probs, entropies = step._policy(pack([row], CPU))
    wanted, spread = [], []
    for ids in group.ids:
        every = plain_log_probs(plain, group.prompt_ids, ids)
        wanted.append(every.gather(1, torch.from_numpy(ids)[:, None])[:, 0])
        spread.append(-(every.exp() * every).sum(dim=1))
    for place, own in enumerate(wanted):
        torch.testing.assert_close(log_probs[place, : len(own)], own, rtol=0, atol=EXACT)
        torch.testing.assert_close(entropies[place, : len(own)], spread[place], rtol=0, atol=EXACT)
    weights = torch.linspace(-1, 1, log_probs.shape[1])
    (log_probs * weights + 0.1 * entropies).sum().backward()
    sum(
        (own * weights[: len(own)] + 0.1 * far).sum() for own, far in zip(wanted, spread, strict=True)
    ).backward()
    for own, weight in plain.named_parameters():
        gradient = step._weights[own].grad
        largest = weight.grad.abs().max()
        assert largest > 0
        torch.testing.assert_close(gradient, weight.grad, rtol=0, atol=float(1e-4 * largest + 1e-6))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("name", zoo.MODELS)
@torch.no_grad()
def test_flex_attention_gives_the_log_probabilities_of_an_eager_forward(made, name, monkeypatch):
    """As on CUDA, but not compiled; on a CPU torch has no backward pass for it."""
    monkeypatch.setattr(tree_attention, "DENSE", 0)
    monkeypatch.setattr(tree_attention, "FLEX_DEVICES", ("cpu",))
    folder, group = made(name), tree_group()
    found, plain = new_step(folder).log_probs(group), eager(folder)
    for own, ids in zip(found, group.ids, strict=True):
        every = plain_log_probs(plain, group.prompt_ids, ids)
        wanted = every.gather(1, torch.from_numpy(ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.from_numpy(own), wanted, rtol=0, atol=EXACT)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("mistral, window", {"sliding_window": None}),
        ("phi3, window", {"sliding_window": None}),
        ("qwen2, windows", {"sliding_window": 90}),
        ("gemma2", {"sliding_window": 90}),
        ("gemma2", {"attn_logit_softcapping": None}),
        ("gemma2", {"final_logit_softcapping": None}),
        ("gemma3_text", {"sliding_window": 90}),
        ("gemma3_text", {"final_logit_softcapping": None}),
        ("granite", {"logits_scaling": 1.0}),
    ],
)
def test_windows_soft_caps_and_scales_of_the_zoo_bite(made, name, change):
    folder, group = made(name), tree_group()
    ids = group.ids[0]
    with torch.no_grad():
        with_it, without = (
            plain_log_probs(eager(folder, **settings), group.prompt_ids, ids) for settings in ({}, change)
        )
    assert (with_it - without).abs().max() > 0.2


def drawn_and_scored(engine, plain, exact):
    """Draw groups, score them, and compare both with the eager forward pass."""
    requests = models.requests(3, group_size=3, lengths=(2, 9, 17), limits=LIMITS)
    for request, group in zip(requests, generate_groups(engine, requests), strict=True):
        scored = engine.score_many([Claim(request.prompt, draw.ids) for draw in group], LIMITS)
        for draw, scores in zip(group, scored, strict=True):
            with torch.no_grad():
                every = plain_log_probs(plain, request.prompt, draw.ids).numpy()
            own = every[np.arange(draw.ids.size), draw.ids]
            assert exact(draw.logprobs, own, every)
            assert exact(scores.logprobs, own, every)


@pytest.mark.parametrize("name", zoo.MODELS)
def test_the_torch_engine_draws_and_scores_as_an_eager_forward_before_and_after_a_delta(made, name):
    folder = made(name)
    training = Training(models.weights(folder))
    decoder = TorchDecoder(folder, device="cpu", threads=1)
    engine = LocalEngine(decoder, rows=8)
    engine.load(models.HEAD, training.weights())

    def exact(ours, own, _):
        return np.abs(ours - own).max() < EXACT

    drawn_and_scored(engine, eager(folder), exact)
    for _ in range(20):
        decoder.put(training.step(decoder.granule))
    drawn_and_scored(engine, changed(folder, training), exact)


def changed(folder, training):
    """An eager model with the weights as they are after some training."""
    model, state = eager(folder), training.weights()
    with torch.no_grad():
        for own, weight in model.named_parameters():
            if own in state:
                bits = np.frombuffer(state[own].data, np.int16).copy()
                weight.copy_(torch.from_numpy(bits).view(torch.bfloat16).view(weight.shape))
    return model


@pytest.mark.parametrize("kind", ["f32", *CLOSE])
@pytest.mark.parametrize("name", zoo.MODELS)
def test_llama_cpp_draws_and_scores_as_an_eager_forward_or_refuses_by_name(made, name, kind):
    folder = made(name)
    refused = zoo.REFUSED_BY_LLAMA.get(name) or (zoo.REFUSED_AS_F32.get(name) if kind == "f32" else None)
    if refused:
        with pytest.raises(EngineError, match=refused) as refusal:
            LlamaDecoder(folder, kind=kind)
        assert "torch" in refusal.value.advice
        return
    training = Training(models.weights(folder))
    decoder = LlamaDecoder(folder, kind=kind, threads=1)
    engine = LocalEngine(decoder, rows=8)
    engine.load(models.HEAD, training.weights())
    gaps = []

    def close(ours, own, every):
        if kind == "f32":
            return np.abs(ours - own).max() < EXACT
        gaps.append((np.abs(ours - own).mean(), every.std()))
        return True

    try:
        for _ in range(2):
            assert decoder.context == (9 if name == "phi3, window" else 96)
            limits = dataclasses.replace(LIMITS, max_tokens=min(LIMITS.max_tokens, decoder.context - 2))
            requests = models.requests(3, group_size=3, lengths=(2,), limits=limits)
            plain = changed(folder, training)
            if decoder.context == 96:
                drawn_and_scored(engine, plain, close)
            for request, group in zip(requests, generate_groups(engine, requests), strict=True):
                for draw in group:
                    with torch.no_grad():
                        every = plain_log_probs(plain, request.prompt, draw.ids).numpy()
                    assert close(draw.logprobs, every[np.arange(draw.ids.size), draw.ids], every)
            for _ in range(20):
                decoder.put(training.step(decoder.granule))
    finally:
        engine.close()
    if gaps:
        gap, spread = np.mean(gaps, axis=0)
        assert gap < CLOSE[kind] * spread
