"""Admission: every group is sealed by a real key, for a run of the embedded model."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import trio

from echo_node.contract import load
from echo_node.contract.builtin.digits_reverse import DigitsReverse
from echo_node.rollouts.admission import SLOT_WINDOW, Admission, Refused
from echo_node.rollouts.record import RolloutRecord
from protocol import Envelope, Join, Stretch, open_manifest, seal
from protocol.digest import ZERO
from protocol.manifest import Turns
from protocol.receipt import REASONS
from protocol.sampling import prompt_key
from protocol.tokens import pack_ids
from protocol.trajectory import Completion
from tests.crafting import (
    END,
    ENGINE,
    SAMPLERS,
    STRANGER,
    TRAINER,
    Chain,
    changed_run,
    completion,
    envelope,
    forged,
    group,
    open_run,
    roster,
    sealed_group,
)

ANN, BOB = SAMPLERS[:2]
FULL = [1, 2, 3, 4, 5, 6]
"""Six tokens, which is all that the run allows, and no end token among them."""


@pytest.fixture
def run():
    return open_run()


@pytest.fixture
def chain(run):
    return Chain(run)


@pytest.fixture
def head(chain):
    return chain.next(ANN, BOB)


@pytest.fixture
def admission(run, head):
    made = Admission(run)
    made.published(head, roster(ANN, BOB))
    return made


def refusal(judged) -> str:
    assert isinstance(judged, Refused)
    assert judged.reason in REASONS
    assert judged.what
    return judged.reason


def test_an_honest_group_is_admitted_with_its_step_and_its_prompt(admission, run, head):
    sent = envelope(run, head.id, ANN, 3)
    judged = admission.judge(sent)
    assert isinstance(judged, RolloutRecord)
    assert (judged.id, judged.step, judged.order) == (sent.id, 0, (ANN.public, 3))
    assert run.tokenizer.decode(judged.message.prompt_ids()) == judged.prompt.text
    assert run.contract.answer(judged.prompt) == judged.prompt.text[1:-1][::-1]


def test_a_slot_is_filled_once_whatever_is_said_in_it_and_every_other_slot_is_free(admission, run, head):
    assert isinstance(admission.judge(envelope(run, head.id, ANN, 0)), RolloutRecord)
    assert refusal(admission.judge(envelope(run, head.id, ANN, 0))) == "duplicate"
    other_words = [completion(FULL, "length")] * 2
    assert refusal(admission.judge(envelope(run, head.id, ANN, 0, other_words))) == "duplicate"
    for sampler, slot in ((ANN, 1), (BOB, 0), (ANN, SLOT_WINDOW + 1)):
        assert isinstance(admission.judge(envelope(run, head.id, sampler, slot)), RolloutRecord)


def test_a_sampler_cannot_pick_the_slots_that_suit_it(admission, run, head):
    for slot in (SLOT_WINDOW, 2**53 - 1):
        assert refusal(admission.judge(envelope(run, head.id, ANN, slot))) == "over-limit"
    assert isinstance(admission.judge(envelope(run, head.id, ANN, SLOT_WINDOW - 1)), RolloutRecord), (
        "some get lost"
    )


def test_a_slot_is_free_again_when_there_was_no_room_for_its_group(admission, run, head):
    admitted = admission.judge(envelope(run, head.id, ANN, 0))
    admission.release(admitted)
    assert isinstance(admission.judge(envelope(run, head.id, ANN, 0)), RolloutRecord)


def test_a_slot_that_is_filled_again_and_again_does_not_let_its_sampler_pick_others(admission, run, head):
    for _ in range(3):
        admission.release(admission.judge(envelope(run, head.id, ANN, 0)))
    assert refusal(admission.judge(envelope(run, head.id, ANN, SLOT_WINDOW + 1))) == "over-limit"
    assert isinstance(admission.judge(envelope(run, head.id, ANN, SLOT_WINDOW)), RolloutRecord)


def test_only_who_really_said_it_is_answered(admission, run, head):
    assert isinstance(admission.judge(envelope(run, head.id, ANN, 0)), RolloutRecord)
    stale = sealed_group(run, bytes(32), ANN, 0)
    assert admission.judge(Envelope.parse(stale)).signed
    assert not admission.judge(Envelope.parse(forged(stale))).signed


def test_a_refused_group_does_not_use_up_its_slot(admission, run, head):
    for bad in (
        envelope(run, head.id, ANN, 0, [completion([END, END])] * 2),
        envelope(run, head.id, ANN, 0, engine="llama/f16"),
        Envelope.parse(forged(sealed_group(run, head.id, ANN, 0))),
    ):
        refusal(admission.judge(bad))
    assert isinstance(admission.judge(envelope(run, head.id, ANN, 0)), RolloutRecord)


# Each reason


def test_what_is_no_group_of_this_run_is_malformed(admission, run, head):
    other = open_run(group_size=3)
    join = seal(Join(agent="a", engine=ENGINE, head=ZERO, name=""), ANN, run.id)
    truncated = dataclasses.replace(envelope(run, head.id, ANN, 0), body=b"\x81")
    assert refusal(admission.judge(Envelope.parse(join))) == "malformed"
    assert refusal(admission.judge(envelope(other, head.id, ANN, 0))) == "malformed"
    assert refusal(admission.judge(truncated)) == "malformed"


def test_a_signature_that_is_not_the_signers_is_refused(admission, run, head):
    assert (
        refusal(admission.judge(Envelope.parse(forged(sealed_group(run, head.id, ANN, 0)))))
        == "wrong-signature"
    )
    posing = dataclasses.replace(envelope(run, head.id, ANN, 1), signer=BOB.public)
    assert refusal(admission.judge(posing)) == "wrong-signature"


def test_a_head_that_nobody_published_is_stale(admission, run):
    assert refusal(admission.judge(envelope(run, b"?" * 32, ANN, 0))) == "stale"


def test_a_sampler_outside_the_roster_is_refused_and_so_is_one_that_joined_later(admission, run, chain, head):
    assert refusal(admission.judge(envelope(run, head.id, STRANGER, 0))) == "not-in-roster"
    later = chain.next(ANN, BOB, STRANGER)
    admission.published(later, roster(ANN, BOB, STRANGER))
    assert refusal(admission.judge(envelope(run, head.id, STRANGER, 0))) == "not-in-roster"
    assert isinstance(admission.judge(envelope(run, later.id, STRANGER, 0)), RolloutRecord)


def test_a_sampler_that_left_the_roster_may_still_fill_slots_of_the_older_head(admission, run, chain, head):
    admission.published(later := chain.next(ANN), roster(ANN))
    assert isinstance(admission.judge(envelope(run, head.id, BOB, 0)), RolloutRecord)
    assert refusal(admission.judge(envelope(run, later.id, BOB, 0))) == "not-in-roster"


def test_another_engine_than_the_one_that_joined_is_refused(admission, run, head):
    assert refusal(admission.judge(envelope(run, head.id, ANN, 0, engine="llama/f16"))) == "wrong-engine"


def test_the_prompt_must_be_that_of_the_slot(admission, run, head):
    vocabulary = run.manifest.model.vocab_size
    for ids in (
        [10, 1, 2, 3, 4, 5, 11],  # a prompt of one's own choice
        run.prompt(run.slot_key(head.id, ANN.public, 1))[1],  # of the next slot
        run.prompt(run.slot_key(head.id, BOB.public, 0))[1],  # of another sampler
        run.prompt(run.slot_key(head.id, ANN.public, 0))[1][:-1],  # not all of it
    ):
        changed = {"prompt": pack_ids(ids, vocabulary), "prompt_length": len(ids)}
        assert refusal(admission.judge(envelope(run, head.id, ANN, 0, **changed))) == "wrong-prompt"


def test_a_prompt_longer_than_the_run_allows_is_over_the_limit_before_anything_is_made_of_it(
    admission, run, head
):
    ids = [1] * (run.manifest.sampling.max_prompt + 1)
    changed = {"prompt": pack_ids(ids, 16), "prompt_length": len(ids)}
    assert refusal(admission.judge(envelope(run, head.id, ANN, 0, **changed))) == "over-limit"


@pytest.mark.parametrize("count", [1, 3])
def test_a_group_has_as_many_completions_as_the_run_says(admission, run, head, count):
    sent = envelope(run, head.id, ANN, 0, [completion([1, 2, END])] * count)
    assert refusal(admission.judge(sent)) == "over-limit"


def test_one_token_more_than_the_run_allows_is_too_many(admission, run, head):
    for ids, finish in (([*FULL, 7], "length"), ([*FULL, END], "end")):
        sent = envelope(run, head.id, ANN, 0, [completion([END]), completion(ids, finish)])
        assert refusal(admission.judge(sent)) == "over-limit"


def test_ids_of_another_width_are_over_the_limit(admission, run, head):
    wider = group(
        changed_run(run, model=dataclasses.replace(run.manifest.model, vocab_size=17)), head.id, ANN, 0
    )
    assert refusal(admission.judge(Envelope.parse(seal(wider, ANN, run.id)))) == "over-limit"


def test_an_id_outside_the_vocabulary_is_refused_though_its_bits_would_hold_it(run):
    narrow = changed_run(run, model=dataclasses.replace(run.manifest.model, vocab_size=14))
    head = Chain(narrow).next(ANN)
    admission = Admission(narrow)
    admission.published(head, roster(ANN))
    honest = group(narrow, head.id, ANN, 0, [completion(FULL, "length")] * 2)
    for token, finish in ((14, "over-limit"), (15, "over-limit")):
        tokens = pack_ids([*FULL, *FULL[:-1], token], 16)
        sent = seal(dataclasses.replace(honest, tokens=tokens), ANN, narrow.id)
        assert refusal(admission.judge(Envelope.parse(sent))) == finish
    assert isinstance(admission.judge(Envelope.parse(seal(honest, ANN, narrow.id))), RolloutRecord)


def switched(run, head_id, other, sampler=ANN) -> bytes:
    """A group whose second completion goes on under another head after two tokens."""
    row = np.array(FULL)
    second = Completion(row, np.full(6, -0.5), "length", 0.0, (Stretch(0, 2, 0), Stretch(2, 6, 1)))
    made = group(run, head_id, sampler, 0)
    filled = type(made).of(
        prompt=made.prompt_ids(),
        completions=[completion(FULL, "length"), second],
        engine=ENGINE,
        heads=(head_id, other),
        slot=0,
        vocabulary=16,
    )
    return seal(filled, sampler, run.id)


def test_a_switch_of_heads_is_refused_where_the_run_does_not_allow_it(admission, run, chain, head):
    admission.published(newer := chain.next(ANN, BOB), roster(ANN, BOB))
    assert refusal(admission.judge(Envelope.parse(switched(run, head.id, newer.id)))) == "over-limit"


def episode(ids, replies, finish, ends):
    """A completion in which the environment says the tokens of these (start, end)."""
    row, stretches, at = np.array(ids), [], 0
    logprobs = np.full(len(row), -0.5)
    for start, end in replies:
        stretches += [Stretch(at, start, 0), Stretch(start, end, None)]
        logprobs[start:end] = 0.0
        at = end
    return Completion(row, logprobs, finish, 1.0, (*stretches, Stretch(at, len(row), 0)), ends)


TURNS = Turns(end=END, environment=2, most=3, role="user", samplers=(), tokens=2)
GOOD = [
    episode([1, END, 7, 1, END, 7, 1], [(2, 3), (5, 6)], "length", ("turn", "turn", "length")),
    episode([1, END], [], "done", ("turn",)),
]


@pytest.fixture
def two_ends(run):
    """A run with an environment; `13` is another end token than that of a turn."""
    model = dataclasses.replace(run.manifest.model, end_tokens=(END, 13))
    sampling = dataclasses.replace(run.manifest.sampling, max_tokens=7)
    return with_manifest(run, model=model, sampling=sampling, turns=TURNS)


def with_manifest(run, **changes):
    """The run under another manifest, which its contract, that answers nothing, would refuse."""
    sealed = seal(dataclasses.replace(run.manifest, **changes), TRAINER, ZERO)
    return dataclasses.replace(run, sealed_manifest=open_manifest(sealed))


def test_a_turn_is_structure_that_admission_checks(two_ends):
    head = Chain(two_ends).next(ANN)
    wrong = {
        "a reply called drawn": (episode([1, END, 7, 1, END], [], "done", ("turn",)), "drawn-reply"),
        "a turn that is too long": (episode([1, 2, 3], [], "done", ("turn",)), "drawn-reply"),
        "a reply to the last turn": (
            episode([1, 13, 7, 1, END], [(2, 3)], "done", ("turn", "turn")),
            "malformed",
        ),
        "an end of a turn that is none": (episode([1], [], "done", ("turn",)), "malformed"),
        "an end that was not drawn": (episode([1, END], [], "end", ("end",)), "malformed"),
        "another end that is called done": (episode([1, 13], [], "done", ("turn",)), "malformed"),
        "too many tokens of the environment": (
            episode([1, END, 7, 7, 7, 1], [(2, 5)], "done", ("turn", "length")),
            "malformed",
        ),
        "the limit of turns before it is reached": (episode([1, END], [], "turns", ("turn",)), "malformed"),
    }
    for name, (bad, reason) in wrong.items():
        admission = Admission(two_ends)
        admission.published(head, roster(ANN))
        sent = seal(group(two_ends, head.id, ANN, 0, [GOOD[1], bad]), ANN, two_ends.id)
        assert refusal(admission.judge(Envelope.parse(sent))) == reason, name
    admission = Admission(two_ends)
    admission.published(head, roster(ANN))
    sent = seal(
        group(two_ends, head.id, ANN, 0, [GOOD[1], episode([1, 13], [], "end", ("end",))]), ANN, two_ends.id
    )
    assert isinstance(admission.judge(Envelope.parse(sent)), RolloutRecord)


def test_turns_are_there_just_where_the_run_has_an_environment(admission, run, head, two_ends):
    sent = seal(group(run, head.id, ANN, 0, [GOOD[1]] * 2), ANN, run.id)
    assert refusal(admission.judge(Envelope.parse(sent))) == "malformed"
    other = Chain(two_ends).next(ANN)
    strict = Admission(two_ends)
    strict.published(other, roster(ANN))
    sent = seal(group(two_ends, other.id, ANN, 0, [completion([1, END])] * 2), ANN, two_ends.id)
    assert refusal(strict.judge(Envelope.parse(sent))) == "malformed"


def test_only_named_samplers_may_fill_slots_of_an_environment_that_nobody_can_replay(run, two_ends):
    named = with_manifest(
        two_ends,
        contract=dataclasses.replace(run.manifest.contract, pure=False),
        turns=dataclasses.replace(TURNS, samplers=(ANN.public,)),
    )
    head = Chain(named).next(ANN, BOB)
    admission = Admission(named)
    admission.published(head, roster(ANN, BOB))
    silent = [dataclasses.replace(GOOD[1], reward=None)] * 2
    for sampler, reason in ((ANN, None), (BOB, "unnamed-sampler")):
        judged = admission.judge(
            Envelope.parse(seal(group(named, head.id, sampler, 0, silent), sampler, named.id))
        )
        assert (refusal(judged) if reason else isinstance(judged, RolloutRecord) or None) == (reason or True)


def test_where_heads_may_be_switched_in_flight_each_of_them_must_be_known(run):
    flying = changed_run(run, sync=dataclasses.replace(run.manifest.sync, in_flight=True))
    chain, admission = Chain(flying), Admission(flying)
    head, newer = chain.next(ANN), chain.next(ANN)
    admission.published(head, roster(ANN))
    unheard = Envelope.parse(switched(flying, head.id, b"?" * 32))
    assert refusal(admission.judge(unheard)) == "stale"
    admission.published(newer, roster(ANN))
    judged = admission.judge(Envelope.parse(switched(flying, head.id, newer.id)))
    assert isinstance(judged, RolloutRecord)
    assert judged.step == 0, "a group is as stale as its oldest token"


# Ends


@pytest.mark.parametrize(
    ("ids", "finish"),
    [
        ([END, 1, END], "end"),
        ([1, END, END], "end"),
        ([1, END, 3, 4, 5, 6], "length"),
        ([1, 2, 3], "length"),
        ([1, 2, 3], "end"),
        (FULL, "end"),
        ([1, 2, END], "length"),
        ([1, 2, 3, 4, 5, END], "length"),
    ],
    ids=[
        "an-end-before-the-end",
        "two-ends",
        "an-end-inside-a-full-one",
        "cut-short",
        "cut-short-and-called-ended",
        "full-and-called-ended",
        "ended-and-called-full",
        "ended-at-the-limit-and-called-full",
    ],
)
def test_a_completion_ends_with_the_end_token_and_only_there_or_at_the_limit(
    admission, run, head, ids, finish
):
    good = completion([1, END])
    for place in (0, 1):
        pair = [completion(ids, finish), good] if place == 0 else [good, completion(ids, finish)]
        assert refusal(admission.judge(envelope(run, head.id, ANN, place, pair))) == "malformed"


@pytest.mark.parametrize(("ids", "finish"), [([END], "end"), ([1, 2, 3, 4, 5, END], "end"), (FULL, "length")])
def test_every_honest_way_to_end_is_taken(admission, run, head, ids, finish):
    sent = envelope(run, head.id, ANN, 0, [completion(ids, finish)] * 2)
    assert isinstance(admission.judge(sent), RolloutRecord)


def test_with_several_end_tokens_each_of_them_ends(run):
    run = changed_run(run, model=dataclasses.replace(run.manifest.model, end_tokens=(END, 13)))
    head, admission = Chain(run).next(ANN), Admission(run)
    admission.published(head, roster(ANN))
    both = [completion([1, END]), completion([1, 13])]
    assert isinstance(admission.judge(envelope(run, head.id, ANN, 0, both)), RolloutRecord)
    mixed = [completion([1, END]), completion([1, 13, END])]
    assert refusal(admission.judge(envelope(run, head.id, ANN, 1, mixed))) == "malformed"


# Staleness and memory


def test_a_group_is_taken_until_its_head_is_more_than_the_bound_behind(admission, run, chain, head):
    for age in range(3):
        judged = admission.judge(envelope(run, head.id, ANN, age))
        assert isinstance(judged, RolloutRecord)
        assert (judged.step, admission.staleness(judged.step)) == (0, age)
        admission.published(chain.next(ANN, BOB), roster(ANN, BOB))
    assert refusal(admission.judge(envelope(run, head.id, ANN, 9))) == "stale"


def test_staleness_counts_steps_and_not_heads(admission, run, chain, head):
    admission.published(chain.next(ANN, step=2), roster(ANN))
    assert isinstance(admission.judge(envelope(run, head.id, ANN, 0)), RolloutRecord)
    admission.published(chain.next(ANN, step=3), roster(ANN))
    assert refusal(admission.judge(envelope(run, head.id, ANN, 1))) == "stale"


def test_in_sequential_mode_only_the_newest_head_counts():
    run = open_run("sequential")
    chain, admission = Chain(run), Admission(run)
    first, second = chain.next(ANN), chain.next(ANN)
    admission.published(first, roster(ANN))
    admission.published(second, roster(ANN))
    assert refusal(admission.judge(envelope(run, first.id, ANN, 0))) == "stale"
    assert isinstance(admission.judge(envelope(run, second.id, ANN, 0)), RolloutRecord)


def test_what_is_beyond_the_bound_is_forgotten_slots_and_all(admission, run, chain, head):
    admission.judge(envelope(run, head.id, ANN, 0))
    for _ in range(20):
        admission.published(newest := chain.next(ANN), roster(ANN))
        admission.judge(envelope(run, newest.id, ANN, 0))
    assert len(admission._known) == len(admission._filled) == 3
    assert refusal(admission.judge(envelope(run, head.id, ANN, 0))) == "stale", (
        "forgotten slots do not come free"
    )


# What it must not do


class Guarded(DigitsReverse):
    """A contract that counts the questions, and whose score is never to be asked for."""

    prompts = 0

    def prompt(self, key):
        type(self).prompts += 1
        return super().prompt(key)

    def score(self, prompt, completion):
        raise AssertionError((prompt, completion))


def test_no_reward_is_computed_and_no_prompt_is_made_for_what_fails_cheaper_checks(run, head):
    guarded = dataclasses.replace(run, contract=Guarded())
    admission = Admission(guarded)
    admission.published(head, roster(ANN))
    Guarded.prompts = 0
    for bad in (
        envelope(run, b"?" * 32, ANN, 0),
        envelope(run, head.id, STRANGER, 0),
        envelope(run, head.id, ANN, 0, engine="llama/f16"),
        Envelope.parse(forged(sealed_group(run, head.id, ANN, 0))),
    ):
        refusal(admission.judge(bad))
    assert Guarded.prompts == 0
    for slot, claimed in enumerate((0.0, 1.0, -1e6, 1e6)):
        lies = [completion(FULL, "length", claimed)] * 2
        assert isinstance(admission.judge(envelope(run, head.id, ANN, slot, lies)), RolloutRecord)
    assert Guarded.prompts == 4


class Choosy(DigitsReverse):
    """A contract with a bug that some keys bring out."""

    def prompt(self, key):
        raise ZeroDivisionError(key)


def test_a_contract_that_fails_on_a_slot_does_not_end_the_trainer(run, head):
    """Samplers choose slots: a key on which the contract fails must not break more."""
    admission = Admission(dataclasses.replace(run, contract=Choosy()))
    admission.published(head, roster(ANN))
    assert refusal(admission.judge(envelope(run, head.id, ANN, 0))) == "wrong-prompt"


def test_a_contract_with_other_parameters_asks_other_things(run, head):
    """The prompt comes from the run's contract and not from the group's word."""
    admission = Admission(dataclasses.replace(run, contract=load("digits-reverse", "1", {"digits": 4})))
    admission.published(head, roster(ANN))
    assert refusal(admission.judge(envelope(run, head.id, ANN, 0))) == "wrong-prompt"


# Several at once


def outcome(judged):
    return "admitted" if isinstance(judged, RolloutRecord) else judged.reason


async def test_several_at_once_are_judged_as_one_after_the_other(run, head):
    sent = [
        *(envelope(run, head.id, ANN, slot) for slot in range(3)),
        envelope(run, head.id, ANN, 1),
        envelope(run, head.id, BOB, 0, prompt=pack_ids([1] * 7, run.manifest.model.vocab_size)),
        envelope(run, head.id, BOB, 0),
        envelope(run, head.id, ANN, SLOT_WINDOW + 2),
        envelope(run, head.id, ANN, SLOT_WINDOW + 4),
        envelope(run, head.id, STRANGER, 0),
        Envelope.parse(forged(sealed_group(run, head.id, ANN, 5))),
        envelope(run, head.id, ANN, 5, [completion([END, 1, END])] * 2),
        envelope(run, head.id, ANN, 5),
    ]
    one_by_one, together = Admission(run), Admission(run)
    for each in (one_by_one, together):
        each.published(head, roster(ANN, BOB))
    expected = [one_by_one.judge(each) for each in sent]
    judged = await together.judge_all(sent)
    assert [outcome(each) for each in judged] == [outcome(each) for each in expected]
    assert [outcome(each) for each in judged] == [
        *["admitted"] * 3,
        "duplicate",
        "wrong-prompt",
        "admitted",
        "admitted",
        "over-limit",
        "not-in-roster",
        "wrong-signature",
        "malformed",
        "admitted",
    ]
    assert [each.signed for each in judged if isinstance(each, Refused)] == [
        each.signed for each in expected if isinstance(each, Refused)
    ]


class Breaking(DigitsReverse):
    """A contract that one key breaks."""

    bad = b""

    def prompt(self, key):
        if key == self.bad:
            raise ZeroDivisionError(key)
        return super().prompt(key)


async def test_a_slot_that_breaks_the_contract_harms_no_other_that_is_judged_with_it(run, head):
    breaking = Breaking()
    breaking.bad = prompt_key(run.slot_key(head.id, ANN.public, 1))
    admission = Admission(dataclasses.replace(run, contract=breaking))
    admission.published(head, roster(ANN))
    judged = await admission.judge_all([envelope(run, head.id, ANN, slot) for slot in range(3)])
    assert [outcome(each) for each in judged] == ["admitted", "wrong-prompt", "admitted"]


class Slow(DigitsReverse):
    """A contract during whose work something else happens."""

    meanwhile = staticmethod(lambda: None)

    def prompt(self, key):
        trio.from_thread.run_sync(self.meanwhile)
        return super().prompt(key)


async def test_what_happens_while_prompts_are_made_counts(run, chain, head):
    slow = Slow()
    admission = Admission(dataclasses.replace(run, contract=slow))
    admission.published(head, roster(ANN))
    sent = envelope(run, head.id, ANN, 0)
    slow.meanwhile = lambda: admission.remember(head.id, ANN.public, 0)
    assert [outcome(each) for each in await admission.judge_all([sent])] == ["duplicate"]

    def move_on():
        for _ in range(run.manifest.sync.staleness + 1):
            admission.published(chain.next(ANN), roster(ANN))

    slow.meanwhile = move_on
    sent = envelope(run, head.id, ANN, 1)
    assert [outcome(each) for each in await admission.judge_all([sent])] == ["stale"]
