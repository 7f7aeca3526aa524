"""Distance of each engine class from a torch prefill in float32, on SmolLM2, as measured.

Tokens of honest engines differ in the dense tail of the vocabulary, so distances are compared and
never texts.
"""

from __future__ import annotations

import json
from typing import NamedTuple

import numpy as np
import pytest

from echo_node.engine.base import SamplingLimits, SlotRequest
from echo_node.engine.engine_classes import EngineSpec, make_engine
from echo_node.runs.tokenizer import Tokenizer
from echo_node.weights.open_store import read_folder
from protocol.sampling import uniforms
from tests import smollm2

HEAD = b"h" * 32
TOKENS = 64
SLACK = 1.5


class Distance(NamedTuple):
    """Distances of an engine class: mean and 99th percentile.

    Of |Δ log-probability| over tokens, and of a completion's mean replay distance.
    """

    gap: float
    gap_p99: float
    d: float
    d_p99: float


MEASURED = {
    "llama/f32": Distance(8e-6, 2e-5, 1e-6, 1e-5),
    "llama/f16": Distance(0.002, 0.013, 2e-5, 7e-5),
    "llama/bf16": Distance(0.013, 0.065, 2e-4, 8e-4),
    "llama/q8_0": Distance(0.067, 0.35, 0.0022, 0.0064),
}
TOPICS = (
    *("the sea", "a lost key", "why bread rises", "the moon", "two brothers", "a train that is late"),
    *("how to plant a tree", "winter", "the number seven", "an honest thief", "what a river knows", "salt"),
    *("a letter never sent", "bees", "learning to swim", "the first telescope", "rain on a tin roof"),
    *("a chess game", "mountains", "the baker's daughter", "clocks", "a city at night", "old maps"),
    *("friendship", "the smell of coffee"),
)


@pytest.fixture(scope="module")
def smol():
    folder = smollm2.folder()
    return folder, read_folder(folder), Tokenizer.from_folder(folder)


def slots(tokenizer, prompts, group_size):
    vocabulary = tokenizer.vocab_size
    limits = SamplingLimits(TOKENS, 1.0, frozenset(tokenizer.end_tokens), vocabulary)
    luck = np.random.default_rng(11)
    return [
        SlotRequest(
            tokenizer.encode(f"<|im_start|>user\nWrite about {topic}.<|im_end|>\n<|im_start|>assistant\n"),
            luck.bytes(32),
            group_size,
            limits,
        )
        for topic in TOPICS[:prompts]
    ]


def distance(engine_class, smol, requests):
    folder, weights, _ = smol
    sampler = make_engine(EngineSpec(engine_class, folder, "cpu", 16, 2))
    sampler.load(HEAD, weights)
    finished = list(sampler.generate(requests))
    sampler.close()
    judge = make_engine(EngineSpec("torch/f32", folder, "cpu", 1, 2))
    judge.load(HEAD, weights)
    gaps, means = [], []
    for each in finished:
        request = requests[each.request]
        scores = judge.score(request.prompt, each.draw.ids, request.limits)
        gaps.append(np.abs(scores.logprobs - each.draw.logprobs))
        luck = uniforms(request.slot_key, each.completion, each.draw.ids.size)
        means.append(scores.replay(luck).d.mean())
    judge.close()
    flat = np.concatenate(gaps)
    return Distance(flat.mean(), np.percentile(flat, 99), np.mean(means), np.percentile(means, 99))


def check(engine_class, found):
    measured = MEASURED[engine_class]
    print(
        json.dumps({engine_class: {name: float(f"{value:.3g}") for name, value in found._asdict().items()}})
    )
    for name, value, known in zip(Distance._fields, found, measured, strict=True):
        assert value <= SLACK * known, f"{name} of {engine_class} is {value:.3g}, measured was {known:.3g}"


@pytest.mark.timeout(600)
def test_a_few_completions_of_the_default_class_are_as_close_as_measured(smol):
    found = distance("llama/f16", smol, slots(smol[2], prompts=2, group_size=4))
    check("llama/f16", found)
    assert found.gap > 0, "two engines, not one"


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("engine_class", MEASURED)
def test_two_hundred_completions_are_as_close_as_measured(engine_class, smol):
    requests = slots(smol[2], prompts=25, group_size=8)
    check(engine_class, distance(engine_class, smol, requests))
