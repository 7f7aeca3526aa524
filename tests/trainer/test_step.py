"""The optimiser step on the embedded model: exact weights, and repeatable bits."""

from __future__ import annotations

import dataclasses
import threading

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from echo_node.errors import DefectError
from echo_node.models import embedded
from echo_node.runs.algorithm import GrpoSettings, StepSettings
from echo_node.trainer.step import TrainingGroup, TrainStep
from echo_node.trainer.tree_packing import micro_batches, pack, rows_of, share_prompts
from tests.records import columns

CPU = torch.device("cpu")
REVERSE, EQUALS, END = 10, 11, 12


def new_step(*, threads=1, **settings):
    return TrainStep(embedded.folder(), StepSettings(**settings), threads=threads, device="cpu")


def plain_model():
    return AutoModelForCausalLM.from_pretrained(embedded.folder(), dtype=torch.float32).eval()


@torch.no_grad()
def sampled_batch(groups, size, *, seed=0, temperature=1.0, limit=8):
    """Return groups sampled by transformers' cached decoding from the bf16 weights."""
    model, draws, batch = plain_model(), np.random.default_rng(seed), []
    for _ in range(groups):
        digits = draws.integers(0, 10, 5)
        prompt = [REVERSE, *digits.tolist(), EQUALS]
        completions = []
        for _ in range(size):
            ids, mu, fed, cache = [], [], torch.tensor([prompt]), None
            while len(ids) < limit and END not in ids:
                out = model(fed, past_key_values=cache, use_cache=True)
                log_probs = torch.log_softmax(out.logits[0, -1].double() / temperature, dim=-1)
                ids.append(min(int(torch.searchsorted(log_probs.exp().cumsum(0), draws.random())), 15))
                mu.append(log_probs[ids[-1]].item())
                fed, cache = torch.tensor([[ids[-1]]]), out.past_key_values
            reward = float(ids == [*digits[::-1].tolist(), END])
            completions.append((np.array(ids), np.array(mu), reward))
        batch.append(TrainingGroup(tuple(prompt), *columns(completions)))
    return batch


def ragged_batch(seed=0, groups=6, *, longest=9):
    """Return groups of many sizes, with shared prefixes and nearly right claims."""
    draws, batch = np.random.default_rng(seed), []
    for size in range(1, groups + 1):
        prompt = draws.integers(0, 16, draws.integers(1, 12))
        trunk = draws.integers(0, 16, longest)
        completions = []
        for _ in range(size):
            ids = draws.integers(0, 16, draws.integers(1, longest + 1))
            shared = draws.integers(0, len(ids) + 1)
            ids[:shared] = trunk[:shared]
            completions.append((ids, -draws.exponential(3.0, len(ids)), draws.random()))
        batch.append(TrainingGroup(prompt, *columns(completions)))
    return batch


def bits(step):
    return {name: tensor.view(torch.int16) for name, tensor in step.published().items()}


