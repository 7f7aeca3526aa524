"""The poisoned swarm in small: every cheat passes the cheap checks and fails a costly one."""

import dataclasses
import itertools
from contextlib import closing

import pytest

from benchmarks.poisoned import BELIEVED, CLEAN, VERIFIED, bounds_lines, figures, run_all
from benchmarks.poisoned_attacks import ATTACKS
from benchmarks.poisoned_cheats import TURNS, CheatingEngine
from benchmarks.poisoned_swarm import CHEATS, Outcome, play
from echo_node.engine.base import never
from echo_node.engine.local import LocalEngine
from echo_node.engine.torch_decoder import TorchDecoder
from echo_node.rollouts.admission import Admission
from echo_node.rollouts.record import RolloutRecord
from echo_node.runs.run import read_model
from echo_node.sampler.rollout import Rollout
from echo_node.trainer.grpo import advantages
from echo_node.verifier.replay_check import ReplayCheck
from protocol import Envelope
from tests.crafting import SAMPLERS, Chain, open_run, roster

SLOTS = 2
SAMPLER = SAMPLERS[0]


@pytest.fixture(scope="module")
def stage():
    """A run, a head of its start, and a verifier's engine that holds it."""
    run = open_run(group_size=8)
    head = Chain(run).next(SAMPLER)
    decoder = TorchDecoder(run.folder, device="cpu", dtype="f32", threads=1)
    with closing(LocalEngine(decoder)) as judge:
        judge.load(head.id, read_model(run.folder))
        yield run, head, ReplayCheck(run, lambda _head: judge)


def fill(run, head, *, turn: int = 0, honest_groups: int = 0) -> list[RolloutRecord]:
    """Return what a cheating sampler sends in this call, as admitted by trainer and verifiers."""
    with closing(CheatingEngine(run, rows=SLOTS * 8, honest_groups=honest_groups)) as engine:
        engine.load(head.id, read_model(run.folder))
        rollout = Rollout(run, SAMPLER, engine)
        calls = [rollout.fill(head, range(n * SLOTS, (n + 1) * SLOTS), never) for n in range(turn + 1)]
    admission = Admission(run)
    admission.published(head, roster(SAMPLER))
    return [admission.judge(Envelope.parse(group.sealed)) for group in itertools.chain(*calls)][-SLOTS:]


@pytest.mark.parametrize("turn", [0, 1, 3, 5, 7], ids=lambda turn: TURNS[turn][0])
def test_a_cheat_passes_every_cheap_check_and_is_condemned_by_one_look(stage, turn):
    run, head, judge = stage
    groups = fill(run, head, turn=turn)
    assert all(isinstance(group, RolloutRecord) for group in groups)
    breaches = [judge.check(group).breach for group in groups]
    assert all(breach is not None and breach.sure for breach in breaches)


def test_a_cheat_that_earns_trust_first_is_honest_for_so_long(stage):
    run, head, judge = stage
    early = fill(run, head, honest_groups=SLOTS)
    late = fill(run, head, turn=1, honest_groups=SLOTS)
    assert [judge.check(group).breach for group in early] == [None] * SLOTS
    assert all(judge.check(group).breach is not None for group in late)


def test_what_is_typed_in_is_half_right_so_that_it_counts_as_much_as_a_group_can(stage):
    run, head, _ = stage
    for group in fill(run, head):
        completions = group.message.completions()
        rewards = [score.value for score in run.scores(group.prompt, [each.ids for each in completions])]
        assert rewards == [each.reward for each in completions]
        assert sorted(advantages(rewards, "mean")) == [-0.5] * 4 + [0.5] * 4


def test_a_liar_on_single_tokens_draws_honestly_and_is_condemned_by_one_look(stage):
    run, head, judge = stage
    with closing(ATTACKS["single_token_mu"].engine(run, SLOTS * 8, SLOTS)) as engine:
        engine.load(head.id, read_model(run.folder))
        rollout = Rollout(run, SAMPLER, engine)
        calls = [rollout.fill(head, range(n * SLOTS, (n + 1) * SLOTS), never) for n in range(2)]
        assert len(engine.forged) == SLOTS
    admission = Admission(run)
    admission.published(head, roster(SAMPLER))
    groups = [admission.judge(Envelope.parse(each.sealed)) for call in calls for each in call]
    found = [judge.check(group).breach for group in groups]
    assert found[:SLOTS] == [None] * SLOTS
    assert {breach.reason for breach in found[SLOTS:]} == {"wrong-logprobs"}


def outcome(side: str, rewards: list[float], **changes) -> Outcome:
    base = Outcome(
        side=side,
        seed=0,
        curve=[(10 * number, reward) for number, reward in enumerate(rewards)],
        seconds=1.0,
        forged_made=0,
        forged_trained=0,
        last_forged_step=0,
        made_before_verdict=(),
        cheats_muted=0,
        honest_condemned=0,
        verdicts={},
    )
    return dataclasses.replace(base, **changes)


def sides(verified: list[float], believed: list[float], **changes) -> dict[str, list[Outcome]]:
    return {
        CLEAN: [outcome(CLEAN, [0.3, 0.8, 0.9])],
        VERIFIED: [outcome(VERIFIED, verified, **{"cheats_muted": CHEATS, **changes})],
        BELIEVED: [outcome(BELIEVED, believed, forged_trained=7)],
    }


def test_the_numbers_are_read_off_the_curves():
    results = figures(sides([0.3, 0.7, 0.9], [0.3, 0.1, 0.1], forged_trained=3, made_before_verdict=(8, 16)))
    assert results["poisoned_steps_over_clean"] == 1.5
    assert results["unverified_final_reward"] == pytest.approx(0.1667, abs=1e-4)
    assert results["cheats_muted_after_groups"] == [[8, 16]]
    assert (results["forged_groups_trained"], results["forged_groups_trained_unverified"]) == (3, 7)
    assert [line.rsplit(": ", 1)[1] for line in bounds_lines(results)] == [
        "MISSED",
        "holds",
        "holds",
        "holds",
    ]


def test_a_swarm_that_never_gets_there_holds_no_bound():
    results = figures(sides([0.3, 0.3, 0.3], [0.9] * 3, honest_condemned=1, cheats_muted=1))
    assert results["poisoned_steps_over_clean"] is None
    assert all(line.endswith("MISSED") for line in bounds_lines(results))


def test_a_few_steps_of_a_verified_swarm_find_the_cheat_and_nobody_else():
    done = play("verified", 0, 1, policy="sampled")
    from_the_start, _later = done.made_before_verdict
    assert from_the_start is not None
    assert done.honest_condemned == 0


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_poisoned_swarm_learns_as_the_clean_one_does_if_it_is_verified_and_only_then():
    results = figures(run_all([0], 160, "sampled", 1, lambda _text: None))
    assert [line for line in bounds_lines(results) if line.endswith("MISSED")] == []
