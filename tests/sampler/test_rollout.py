"""Rollouts on the embedded model: what is sealed is what was drawn, and can be replayed."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from echo_node.contract.builtin.digits_reverse import DigitsReverse
from echo_node.engine.base import EngineStoppedError, never
from echo_node.engine.local import LocalEngine
from echo_node.engine.torch_decoder import TorchDecoder
from echo_node.errors import ContractError, EngineError
from echo_node.models import embedded
from echo_node.rollouts.admission import Admission
from echo_node.rollouts.record import RolloutRecord
from echo_node.runs.run import read_model
from echo_node.sampler.rollout import Rollout
from protocol import Envelope, TrajectoryGroup, open_sealed, sampling
from tests.crafting import SAMPLERS, Chain, open_run, roster

RUN = open_run(group_size=4)
HEAD = Chain(RUN).next(*SAMPLERS)
ANN, BOB = SAMPLERS[:2]


@pytest.fixture(scope="module")
def engine():
    torch.set_num_threads(1)
    made = LocalEngine(TorchDecoder(embedded.folder(), device="cpu"))
    made.load(HEAD.id, read_model(embedded.folder()))
    return made


@pytest.fixture(scope="module")
def rollout(engine):
    return Rollout(RUN, ANN, engine)


def sealed_by(rollout, slots, head=HEAD):
    return [group.sealed for group in rollout.fill(head, slots, never)]


@pytest.fixture(scope="module")
def sealed(rollout):
    return sealed_by(rollout, range(6))


@pytest.fixture(scope="module")
def groups(sealed):
    return [open_sealed(one, TrajectoryGroup, RUN.id, signer=ANN.public).message for one in sealed]


def test_each_slot_gets_a_sealed_group_in_the_order_in_which_it_was_asked_for(rollout, groups):
    assert [group.slot for group in groups] == list(range(6))
    assert {group.heads for group in groups} == {(HEAD.id,)}
    assert {group.engine for group in groups} == {"torch/f32"}
    assert {len(group.lengths) for group in groups} == {4}
    turned = [open_sealed(one, TrajectoryGroup, RUN.id).message for one in sealed_by(rollout, [5, 0])]
    assert [group.slot for group in turned] == [5, 0]


def test_the_record_of_a_group_says_what_its_sealed_bytes_say(rollout):
    for group in rollout.fill(HEAD, range(2), never):
        opened = open_sealed(group.sealed, TrajectoryGroup, RUN.id, signer=ANN.public)
        assert (group.id, group.sampler, group.message) == (opened.id, opened.signer, opened.message)
        assert (group.head, group.slot, group.step) == (HEAD.id, opened.message.slot, HEAD.message.step)


def test_what_a_sampler_seals_the_trainer_admits(sealed):
    admission = Admission(RUN)
    admission.published(HEAD, roster(*SAMPLERS))
    assert all(isinstance(admission.judge(Envelope.parse(one)), RolloutRecord) for one in sealed)


def test_the_prompt_is_that_of_the_slot_and_rewards_are_what_the_contract_says(groups):
    for group in groups:
        prompt, ids = RUN.prompt(RUN.slot_key(HEAD.id, ANN.public, group.slot))
        assert np.array_equal(group.prompt_ids(), ids)
        for completion in group.completions():
            assert completion.reward == RUN.score(prompt, completion.ids).value
    rewards = [reward for group in groups for reward in group.rewards]
    assert 0 < sum(rewards) < len(rewards), "the model is half taught"


def test_every_token_is_the_one_that_the_slots_luck_draws(engine, groups):
    for group in groups:
        key = RUN.slot_key(HEAD.id, ANN.public, group.slot)
        for index, completion in enumerate(group.completions()):
            scores = engine.score(group.prompt_ids(), completion.ids, RUN.limits)
            luck = sampling.uniforms(key, index, len(completion.ids))
            assert scores.replay(luck).d.max() < 1e-5
            assert np.abs(scores.logprobs - completion.logprobs).max() < 1e-4


def test_the_same_slots_give_the_same_groups_alone_or_together(rollout, groups, sealed):
    assert sealed_by(rollout, range(6)) == sealed
    for slot in (0, 3):
        (alone,) = sealed_by(rollout, [slot])
        group = open_sealed(alone, TrajectoryGroup, RUN.id).message
        assert (group.tokens, group.prompt, group.rewards) == (
            groups[slot].tokens,
            groups[slot].prompt,
            groups[slot].rewards,
        )


def test_another_sampler_or_another_head_draws_other_luck(engine, groups):
    for identity, head in ((BOB, HEAD), (ANN, dataclasses.replace(HEAD, id=b"?" * 32))):
        engine.load(head.id, read_model(embedded.folder()))
        other = [
            open_sealed(one, TrajectoryGroup, RUN.id).message
            for one in sealed_by(Rollout(RUN, identity, engine), range(6), head)
        ]
        engine.load(HEAD.id, read_model(embedded.folder()))
        assert [group.prompt for group in other] != [group.prompt for group in groups]
        assert [group.tokens for group in other] != [group.tokens for group in groups]


def test_no_slots_are_no_groups(rollout):
    assert rollout.fill(HEAD, [], never) == []


def test_when_asked_to_stop_nothing_comes_out_and_the_engine_is_as_good_as_before(rollout, sealed):
    asked = []

    def after_two_tokens():
        asked.append(1)
        return len(asked) > 2

    with pytest.raises(EngineStoppedError):
        rollout.fill(HEAD, range(6), after_two_tokens)
    assert sealed_by(rollout, range(6)) == sealed


def test_without_weights_nothing_is_drawn():
    with pytest.raises(EngineError, match="no weights"):
        Rollout(RUN, ANN, LocalEngine(TorchDecoder(embedded.folder(), device="cpu"))).fill(HEAD, [0], never)


class Broken(DigitsReverse):
    def score(self, prompt, completion):
        raise ZeroDivisionError((prompt, completion))


def test_a_contract_that_breaks_is_named_as_the_culprit(engine):
    rollout = Rollout(dataclasses.replace(RUN, contract=Broken()), ANN, engine)
    with pytest.raises(ContractError, match="digits-reverse 1: scoring"):
        rollout.fill(HEAD, [0], never)