def same(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.fixture(scope="module")
def batch():
    return sampled_batch(4, 4)


def test_before_the_first_step_it_publishes_the_folder_as_it_is():
    step, shipped = new_step(), load_file(embedded.folder() / "model.safetensors")
    assert step.version == 0
    assert list(step.published()) == sorted(shipped)  # the tied output is there once, as the embedding
    assert same(bits(step), {name: tensor.view(torch.int16) for name, tensor in shipped.items()})


@pytest.mark.parametrize("threads", [1, 2])
def test_the_same_batches_give_the_same_bits(batch, threads):
    runs = []
    for _ in range(2):
        step = new_step(threads=threads)
        figures = [step.step(batch) for _ in range(4)]
        runs.append((bits(step), figures))
    assert runs[0][1] == runs[1][1]
    assert same(runs[0][0], runs[1][0])
    assert not same(runs[0][0], bits(new_step()))


def test_a_step_in_another_thread_of_the_program_gives_the_same_bits(batch):
    here, there = new_step(), new_step()
    thread = threading.Thread(target=there.step, args=(batch,))
    thread.start()
    thread.join()
    here.step(batch)
    assert same(bits(here), bits(there))


def test_what_is_published_is_the_rounded_masters_and_what_the_forward_pass_sees(batch):
    step = new_step(learning_rate=1e-4, warm_up=0)
    for _ in range(3):
        assert step.step(batch).updated
    published = step.published()
    assert {tensor.dtype for tensor in published.values()} == {torch.bfloat16}
    moved = 0
    for name, master in step._masters.parts.items():
        assert master.dtype == torch.float32
        half_up = ((master.view(torch.int32).long() + 0x8000) >> 16).to(torch.int16)
        assert torch.equal(published[name].view(torch.int16), half_up)
        tie = master.view(torch.int32) & 0xFFFF == 0x8000
        assert torch.equal(published[name][~tie], master.to(torch.bfloat16)[~tie])
        assert torch.equal(step._weights[name], published[name])
        moved += int((master != published[name].float()).sum())
    assert moved > 100_000  # the masters hold more than what is published


def test_importance_weights_are_one_when_the_samplers_weights_are_the_trainers(batch):
    step = new_step()
    rows = [row for group in batch for row in step._rows(group)]
    for together in micro_batches(rows, 64):
        packed = pack(together, CPU)
        log_probs, _ = step._policy(packed)
        weights = (log_probs - packed.mu).exp()[packed.mask]
        assert (weights - 1.0).abs().max() < 1e-4
    tally = step.step(batch).tally
    assert tally.mean_ratio == pytest.approx(1.0, abs=1e-5)
    assert tally.effective_sample_share == pytest.approx(1.0, abs=1e-5)
    assert (tally.clipped, tally.vetoed) == (0, 0)


def test_the_temperature_and_the_vocabulary_of_the_samplers_are_the_trainers():
    batch = sampled_batch(2, 3, temperature=0.7)
    tally = new_step(temperature=0.7).step(batch).tally
    assert tally.mean_ratio == pytest.approx(1.0, abs=1e-5)
    assert new_step().step(batch).tally.mismatch_kl > 100 * max(tally.mismatch_kl, 1e-9)

    step = new_step(vocab_size=13)
    packed = pack(step._rows(batch[0]), CPU)
    log_probs, _ = step._policy(packed)
    ids = batch[0].ids[0]
    with torch.no_grad():
        logits = plain_model()(torch.tensor([[*batch[0].prompt_ids, *ids]])).logits[0, 6:-1, :13]
    expected = torch.log_softmax(logits, dim=-1)[range(len(ids)), ids]
    torch.testing.assert_close(log_probs[0, : len(ids)], expected, rtol=0, atol=1e-5)


def test_every_completion_has_the_log_probabilities_that_it_has_alone():
    model, step = plain_model(), new_step()
    for group in ragged_batch():
        row, *others = rows_of(group, [0.0] * len(group.rewards), row_tokens=10_000)
        packed = pack([row], CPU)
        log_probs, entropies = step._policy(packed)
        assert not others
        for nth, ids in enumerate(group.ids):
            with torch.no_grad():
                logits = model(torch.tensor([[*group.prompt_ids, *ids]])).logits[0]
            every = torch.log_softmax(logits[len(group.prompt_ids) - 1 : -1], dim=-1)
            here = slice(len(ids))
            torch.testing.assert_close(log_probs[nth, here], every[range(len(ids)), ids], rtol=0, atol=2e-5)
            entropy = -(every.exp() * every).sum(dim=-1)
            torch.testing.assert_close(entropies[nth, here], entropy, rtol=0, atol=2e-5)


@pytest.mark.parametrize("normalise", ["token", "sequence"])
def test_groups_of_many_lengths_together_give_the_gradient_that_they_give_one_by_one(normalise):
    grpo = GrpoSettings(normalise=normalise, veto=1e-3)
    gradients, tallies = [], []
    for row_tokens, micro_batch_tokens in ((1, 1), (1, 10_000), (12, 40), (10_000, 10_000)):
        step = new_step(row_tokens=row_tokens, micro_batch_tokens=micro_batch_tokens, grpo=grpo)
        rows = [row for group in ragged_batch() for row in step._rows(group)]
        tally, _, weight = step._backward(rows)
        gradients.append(torch.cat([w.grad.flatten() for w in step._weights.values()]) / weight)
        tallies.append((tally.completions, tally.vetoed, tally.tokens, tally.clipped))
    assert 0 < tallies[0][1] < tallies[0][0]
    assert len(set(tallies)) == 1
    for gradient in gradients[1:]:
        difference = (gradient - gradients[0]).norm() / gradients[0].norm()
        assert difference < 1e-5


def worked_examples_batch():
    """Return groups of many sizes whose prompts begin alike, two of them with the same prompt."""
    start, batch = [10, 3, 11, 4, 10, 7], ragged_batch()
    prompts = [np.array([*start, *group.prompt_ids]) for group in batch]
    prompts[3] = prompts[1]
    return [dataclasses.replace(group, prompt_ids=ids) for group, ids in zip(batch, prompts, strict=True)]


def test_groups_whose_prompts_begin_alike_share_a_row_and_each_has_the_values_that_it_has_alone():
    step, batch = new_step(), worked_examples_batch()
    alone = [row for group in batch for row in rows_of(group, [0.0] * len(group.rewards), row_tokens=10_000)]
    expected = {}
    for row in alone:
        values, _ = step._policy(pack([row], CPU))
        for branch, value in zip(row.branches, values, strict=True):
            expected[id(branch.mu)] = value[: len(branch.targets)]
    lengths = sum(len(row) for row in alone)
    together = share_prompts(alone, 60)
    assert 1 < len(together) < len(batch)
    assert max(len(row) for row in together) <= 60
    assert sum(len(row) for row in together) <= lengths - 6 * (len(batch) - len(together))
    packed = pack(together, CPU)
    log_probs, _ = step._policy(packed)
    branches = [branch for row in together for branch in row.branches]
    assert len(branches) == len(expected)
    for branch, found in zip(branches, log_probs, strict=True):
        torch.testing.assert_close(found[: len(branch.targets)], expected[id(branch.mu)], rtol=0, atol=2e-5)


def test_groups_that_share_a_row_give_the_gradient_that_they_give_one_by_one():
    batch = worked_examples_batch()
    shared, apart = (whole_gradient(new_step(row_tokens=tokens), batch) for tokens in (10_000, 1))
    assert (shared - apart).norm() < 1e-5 * apart.norm()


def test_prompts_that_have_little_in_common_stay_apart():
    rows = [
        row
        for first in (1, 2)
        for group in ragged_batch()
        for row in rows_of(
            dataclasses.replace(group, prompt_ids=np.array([10, first, *group.prompt_ids, *range(9)])),
            [0.0] * len(group.rewards),
            row_tokens=100,
        )
    ]
    assert len(share_prompts(rows, 1_000)) == len(rows)


def whole_gradient(step, batch):
    _, _, weight = step._backward([row for group in batch for row in step._rows(group)])
    return torch.cat([w.grad.flatten() for w in step._weights.values()]) / weight


def kept_bytes(step, batch):
    """What a forward pass keeps for the way back."""
    kept = {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    packed = pack([row for group in batch for row in step._rows(group)], CPU)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        log_probs, _ = step._policy(packed)
    assert log_probs.requires_grad
    return sum(kept.values())


def test_computing_again_what_was_not_kept_gives_the_same_gradient_and_keeps_less():
    batch = ragged_batch()
    plain, again = new_step(), new_step(gradient_checkpointing=True)
    ours, theirs = whole_gradient(plain, batch), whole_gradient(again, batch)
    torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-6)
    assert ours.abs().max() > 1e-2
    # A step that saves weights in bf16 has hooks of its own, which hide these.
    plain, again = (new_step(compute_copy="f32", gradient_checkpointing=again) for again in (False, True))
    assert kept_bytes(again, batch) < kept_bytes(plain, batch) / 2
    assert plain.step(batch).loss == pytest.approx(again.step(batch).loss, abs=1e-6)


def test_nothing_drops_out_where_what_was_not_kept_is_computed_again():
    step = new_step(gradient_checkpointing=True)
    training = {type(module).__name__ for module in step._policy.modules() if module.training}
    assert training == {
        "Policy",
        "OutputHead",
        "_GivenStates",
        "_Projection",
        "Qwen3DecoderLayer",
    }  # these drop nothing themselves


def test_on_a_cpu_all_is_in_full_precision_and_where_asked_in_half():
    batch = ragged_batch()
    auto, off = new_step(), new_step(mixed_precision="off")
    assert torch.equal(whole_gradient(auto, batch), whole_gradient(off, batch))
    packed = pack([row for group in batch for row in off._rows(group)], CPU)
    exact, _ = off._policy(packed)
    off._policy._narrow = True  # as on a device that is made for it
    narrow, entropies = off._policy(packed)
    assert (narrow.dtype, entropies.dtype) == (torch.float32, torch.float32)
    assert 1e-4 < (narrow - exact).abs().max() < 0.5
    slope = whole_gradient(off, batch)
    ours = whole_gradient(auto, batch)
    assert 0 < (slope - ours).norm() < 0.1 * ours.norm()


def test_groups_of_equal_rewards_are_left_out_where_that_is_asked():
    batch = ragged_batch()
    equal = [dataclasses.replace(group, rewards=[0.3] * len(group.rewards)) for group in ragged_batch(seed=1)]
    kept, left = (new_step(grpo=GrpoSettings(zero_advantage=way)) for way in ("keep", "skip"))
    assert not torch.equal(whole_gradient(kept, batch + equal), whole_gradient(kept, batch))
    # In the batch one group has one completion, and so no rewards that differ.
    assert torch.equal(whole_gradient(left, batch + equal), whole_gradient(left, batch[1:]))
    tally = left.step(batch + equal).tally
    assert (tally.completions, tally.skipped) == (42, 22)
    figures = left.step(equal)
    assert (figures.updated, figures.version, figures.tally.skipped) == (False, 1, 21)
    assert kept.step(equal).updated


def test_only_groups_of_this_version_are_held_to_its_engine_class(batch):
    off = [dataclasses.replace(group, mu=[mu - 0.05 for mu in group.mu]) for group in batch]

    def mistrusted(**changes):
        step = new_step(grpo=GrpoSettings(geometric=True))
        return step.step([dataclasses.replace(group, **changes) for group in off]).tally.mistrusted

    assert mistrusted(current=False) == 0
    assert mistrusted(current=True) == 16
    assert mistrusted(current=True, sigma=0.1) == 0
    assert mistrusted(current=True, gap_cap=0.001) == 16, "a claim is judged as it was made"


def test_a_lie_on_single_tokens_is_learnt_from_as_little_as_its_class_may_be_off(batch):
    """Only where the group is of the trained version: older ones keep their importance ratio."""

    def lied(group):
        claims = []
        for honest in group.mu:
            mu = honest.copy()
            mu[mu.argmin()] -= 3.0
            claims.append(mu)
        return dataclasses.replace(group, mu=claims)

    def gradient(groups, **changes):
        return whole_gradient(new_step(), [dataclasses.replace(group, **changes) for group in groups])

    true = gradient(batch, current=True, gap_cap=0.01)
    forged = [lied(group) for group in batch]
    capped = gradient(forged, current=True, gap_cap=0.01)
    assert (capped - true).norm() < 0.02 * true.norm()
    stale = gradient(forged, current=False, gap_cap=0.01)
    assert (stale - true).norm() > 0.2 * true.norm()


def test_what_completions_have_in_common_takes_one_place():
    prompt, same_ids = np.array([10, 1, 2, 11]), np.array([2, 1, 12])
    completion = (same_ids, np.zeros(3), 1.0)
    other = (np.array([2, 5, 6, 12]), np.zeros(4), 0.0)
    (row,) = rows_of(
        TrainingGroup(prompt, *columns([completion, completion, other])), [0.0] * 3, row_tokens=100
    )
    assert row.ids == [10, 1, 2, 11, 2, 1, 5, 6]  # no place for the last token of any
    assert [branch.sources for branch in row.branches] == [[3, 4, 5], [3, 4, 5], [3, 4, 6, 7]]
    assert row.positions == [0, 1, 2, 3, 4, 5, 5, 6]
    places, ends = row.preorder()
    assert np.flatnonzero((places <= places[7]) & (places[7] < ends)).tolist() == [0, 1, 2, 3, 4, 6, 7]


def test_the_learning_rate_warms_up_in_a_straight_line(batch):
    step = new_step(learning_rate=4e-4, warm_up=4)
    rates = [step.step(batch).learning_rate for _ in range(6)]
    assert rates == pytest.approx([1e-4, 2e-4, 3e-4, 4e-4, 4e-4, 4e-4])
    assert step.version == 6


def test_it_makes_the_better_answers_likelier_and_the_worse_ones_unlikelier(batch):
    step = new_step(warm_up=0)
    packed = pack([row for group in batch for row in step._rows(group)], CPU)
    assert packed.advantage.any()

    def answers():
        with torch.no_grad():
            return step._policy(packed)[0].sum(dim=1)

    before = answers()
    for _ in range(5):
        step.step(batch)
    assert ((answers() - before) * packed.advantage).sum() > 0


def test_a_batch_of_which_nothing_is_left_changes_nothing(batch):
    step = new_step()
    before = bits(step)
    far_off = [dataclasses.replace(group, mu=[mu + 50.0 for mu in group.mu]) for group in batch]
    figures = step.step(far_off)  # so that each has a token that the veto is for
    assert (figures.updated, figures.version, figures.tally.vetoed) == (False, 0, 16)
    assert same(bits(step), before)


def test_a_divergence_from_the_start_is_measured_against_the_start(batch):
    held, free = (
        new_step(learning_rate=2e-3, warm_up=0, grpo=GrpoSettings(kl=kl, entropy=0.0)) for kl in (10.0, 0.0)
    )
    start = free.published()
    first = held.step(batch), free.step(batch)
    assert first[0].loss == pytest.approx(first[1].loss, abs=1e-6)  # no way gone, so nothing to pay yet
    for _ in range(4):
        held.step(batch)
        free.step(batch)
    assert held._policy.head.own.lm_head.linear.weight is not held._reference.head.own.lm_head.linear.weight
    assert torch.equal(
        held._reference.head.own.lm_head.linear.weight, start["model.embed_tokens.weight"].float()
    )
    packed = pack([row for group in batch for row in free._rows(group)], CPU)
    with torch.no_grad():
        origin, _ = held._reference(packed)
        gone = [(step._policy(packed)[0] - origin).abs().mean() for step in (held, free)]
    assert gone[0] < gone[1]


@pytest.mark.parametrize(
    "group",
    [
        TrainingGroup((), *columns([(np.array([1]), np.array([-1.0]), 1.0)])),
        TrainingGroup((1,), *columns([(np.array([1, 2]), np.array([-1.0]), 1.0)])),
        TrainingGroup((1,), *columns([(np.array([1]), np.array([np.nan]), 1.0)])),
        TrainingGroup((1,), [], [], []),
    ],
)
def test_what_could_not_have_been_admitted_is_refused_before_anything_moves(group):
    step = new_step()
    before = bits(step)
    with pytest.raises(DefectError):
        step.step([group])
    assert same(bits(step), before)


@pytest.mark.parametrize(
    "wrong",
    [
        {"learning_rate": 0.0},
        {"temperature": -1.0},
        {"warm_up": -1},
        {"row_tokens": 0},
        {"gradient_norm": float("nan")},
        {"betas": (0.9, 1.0)},
        {"mixed_precision": "half"},
    ],
)
def test_settings_without_sense_are_refused(wrong):
    with pytest.raises(ValueError):
        StepSettings(**wrong)
