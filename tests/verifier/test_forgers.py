"""Every forger meets the verifier, on the embedded model here and on SmolLM2 in the slow form."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from benchmarks.forgers import COUNTED_SLOWLY, FORGERS
from benchmarks.forgers_stage import OTHER, SAMPLER, Stage
from echo_node.models import embedded
from protocol import Envelope, TrajectoryGroup
from tests import smollm2

REASONS = {
    "replayed": {"wrong-prompt"},
    "wrong prompt": {"wrong-prompt"},
    "false reward": {"wrong-reward"},
    "wrong finish": {"malformed"},
    "made-up log-probabilities": {"wrong-logprobs"},
    "log-probabilities of zero": {"wrong-logprobs"},
    "q4 as f16": {"token-out-of-reach", "luck-not-its-own", "wrong-logprobs"},
}
REPLAY = {"token-out-of-reach", "luck-not-its-own"}
REASONS["wrong model"] = REPLAY | {"wrong-logprobs"}  # whose log-probabilities are its own
REASONS["edited"] = REPLAY | {"malformed"}  # where the only token was its end
AT_ONCE = [name for name in FORGERS if name not in COUNTED_SLOWLY]


@pytest.fixture(scope="module")
def small():
    stage = Stage(embedded.folder(), max_tokens=6, group_size=8, threads=1)
    yield stage
    stage.close()


@pytest.fixture(scope="module")
def real():
    stage = Stage(smollm2.folder(), max_tokens=64, group_size=4)
    yield stage
    stage.close()


def verdicts(stage, forge, slots):
    found = []
    for slot in slots:
        stage.admission = stage.fresh_admission()
        found.append(stage.verify(forge(stage, slot)))
    return found


def honest(stage, slot):
    return stage.group(slot, stage.draws(slot))


def test_the_honest_are_never_refused(small):
    assert verdicts(small, honest, range(60)) == [None] * 60


def is_forged(stage, forge, slot):
    """Whether a group differs from the honest one in more than one completion.

    In rare slots a forger's rule changes nothing, or one token to its neighbour in the draw.
    """
    ours, theirs = (
        Envelope.parse(each(stage, slot)).claim(TrajectoryGroup, stage.run.id) for each in (honest, forge)
    )
    pairs = list(zip(ours.completions(), theirs.completions(), strict=True))
    others = sum(not np.array_equal(our.ids, their.ids) for our, their in pairs)
    if others and ours.prompt == theirs.prompt:
        return others > 1
    return (ours.prompt, ours.finish, ours.rewards, ours.heads) != (
        theirs.prompt,
        theirs.finish,
        theirs.rewards,
        theirs.heads,
    ) or not all(np.allclose(our.logprobs, their.logprobs, atol=0.01) for our, their in pairs)


@pytest.mark.parametrize("name", AT_ONCE)
def test_a_forger_is_found_out_by_its_first_group(name, small):
    slots = itertools.islice((slot for slot in range(60) if is_forged(small, FORGERS[name], slot)), 6)
    found = verdicts(small, FORGERS[name], list(slots))
    assert len(found) == 6
    assert set(found) <= REASONS.get(name, REPLAY), found


def test_what_was_honestly_drawn_under_another_name_is_not_its_own(small):
    """The same draws pass under the name of whom they belong to."""
    draws = small.drawn_for(small.request(3, sampler=OTHER))
    assert verdicts(small, lambda stage, slot: stage.group(slot, draws, sampler=OTHER), [3]) == [None]
    assert set(verdicts(small, lambda stage, slot: stage.group(slot, draws, sampler=SAMPLER), [3])) <= REPLAY


def test_no_reward_is_computed_for_what_was_not_honestly_drawn(small, monkeypatch):
    forged = [small.admit(FORGERS["own luck"](small, slot)) for slot in range(3)]
    scored = []
    monkeypatch.setattr(type(small.run), "results", lambda *_: scored.append(1))
    assert all(small.find(group).breach for group in forged)
    assert not scored


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_on_smollm2_the_honest_are_never_refused(real):
    assert verdicts(real, honest, range(50)) == [None] * 50


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", AT_ONCE)
def test_on_smollm2_a_forger_is_found_out_by_its_first_group(name, real):
    found = verdicts(real, FORGERS[name], range(3))
    assert set(found) <= REASONS.get(name, REPLAY), found


def test_nobody_is_condemned_where_the_contract_fails_here(small, monkeypatch):
    from echo_node.contract.jail.worker import Failed

    admitted = small.admit(honest(small, 1))
    monkeypatch.setattr(
        type(small.run), "results", lambda _run, _prompt, rows: [Failed("it took too long")] * len(rows)
    )
    breach = small.find(admitted).breach
    assert (breach.reason, breach.sure) == ("not-scored", False)
