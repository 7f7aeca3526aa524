"""Calibration: honest evidence is within the proposed tolerance, forged evidence mostly not."""

from __future__ import annotations

import dataclasses
import json
import shutil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_node.engine.engine_classes import EngineSpec, make_engine
from echo_node.errors import ConfigError
from echo_node.models import embedded
from echo_node.verifier.calibration import LEAST, WIDE_SHARE, Task, calibrate, draw, propose
from echo_node.verifier.evidence import Evidence, GapSum
from echo_node.verifier.tolerance import WIDE, Tolerance
from echo_node.weights.open_store import read_folder
from protocol.manifest import EngineTolerance
from protocol.sampling import uniforms
from protocol.wire import of

HEAD = b"h" * 32


def engine(engine_class):
    made = make_engine(EngineSpec(engine_class, embedded.folder(), "cpu", 16, 2))
    made.load(HEAD, read_folder(embedded.folder()))
    return made


@pytest.fixture(scope="module")
def task():
    return Task.of(embedded.folder(), completions=30, tokens=24, temperature=1.0)


@pytest.fixture(scope="module")
def judge():
    made = engine("torch/f32")
    yield made
    made.close()


def calibrated(engine_class, task, judge):
    sampler = engine(engine_class)
    steps = []
    drawn = draw(sampler, task, lambda *step: steps.append(step))
    sampler.close()
    assert steps == [(n, steps[-1][1]) for n in range(1, steps[-1][1] + 1)], (
        "each completion is told of, up to all"
    )
    looked = []
    found = calibrate(judge, drawn, task.limits, lambda *step: looked.append(step))
    assert looked[-1][0] == looked[-1][1]
    return drawn, found


# Real engines


@pytest.fixture(scope="module")
def narrow(task, judge):
    return calibrated("llama/f16", task, judge)


def test_honest_draws_lie_within_the_proposed_bands_alone_and_together(narrow):
    drawn, found = narrow
    bands = Tolerance(found.tolerance)
    assert found.tolerance.engine == drawn.engine_class == "llama/f16"
    assert len(found.honest) == 30
    assert all(bands.breach(each) is None for each in found.honest)
    assert bands.breach(sum(found.honest, Evidence())) is None
    assert found.refused == 0


def test_an_engine_that_rounds_otherwise_is_seen_in_its_log_probabilities(narrow):
    together = sum(narrow[1].honest, Evidence())
    assert 1e-5 < together.gap_mean < 0.05


def test_forgers_are_told_apart_by_their_tokens_alone(narrow):
    _, found = narrow
    assert list(found.forged) == ["own luck", "T×0.9", "T×1.1", "edited"]
    assert {len(several) for several in found.forged.values()} == {8}
    assert all(each.gap_sum == 0 for several in found.forged.values() for each in several)
    assert found.caught["own luck"] >= 0.5
    assert found.caught["edited"] == 1.0
    for several in found.forged.values():
        assert Tolerance(found.tolerance).breach(sum(several, Evidence())) is not None


def test_editors_change_one_token_in_sixteen_and_luck_is_another_slots(narrow):
    drawn, _ = narrow
    for honest, edited, lucky in zip(
        drawn.honest, drawn.forged["edited"], drawn.forged["own luck"], strict=False
    ):
        assert np.count_nonzero(honest.ids != edited.ids) == max(1, round(honest.ids.size / 16))
        assert np.array_equal(honest.ids, lucky.ids)
        assert not np.any(honest.luck == lucky.luck)


def test_the_judges_own_class_needs_no_more_than_the_narrowest_bands(task, judge):
    drawn = draw(judge, task, lambda *_: None)
    found = calibrate(judge, drawn, task.limits, lambda *_: None)
    assert found.tolerance == LEAST


def test_claims_carry_the_luck_of_their_own_slot_and_completion(task, narrow):
    first = task.requests[0]
    for place, claim in enumerate(narrow[0].honest[: first.group_size]):
        assert np.array_equal(claim.luck, uniforms(first.slot_key, place, claim.ids.size))
        assert np.array_equal(claim.prompt, first.prompt)


@pytest.mark.slow
def test_a_wide_class_is_contrasted_with_other_temperatures_and_gets_a_smaller_share(judge):
    """Other weight values under the same name: an engine far off without being forged."""
    task = Task.of(embedded.folder(), completions=16, tokens=24, temperature=1.0)
    sampler = engine("torch/f32")
    weights = {name: _shaken(tensor) for name, tensor in read_folder(embedded.folder()).items()}
    sampler.load(HEAD, weights)
    found = calibrate(judge, draw(sampler, task, lambda *_: None), task.limits, lambda *_: None)
    sampler.close()
    assert found.tolerance.d_mean > WIDE
    assert found.tolerance.share == WIDE_SHARE
    assert any(each.contrast_sum for each in found.honest)
    assert all(Tolerance(found.tolerance).breach(each) is None for each in found.honest)
    assert found.caught["T×0.9"] < 1


