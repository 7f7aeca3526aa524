"""The optimiser step on the embedded model: it is exact about what it publishes, and it repeats itself."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from echo_node import embedded
from echo_node.errors import DefectError
from echo_node.trainer.grpo import GrpoSettings
from echo_node.trainer.packing import micro_batches, pack, rows_of
from echo_node.trainer.step import SampledCompletion, StepSettings, TrainingGroup, TrainStep

CPU = torch.device("cpu")
REVERSE, EQUALS, END = 10, 11, 12


def new_step(*, threads=1, **settings):
    return TrainStep(embedded.folder(), StepSettings(**settings), threads=threads, device="cpu")


def plain_model():
    return AutoModelForCausalLM.from_pretrained(embedded.folder(), dtype=torch.float32).eval()


@torch.no_grad()
def sampled_batch(groups, size, *, seed=0, temperature=1.0, limit=8):
    """Groups drawn by transformers' own cached decoding, a sequence at a time, from the bf16 weights."""
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
            completions.append(SampledCompletion(np.array(ids), np.array(mu), reward))
        batch.append(TrainingGroup(tuple(prompt), tuple(completions)))
    return batch


def ragged_batch(seed=0, groups=6, *, longest=9):
    """Groups of many sizes and lengths, with prefixes in common, with claims that are only nearly right."""
    draws, batch = np.random.default_rng(seed), []
    for size in range(1, groups + 1):
        prompt = draws.integers(0, 16, draws.integers(1, 12))
        trunk = draws.integers(0, 16, longest)
        completions = []
        for _ in range(size):
            ids = draws.integers(0, 16, draws.integers(1, longest + 1))
            shared = draws.integers(0, len(ids) + 1)
            ids[:shared] = trunk[:shared]
            completions.append(SampledCompletion(ids, -draws.exponential(3.0, len(ids)), draws.random()))
        batch.append(TrainingGroup(prompt, completions))
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
    for name, master in step._masters.items():
        assert master.dtype == torch.float32
        assert torch.equal(published[name], master.to(torch.bfloat16))
        assert torch.equal(step._weights[name], published[name].float())
        moved += int((master != published[name].float()).sum())
    assert moved > 100_000  # the masters hold more than what is published


def test_importance_weights_are_one_when_the_samplers_weights_are_the_trainers(batch):
    step = new_step()
    rows = [row for group in batch for row in step._rows(group)]
    for together in micro_batches(rows, 64):
        packed = pack(together, CPU)
        log_probs, _ = step._policy.look_back(packed)
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
    log_probs, _ = step._policy.look_back(packed)
    ids, _, _ = batch[0].completions[0]
    with torch.no_grad():
        logits = plain_model()(torch.tensor([[*batch[0].prompt_ids, *ids]])).logits[0, 6:-1, :13]
    expected = torch.log_softmax(logits, dim=-1)[range(len(ids)), ids]
    torch.testing.assert_close(log_probs[0, : len(ids)], expected, rtol=0, atol=1e-5)


def test_every_completion_has_the_log_probabilities_that_it_has_alone():
    model, step = plain_model(), new_step()
    for group in ragged_batch():
        row, *others = rows_of(group, [0.0] * len(group.completions), row_tokens=10_000)
        packed = pack([row], CPU)
        log_probs, entropies = step._policy.look_back(packed)
        assert not others
        for nth, (ids, _, _) in enumerate(group.completions):
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


def test_what_completions_have_in_common_takes_one_place():
    prompt, same_ids = np.array([10, 1, 2, 11]), np.array([2, 1, 12])
    completion = SampledCompletion(same_ids, np.zeros(3), 1.0)
    other = SampledCompletion(np.array([2, 5, 6, 12]), np.zeros(4), 0.0)
    (row,) = rows_of(TrainingGroup(prompt, [completion, completion, other]), [0.0] * 3, row_tokens=100)
    assert row.ids == [10, 1, 2, 11, 2, 1, 5, 6]  # no place for the last token of any
    assert [branch.sources for branch in row.branches] == [[3, 4, 5], [3, 4, 5], [3, 4, 6, 7]]
    assert row.positions == [0, 1, 2, 3, 4, 5, 5, 6]
    assert np.flatnonzero(row.sight()[7]).tolist() == [0, 1, 2, 3, 4, 6, 7]


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
            return step._policy.look_back(packed)[0].sum(dim=1)

    before = answers()
    for _ in range(5):
        step.step(batch)
    assert ((answers() - before) * packed.advantage).sum() > 0


def test_a_batch_of_which_nothing_is_left_changes_nothing(batch):
    step = new_step(grpo=GrpoSettings(veto=1e9))
    before = bits(step)
    figures = step.step(batch)
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
    assert held._policy.head.weight is not held._reference.head.weight
    assert torch.equal(held._reference.head.weight, start["model.embed_tokens.weight"].float())
    packed = pack([row for group in batch for row in free._rows(group)], CPU)
    with torch.no_grad():
        origin, _ = held._reference.look_back(packed)
        gone = [(step._policy.look_back(packed)[0] - origin).abs().mean() for step in (held, free)]
    assert gone[0] < gone[1]


@pytest.mark.parametrize(
    "group",
    [
        TrainingGroup((), [SampledCompletion(np.array([1]), np.array([-1.0]), 1.0)]),
        TrainingGroup((1,), [SampledCompletion(np.array([1, 2]), np.array([-1.0]), 1.0)]),
        TrainingGroup((1,), [SampledCompletion(np.array([1]), np.array([np.nan]), 1.0)]),
        TrainingGroup((1,), []),
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
    ],
)
def test_settings_without_sense_are_refused(wrong):
    with pytest.raises(ValueError):
        StepSettings(**wrong)
