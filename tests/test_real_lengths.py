"""Long completions from slow samplers, end to end: nothing is asked twice or arrives too late."""

from __future__ import annotations

import re
import resource
import shutil
import sys
import time
from collections import defaultdict
from contextlib import ExitStack, closing

import pytest
import trio
from safetensors.torch import load_file, save_file

from echo_node.contract import load
from echo_node.engine.local import LocalEngine
from echo_node.engine.torch_decoder import TorchDecoder
from echo_node.models import embedded
from echo_node.net.memory import MemorySwarm
from echo_node.node import Node
from echo_node.runs.run import ENGINES, Run, draft
from echo_node.sampler import requested_groups
from echo_node.sampler.requested_groups import RequestedGroups
from echo_node.telemetry.metrics import Records
from echo_node.trainer import request_deadlines, sequential_source, work_split
from protocol.manifest import Sampling, Sync, Verification
from tests.crafting import END, identity
from tests.engine import models

TRAINER, VERIFIER, *SAMPLERS = (identity(f"real lengths {n}") for n in range(4))
SCALE = 16
"""Factor by which lengths and waiting times are shorter in the quick form."""


def tiny_model(at, context):
    """A tiny model that never ends: its end token is out of reach, whatever came before."""
    models.folder(
        at,
        vocab_size=512,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        max_position_embeddings=context,
        eos_token_id=END,
        tie_word_embeddings=False,
    )
    weights = load_file(at / "model.safetensors")
    weights["model.embed_tokens.weight"][:, 0] = 8.0  # this one is positive after the norm, always
    weights["lm_head.weight"][:, 0] = 0.0
    weights["lm_head.weight"][END] = 0.0
    weights["lm_head.weight"][END, 0] = -40.0
    save_file(weights, at / "model.safetensors", metadata={"format": "pt"})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(embedded.folder() / name, at / name)
    return at


def open_run(folder, tokens, *, mode, batch, group_size, verifiers=()):
    is_async = mode == "async"
    sealed = draft(
        name="real lengths",
        folder=folder,
        contract=load("digits-reverse", "1"),
        params={},
        algorithm={"batch_groups": batch},
        sampling_=Sampling(group_size=group_size, max_prompt=7, max_tokens=tokens, temperature=1.0),
        sync=Sync(
            async_from=0 if is_async else None, head_every=1, in_flight=False, staleness=4 if is_async else 0
        ),
        author=TRAINER,
        trainers=[TRAINER.public],
        verifiers=list(verifiers),
        engines=[each for each in ENGINES if each.engine == "torch/f32"],
        verification=Verification(policy="sampled" if verifiers else "self", quorum=1, share=0.0),
        nonce=bytes(32),
    )
    return Run.open(sealed, folder, jailed=False)


class SlowDecoder(TorchDecoder):
    """A decoder that gives each row so many tokens a second, and no more."""

    tokens_per_second = 20.0
    _next = 0.0

    def decode(self, tokens):
        now = time.monotonic()
        self._next = max(self._next, now) + 1 / self.tokens_per_second
        time.sleep(self._next - now)
        return super().decode(tokens)


async def trains(run, monkeypatch, *, steps, batch, seconds):
    """Train with two slow samplers; return the trainer's records and what it said meanwhile."""
    asked, said = defaultdict(set), set()
    was = RequestedGroups.answer

    async def spied(self, head, request):
        asked[head.id].add((self._identity.public, request.first, request.count))
        return await was(self, head, request)

    monkeypatch.setattr(RequestedGroups, "answer", spied)
    records = Records()
    swarm = MemorySwarm()
    trainer = Node(run, TRAINER, swarm.join)
    samplers = [Node(run, each, swarm.join) for each in SAMPLERS]

    async def watch():
        while True:
            said.add(trainer.status().get("batch"))
            await trio.sleep(0.2)

    with ExitStack() as stack, trio.fail_after(seconds):
        async with swarm, trio.open_nursery() as nursery:
            for node in samplers:
                decoder = SlowDecoder(run.folder, device="cpu", dtype="f32", threads=1)
                engine = stack.enter_context(closing(LocalEngine(decoder, rows=8)))
                nursery.start_soon(
                    lambda node=node, engine=engine: node.sample(slots_per_call=1, engine=engine)
                )
            nursery.start_soon(watch)
            await trainer.train(steps, records=records)
            told = [node.status() for node in samplers]
            dropped = trainer.status()["dropped"]
            nursery.cancel_scope.cancel()
    assert len(records.steps) == steps
    assert dropped == {}, "nothing arrived too late, or was of no use"
    for status in told:
        assert (status["refused"], status["given_up"]) == ({}, 0)
    for requests in asked.values():
        assert sum(count for _, _, count in requests) <= batch, "nothing is asked twice"
    return records, said - {None}, asked


