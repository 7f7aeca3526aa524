"""Episodes from engine to verifier: honest ones pass, and each way of forging a turn is caught."""

from __future__ import annotations

import dataclasses
from collections import Counter

import numpy as np
import pytest

from echo_node.contract import Reply, Turn
from echo_node.contract.builtin.guess_number import GuessNumber
from echo_node.contract.jail.worker import Failed
from echo_node.errors import ContractError
from echo_node.rollouts.admission import Admission
from echo_node.rollouts.record import RolloutRecord
from echo_node.runs.episodes import EpisodeReplay
from echo_node.trainer.batch_scoring import BatchScorer
from echo_node.verifier.replay_check import ReplayCheck
from protocol import Envelope, Stretch
from protocol.sampling import uniforms
from protocol.turns import turn_ends, turns_of
from tests.crafting import roster
from tests.turns.games import (
    SAMPLER,
    drawn_records,
    engine_of,
    first_head,
    open_game,
    with_completions,
)

END = 12


@pytest.fixture(
    scope="module",
    params=[("torch/f32", "torch/f32"), ("llama/f32", "torch/f32"), ("torch/f32", "llama/f32")],
    ids=" checked by ".join,
)
def game(request):
    """A run, its first head, the verifier's engine, and groups that a sampler's engine drew."""
    run = open_game()
    head = first_head(run)
    drawing, checking = (engine_of(run, head.id, engine_class) for engine_class in request.param)
    yield run, head, checking, drawn_records(run, head, drawing, 6)
    drawing.close()
    checking.close()


def admit(run, head, record):
    admission = Admission(run)
    admission.published(head, roster(SAMPLER, engine=record.message.engine))
    return admission.judge(Envelope.parse(record.sealed))


def reason_of(game, record) -> str | None:
    run, _, engine, _ = game
    finding = ReplayCheck(run, lambda _: engine).check(record)
    return finding.breach.reason if finding.breach else None


def longest(records):
    """The record and index of a completion with the most turns."""
    pairs = [
        (len(turns_of(each.stretches)), record, index)
        for record in records
        for index, each in enumerate(record.message.completions())
    ]
    _, record, index = max(pairs, key=lambda pair: pair[0])
    return record, index


def changed(run, record, index, **changes):
    completions = list(record.message.completions())
    made = dataclasses.replace(completions[index], **changes)
    rules = run.turn_rules
    if "ends" not in changes:
        ends = turn_ends(made.ids, made.stretches, rules.end, rules.end_tokens)
        made = dataclasses.replace(made, ends=ends)
    completions[index] = made
    return with_completions(run, record, completions)


def test_honest_episodes_are_admitted_and_found_honest(game):
    run, head, _, records = game
    finishes, turns = set(), 0
    for record in records:
        assert isinstance(admit(run, head, record), RolloutRecord)
        assert reason_of(game, record) is None
        for each in record.message.completions():
            finishes.add(each.finish)
            turns = max(turns, len(turns_of(each.stretches)))
            assert each.ends is not None
            assert not each.logprobs[~each.drawn].any()
    assert finishes == {"done", "turns"}
    assert turns == 4


@pytest.mark.parametrize("rows", [1, 3, 64])
@pytest.mark.parametrize("engine_class", ["torch/f32", "llama/f32"])
def test_every_engine_draws_the_same_episodes_whatever_its_rows(game, rows, engine_class):
    run, head, _, records = game
    engine = engine_of(run, head.id, engine_class, rows)
    try:
        again = drawn_records(run, head, engine, 2)
    finally:
        engine.close()
    for one, two in zip(records, again, strict=False):
        for mine, its in zip(one.message.completions(), two.message.completions(), strict=True):
            np.testing.assert_array_equal(mine.ids, its.ids)
            assert mine.stretches == its.stretches


def test_a_forged_observation_is_caught_in_its_first_group(game):
    run, head, _, records = game
    record, index = longest(records)
    completion = record.message.completions()[index]
    place = turns_of(completion.stretches)[0]
    ids = completion.ids.copy()
    other = {14: 15, 15: 14}
    ids[place.end] = other[int(ids[place.end])]
    forged = changed(run, record, index, ids=ids)
    assert isinstance(admit(run, head, forged), RolloutRecord), "nothing but the environment tells"
    assert reason_of(game, forged) == "forged-observation"