def _shaken(tensor):
    """The last bits of a bf16's fraction are noise."""
    words = np.frombuffer(tensor.data, "<u2")
    noise = np.random.default_rng(words.size).integers(0, 16, words.size, dtype=np.uint16)
    return dataclasses.replace(tensor, data=(words ^ noise).astype("<u2").tobytes())


# Tasks


def test_a_model_that_reads_no_prose_is_asked_in_random_ids_that_fit(task):
    assert not task.prose
    assert sum(request.group_size for request in task.requests) == 30
    assert len({request.slot_key for request in task.requests}) == len(task.requests)
    assert all(request.prompt.size + 24 <= 64 and request.prompt.max() < 16 for request in task.requests)
    short = Task.of(embedded.folder(), completions=4, tokens=5000, temperature=1.0)
    assert short.limits.max_tokens + short.requests[0].prompt.size <= 64
    assert short.limits.end_tokens == {12}


def test_a_model_with_words_is_asked_in_prose(tmp_path):
    import tokenizers
    from tokenizers import models, pre_tokenizers

    folder = tmp_path / "model"
    folder.mkdir()
    words = tokenizers.Tokenizer(models.BPE({chr(n): n - 32 for n in range(32, 127)}, []))
    words.pre_tokenizer = pre_tokenizers.Split(" ", "isolated")
    words.save(str(folder / "tokenizer.json"))
    config = {"vocab_size": 100, "max_position_embeddings": 512, "eos_token_id": [3, 4]}
    (folder / "config.json").write_text(json.dumps(config))
    task = Task.of(folder, completions=300, tokens=64, temperature=0.7)
    assert task.prose
    text = "".join(chr(32 + token) for token in task.requests[0].prompt)
    assert text == "Write about the sea."
    assert task.limits.end_tokens == {3, 4}
    (folder / "tokenizer.json").unlink()
    assert not Task.of(folder, completions=4, tokens=64, temperature=0.7).prose


def test_a_folder_that_is_no_model_is_the_persons_mistake(tmp_path):
    with pytest.raises(ConfigError, match=r"config\.json"):
        Task.of(tmp_path, completions=4, tokens=8, temperature=1.0)
    shutil.copy(embedded.folder() / "config.json", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"max_position_embeddings": 8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="leaves no room for a completion"):
        Task.of(tmp_path, completions=4, tokens=8, temperature=1.0)


# Proposals

DISTANCES = st.floats(0, 0.3)


@st.composite
def few_gaps(draw_, most):
    """Gaps of some of the tokens, of any bias."""
    tokens = draw_(st.integers(0, most))
    absolute = tokens * draw_(st.floats(0, 5))
    return GapSum(tokens, absolute * draw_(st.floats(-1, 1)), absolute)


@st.composite
def pieces(draw_):
    tokens = draw_(st.integers(1, 300))
    d_mean, z_mean = draw_(DISTANCES), draw_(st.floats(0, 50))
    return Evidence(
        tokens=tokens,
        d_sum=d_mean * tokens,
        d_most=min(1.0, d_mean * draw_(st.floats(1, 3))),
        z_sum=z_mean * tokens,
        z_most=z_mean * draw_(st.floats(1, 9)),
        gap_sum=draw_(st.floats(0, 5)) * tokens,
        contrast_sum=draw_(st.floats(-0.3, 0.1)) * tokens,
        gap_most=draw_(st.floats(0, 20)),
        ends=draw_(few_gaps(tokens)),
        rare=draw_(few_gaps(tokens)),
    )


@given(st.lists(pieces(), min_size=1, max_size=12))
def test_whatever_was_honest_is_within_what_is_proposed_and_a_manifest_can_say_it(honest):
    told = propose("llama/f16", honest)
    wire = of(EngineTolerance)
    assert wire.load(wire.dump(told)) == told
    bands = Tolerance(told)
    for each in (*honest, sum(honest, Evidence())):
        assert bands.breach(each) is None


def test_a_proposal_keeps_its_margins_over_the_worst():
    usual = Evidence(tokens=64, d_sum=64 * 1e-4, d_most=0.002, z_sum=64 * 2e-3, z_most=0.03)
    calm = dataclasses.replace(usual, d_sum=0.0, z_sum=0.0, d_most=0.0, z_most=0.0)
    assert propose("llama/f16", [calm, usual, calm]) == EngineTolerance(
        d_mean=2e-4,
        d_most=6e-3,
        engine="llama/f16",
        gap_most=2e-3,
        share=1.0,
        z_mean=4e-3,
        z_most=0.09,
    )


def test_a_short_completion_is_measured_as_if_it_were_of_sixty_four_tokens():
    short = Evidence(tokens=16, d_sum=16 * 1.6e-4, d_most=1e-3, z_sum=0.0, z_most=0.0)
    many = [Evidence(tokens=64)] * 50  # so that the sum of all is calm
    assert propose("llama/f16", [short, *many]).d_mean == pytest.approx(
        2 * 1.6e-4 / Tolerance.scale(16), rel=0.05
    )