def check_said(mode, said, batch):
    """What `status` shows while a batch is waited for."""
    words = {
        "sequential": rf"\d of {batch} groups requested, \d delivered",
        "async": rf"\d of {batch} groups have arrived, \d+ announced ones are under way",
    }[mode]
    assert any(re.match(words, each) for each in said), said


@pytest.mark.timeout(300)
@pytest.mark.parametrize("mode", ["sequential", "async"])
async def test_a_swarm_of_slow_samplers_trains(mode, tmp_path, monkeypatch):
    """A completion takes longer than any question, deadline or patience that is fixed."""
    for module, name in (
        (requested_groups, "HOLD_SECONDS"),
        (requested_groups, "FORGOTTEN_SECONDS"),
        (sequential_source, "PART_SECONDS"),
        (sequential_source, "EMPTY_SECONDS"),
        (sequential_source, "START_SECONDS"),
        (request_deadlines, "START_SECONDS"),
        (work_split, "EVEN_PATIENCE"),
    ):
        monkeypatch.setattr(module, name, getattr(module, name) / SCALE)
    monkeypatch.setattr(work_split.EvenSplit, "least_patience", work_split.EVEN_PATIENCE)
    tokens = 2_048 // SCALE
    assert tokens / SlowDecoder.tokens_per_second > sequential_source.PART_SECONDS
    run = open_run(tiny_model(tmp_path, tokens + 64), tokens, mode=mode, batch=2, group_size=4)
    _, said, asked = await trains(run, monkeypatch, steps=2, batch=2, seconds=240)
    check_said(mode, said, 2)
    if mode == "sequential":
        assert sum(count for each in asked.values() for _, _, count in each) == 2 * 2


@pytest.mark.slow
@pytest.mark.timeout(1_800)
@pytest.mark.parametrize("mode", ["sequential", "async"])
async def test_a_swarm_of_samplers_of_20_tokens_a_second_trains_on_2048_tokens(mode, tmp_path, monkeypatch):
    run = open_run(tiny_model(tmp_path, 2_048 + 64), 2_048, mode=mode, batch=2, group_size=8)
    began = time.monotonic()
    _, said, _ = await trains(run, monkeypatch, steps=2, batch=2, seconds=1_500)
    check_said(mode, said, 2)
    sys.stderr.write(
        f"{mode}: 2 steps of 2 groups of 8 x 2,048 tokens in {time.monotonic() - began:.0f} s; {sorted(said)}\n"
    )


@pytest.mark.slow
@pytest.mark.timeout(1_800)
@pytest.mark.parametrize("mode", ["sequential", "async"])
async def test_completions_of_32768_tokens_pass_end_to_end(mode, tmp_path):
    tokens = 32_768
    run = open_run(
        tiny_model(tmp_path, tokens + 64),
        tokens,
        mode=mode,
        batch=1,
        group_size=2,
        verifiers=[VERIFIER.public],
    )
    records, began = Records(), time.monotonic()
    with ExitStack() as stack, trio.fail_after(1_500):
        engines = [
            stack.enter_context(
                closing(LocalEngine(TorchDecoder(run.folder, device="cpu", dtype="f32", threads=1), rows=2))
            )
            for _ in range(2)
        ]
        async with MemorySwarm() as swarm, trio.open_nursery() as nursery:
            judge, sampler = Node(run, VERIFIER, swarm.join), Node(run, SAMPLERS[0], swarm.join)
            nursery.start_soon(lambda: judge.verify(engine=engines[0]))
            nursery.start_soon(lambda: sampler.sample(slots_per_call=1, engine=engines[1]))
            await Node(run, TRAINER, swarm.join).train(1, records=records)
            nursery.cancel_scope.cancel()
    (group,) = records.steps[0].groups
    assert judge.verdicts["honest"] >= 1
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    sys.stderr.write(
        f"{mode}: 2 x {tokens:,} tokens in {time.monotonic() - began:.0f} s, at most {peak:.1f} GB; {group}\n"
    )