def test_an_end_that_the_environment_did_not_say_is_caught(game):
    run, head, _, records = game
    record, index = longest(records)
    completion = record.message.completions()[index]
    place = turns_of(completion.stretches)[1]
    cut = {
        "ids": completion.ids[: place.end],
        "logprobs": completion.logprobs[: place.end],
        "stretches": tuple(each for each in completion.stretches if each.end <= place.end),
    }
    for finish, reason in (("done", "false-end"), ("length", "skipped-turn")):
        forged = changed(run, record, index, **cut, finish=finish)
        assert isinstance(admit(run, head, forged), RolloutRecord)
        assert reason_of(game, forged) == reason


def test_a_turn_after_the_environments_end_is_caught(game):
    run, head, engine, records = game
    record, index = next(
        (record, index)
        for record in records
        for index, each in enumerate(record.message.completions())
        if each.finish == "done" and len(each.ids) + 3 <= run.limits.max_tokens and len(each.ends) < 3
    )
    completion = record.message.completions()[index]
    at = len(completion.ids)
    ids = np.concatenate((completion.ids, [14]))
    # the further turn is drawn by the slot's own luck, as a cheat with the model would
    key = run.slot_key(head.id, SAMPLER.public, record.slot)
    for _ in range(2):
        scores = [
            engine.score(record.message.prompt_ids(), np.append(ids, token), run.limits)
            for token in range(16)
        ]
        luck = uniforms(key, index, 1, len(ids))[0]
        token = next(n for n, each in enumerate(scores) if each.low[-1] <= luck < each.high[-1])
        ids = np.append(ids, token)
        if token == END:
            break
    drawn = engine.score(record.message.prompt_ids(), ids, run.limits).logprobs
    logprobs = np.concatenate((completion.logprobs, [0.0], drawn[at + 1 :]))
    stretches = (*completion.stretches, Stretch(at, at + 1, None), Stretch(at + 1, len(ids), 0))
    forged = changed(run, record, index, ids=ids, logprobs=logprobs, stretches=stretches)
    assert isinstance(admit(run, head, forged), RolloutRecord)
    assert reason_of(game, forged) == "added-turn"


def test_tokens_of_the_environment_that_are_called_drawn_are_refused(game):
    run, head, _, records = game
    record, index = longest(records)
    completion = record.message.completions()[index]
    whole = (Stretch(0, len(completion.ids), 0),)
    logprobs = np.where(completion.drawn, completion.logprobs, -1.0)
    forged = changed(run, record, index, stretches=whole, logprobs=logprobs, ends=("turn",), finish="done")
    assert admit(run, head, forged).reason == "drawn-reply"


def test_a_turn_of_the_model_that_is_called_the_environments_is_caught(game):
    """Tokens that were not drawn by the slot's luck, hidden where nobody replays luck."""
    run, head, _, records = game
    record, index = longest(records)
    completion = record.message.completions()[index]
    one, two = turns_of(completion.stretches)[:2]
    later = [each for each in completion.stretches if each.start >= two.replied]
    stretches = (Stretch(0, one.end, 0), Stretch(one.end, two.replied, None), *later)
    logprobs = completion.logprobs.copy()
    logprobs[one.end : two.replied] = 0.0
    forged = changed(run, record, index, stretches=stretches, logprobs=logprobs)
    assert admit(run, head, forged).reason == "malformed", "it has more than the environment may say"
    assert reason_of(game, forged) == "forged-observation"


def test_a_longer_observation_is_caught(game):
    run, _, _, records = game
    record, index = longest(records)
    completion = record.message.completions()[index]
    place = turns_of(completion.stretches)[0]
    longer = np.insert(completion.ids, place.replied, 14)[: run.limits.max_tokens]
    cut = turns_of(completion.stretches)[1].end + 1
    stretches = (
        Stretch(0, place.end, 0),
        Stretch(place.end, place.replied + 1, None),
        Stretch(place.replied + 1, cut, 0),
    )
    forged = changed(
        run,
        record,
        index,
        ids=longer[:cut],
        logprobs=np.insert(completion.logprobs, place.replied, 0.0)[:cut],
        stretches=stretches,
        finish="done",
    )
    # what follows lies one place further on, where other luck belongs: the reply is looked at first
    assert reason_of(game, forged) == "forged-observation"


