"""Groups that verifiers would not see: by hand, too large for gossip, with claims that deceive."""

from __future__ import annotations

import dataclasses
import shutil
from contextlib import ExitStack, closing
from functools import partial
from typing import Any

import pytest
import trio
from safetensors.torch import load_file, save_file

from benchmarks.poisoned import attack_figures
from benchmarks.poisoned_attacks import ATTACKS, claim_equal_rewards
from benchmarks.poisoned_swarm import Outcome, play
from echo_node.contract import load
from echo_node.credit.ledger import Ledger
from echo_node.engine.local import LocalEngine
from echo_node.engine.torch_decoder import TorchDecoder
from echo_node.models import embedded
from echo_node.net.memory import MemorySwarm
from echo_node.node import Node
from echo_node.runs.run import ENGINES, Run, draft
from echo_node.telemetry.metrics import Records
from protocol.manifest import Sampling, Sync, Verification
from tests.crafting import END, identity
from tests.engine import models

HONEST_GROUPS = 24
"""Groups for which a cheat is honest here: enough to be trusted."""
STEPS = 12


def attacked(name: str, **changed: Any) -> Outcome:
    attack = dataclasses.replace(ATTACKS[name], honest_groups=(HONEST_GROUPS,), **changed)
    return play(name, 0, STEPS, policy="sampled", attack=attack)


@pytest.mark.timeout(300)
def test_a_trusted_sampler_that_delivers_by_hand_is_found_out():
    done = attacked("by_hand")
    assert None not in done.made_before_verdict, "a verifier has seen what was never gossiped"
    assert done.honest_condemned == 0


@pytest.mark.timeout(300)
def test_a_trusted_sampler_whose_groups_all_go_by_reference_is_found_out():
    done = attacked("long_groups")
    assert None not in done.made_before_verdict
    assert done.honest_condemned == 0


@pytest.mark.timeout(300)
def test_equal_claims_are_a_lie_that_costs_more_than_it_hides():
    claims = partial(claim_equal_rewards, honest_groups=HONEST_GROUPS)
    done = attacked("equal_claims", cheats=claims)
    trained = sum(groups for _, groups, _ in done.trained)
    assert done.forged_trained <= 0.02 * trained, "the trainer compares each claim with what it computed"
    assert done.cheats_muted, "and tells them"
    assert done.honest_condemned == 0


def test_the_share_of_forged_groups_is_counted_until_the_reward_is_reached():
    base = {
        "seed": 0,
        "seconds": 1.0,
        "forged_made": 9,
        "forged_trained": 9,
        "last_forged_step": 9,
        "made_before_verdict": (),
        "cheats_muted": 2,
        "honest_condemned": 0,
        "verdicts": {},
    }
    clean = Outcome(side="clean", curve=[(0, 0.3), (10, 0.8)], **base)
    trained = tuple((step, 10, int(step in {1, 30})) for step in range(1, 31))
    under = Outcome(side="by_hand", curve=[(0, 0.3), (20, 0.8)], trained=trained, **base)
    found = attack_figures([clean], [under])
    assert (found["steps_over_clean"], found["forged_trained_share"]) == (2.0, 0.005)


# Eight completions of 2,048 tokens, with a tiny model

TOKENS = 2_048
TRAINER, SAMPLER, VERIFIER = (identity(f"long {n}") for n in range(3))


@pytest.fixture(scope="module")
def long_winded(tmp_path_factory):
    """A tiny model that never ends: its end token is out of reach, whatever came before."""
    at = models.folder(
        tmp_path_factory.mktemp("model"),
        vocab_size=512,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        max_position_embeddings=TOKENS + 64,
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


def long_run(folder, policy) -> Run:
    sealed = draft(
        name="long groups",
        folder=folder,
        contract=load("digits-reverse", "1"),
        params={},
        algorithm={"batch_groups": 1},
        sampling_=Sampling(group_size=8, max_prompt=7, max_tokens=TOKENS, temperature=1.0),
        sync=Sync(async_from=0, head_every=1, in_flight=False, staleness=4),
        author=TRAINER,
        trainers=[TRAINER.public],
        verifiers=[VERIFIER.public],
        engines=[each for each in ENGINES if each.engine == "torch/f32"],
        verification=Verification(policy=policy, quorum=1, share=0.0),
        nonce=bytes(32),
    )
    return Run.open(sealed, folder, jailed=False)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("policy", ["sampled", "quorum"])
async def test_groups_too_large_for_gossip_are_verified(policy, long_winded, tmp_path):
    run = long_run(long_winded, policy)
    records = Records()
    with ExitStack() as stack:
        ledger = stack.enter_context(Ledger(tmp_path / "ledger.sqlite"))
        engines = [
            stack.enter_context(
                closing(LocalEngine(TorchDecoder(run.folder, device="cpu", dtype="f32", threads=1), rows=8))
            )
            for _ in range(2)
        ]
        with trio.fail_after(240):
            async with MemorySwarm() as swarm, trio.open_nursery() as nursery:
                judge = Node(run, VERIFIER, swarm.join)
                nursery.start_soon(lambda: judge.verify(engine=engines[0], ledger=ledger))
                sampler = Node(run, SAMPLER, swarm.join)
                nursery.start_soon(lambda: sampler.sample(slots_per_call=1, engine=engines[1]))
                await Node(run, TRAINER, swarm.join).train(1, records=records)
                nursery.cancel_scope.cancel()
        trained = [group for record in records.steps for group in record.groups]
        assert len(trained) == 1
        assert judge.verdicts["honest"] >= 1, "nothing else lets them in"
        assert judge.status()["inventories"]["fetched"] >= 1
        assert ledger.credit(SAMPLER.public).tokens >= 8 * TOKENS, "these were no short groups"