def test_the_trainer_leaves_forged_episodes_out_and_condemns_them(game):
    run, head, _, records = game
    record, index = longest(records)
    completion = record.message.completions()[index]
    place = turns_of(completion.stretches)[0]
    ids = completion.ids.copy()
    ids[place.end] = {14: 15, 15: 14}[int(ids[place.end])]
    forged = changed(run, record, index, ids=ids)
    ignored = [None] * 4
    scorer = BatchScorer(run, *ignored, Counter())
    scored, left_out, lies = scorer._score([admit(run, head, record), admit(run, head, forged)])
    assert [each.id for each in scored] == [record.id]
    assert left_out == {forged.id: "forged-observation"}
    assert lies == [(lies[0][0], "forged-observation")]


def test_a_completion_on_which_the_contract_fails_covers_no_forger(game, monkeypatch):
    run, _, _, records = game
    record, index = longest(records)
    completions = record.message.completions()
    place = turns_of(completions[index].stretches)[0]
    ids = completions[index].ids.copy()
    ids[place.end] = {14: 15, 15: 14}[int(ids[place.end])]
    forged = changed(run, record, index, ids=ids)
    real = type(run).replies

    def fails_elsewhere(self, episodes):
        found = real(self, episodes)
        return [each if number else Failed("out of time") for number, each in enumerate(found)]

    monkeypatch.setattr(type(run), "replies", fails_elsewhere)
    replay = EpisodeReplay(
        run, record.prompt, forged.message.completions()[::-1] if index == 0 else forged.message.completions()
    )
    assert replay.step(0).reason == "forged-observation"


def test_draws_are_replayed_before_the_environment_is_asked(game, monkeypatch):
    run, _, _, records = game
    record, index = longest(records)
    completion = record.message.completions()[index]
    ids = completion.ids.copy()
    ids[0] = (ids[0] + 5) % 10  # a first guess that was not drawn
    asked = []
    monkeypatch.setattr(type(run), "replies", lambda _self, episodes: asked.append(episodes) or [])
    assert reason_of(game, changed(run, record, index, ids=ids)) == "token-out-of-reach"
    assert not asked


def test_a_contract_that_fails_or_does_not_repeat_condemns_nobody(game, monkeypatch):
    run, _, _, records = game
    record, _ = longest(records)

    def fails(_self, _prompt, _turns):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(GuessNumber, "reply", fails)
        finding = ReplayCheck(run, lambda _: game[2]).check(record)
        assert finding.breach.reason == "not-replayed"
        assert not finding.breach.sure
    fickle = iter(range(10**6))
    with monkeypatch.context() as patch:
        patch.setattr(GuessNumber, "reply", lambda *_: Reply("+" if next(fickle) % 3 else "-"))
        finding = ReplayCheck(run, lambda _: game[2]).check(record)
        assert finding.breach is not None
        assert not finding.breach.sure


def test_a_slot_whose_environment_fails_is_void_and_never_sent(game, monkeypatch):
    run, head, engine, _ = game
    real = GuessNumber.reply

    def fails(self, prompt, turns):
        if len(turns) == 2:
            raise ContractError("no more")
        return real(self, prompt, turns)

    monkeypatch.setattr(GuessNumber, "reply", fails)
    with pytest.raises(ContractError):  # without a jail the error itself comes through
        drawn_records(run, head, engine, 2)


def test_a_transcript_is_scored_by_its_turns(game):
    run, _, _, records = game
    for record in records:
        replay = EpisodeReplay(run, record.prompt, record.message.completions())
        assert replay.breach() is None
        assert [score.value for score in run.scores(record.prompt, replay.turns)] == list(
            record.message.rewards
        )
        assert all(isinstance(turn, Turn) for turns in replay.turns for turn in turns)
