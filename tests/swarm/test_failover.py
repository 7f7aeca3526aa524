"""The leader is killed: a standby takes over, the swarm follows, and the old one rejoins."""

from __future__ import annotations

import math
from statistics import fmean, variance

import pytest

from echo_node.telemetry.step_db import read_records
from tests.swarm.processes import swarm_in
from tests.trainer.test_provenance import ask

ONE_THREAD = ("--threads", "1")
TRAINER = ("--role", "trainer", *ONE_THREAD)
LLAMA = ("--role", "sampler", "--engine", "llama/f16", *ONE_THREAD, "--slots", "8")
VERIFIER = ("--role", "verifier", *ONE_THREAD)
SMALL = {"algorithm": {"batch_groups": 8}, "sampling": {"group_size": 4}}
TERMS = {"heartbeat_ms": 1_000, "lease_ms": 12_000}
MARGIN_SECONDS = 60
"""Seconds beyond the lease: for the vote, with one elector gone, and for torch to start."""
WINDOW = 10
"""Steps over which rewards are compared."""


def leads(node):
    return node.last("progress").get("leading", False)


def falls_back(before, after):
    """Whether the second mean is below the first by more than three standard errors."""
    noise = math.sqrt(variance(before) / len(before) + variance(after) / len(after))
    return fmean(after) < fmean(before) - 3 * noise


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_after_a_kill_of_the_leader_the_run_goes_on_under_the_one_that_stood_by(tmp_path):
    async with swarm_in(tmp_path, heirs=("heir",), terms=TERMS, **SMALL) as swarm:
        leader = await swarm.start("trainer", *TRAINER)
        heir = await swarm.start("heir", *TRAINER)
        verifier = await swarm.start("verifier", *VERIFIER)
        sampler = await swarm.start("llama", *LLAMA)
        await leader.until(lambda node: len(node.all("step")) >= 25, within=300)
        await heir.until(lambda node: (node.last("progress").get("version") or 0) >= 20)
        assert not leads(heir)
        await leader.kill()
        last = leader.all("step")[-1]["step"]
        await heir.until(leads, within=TERMS["lease_ms"] / 1000 + MARGIN_SECONDS)
        await heir.until(lambda node: node.last("step").get("step", 0) >= last + WINDOW, within=200)
        steps = [step["step"] for step in heir.all("step")]
        assert steps == list(range(steps[0], steps[0] + len(steps)))
        assert last - 20 < steps[0] <= last + 1, (
            "at most what came after the last replicated checkpoint is lost"
        )
        assert {name for step in heir.all("step") for name in step["samplers"]} == {sampler.peer_id}
        again = await swarm.start("trainer", *TRAINER)
        reached = heir.last("step")["version"]
        await again.until(lambda node: (node.last("progress").get("version") or 0) > reached, within=200)
        assert not leads(again)
        assert not again.all("step")
        await verifier.until(lambda node: (node.last("progress").get("version") or 0) > reached)
    before, after = (read_records(swarm.folder_of(name) / "records.sqlite") for name in ("trainer", "heir"))
    kept = [record for record in before if record.step < after[0].step]
    newly = [record for record in after if record.step > last]
    assert not falls_back(
        [each.reward for each in before[-WINDOW:]], [each.reward for each in newly[:WINDOW]]
    )
    asked = ask(kept[-1].version, "--folder", swarm.folder_of("heir"))
    assert asked.exit_code == 0, "the heir can name what the old leader has trained on"
    used = [group.id for record in (*kept, *after) for group in record.groups]
    assert len(used) == len(set(used)), "on the branch that survives, no group is used twice"
    assert max(age for record in after for age in record.staleness) <= 4


@pytest.mark.slow
@pytest.mark.timeout(1200)
async def test_of_two_trainers_without_a_verifier_the_second_is_promoted_by_hand(tmp_path):
    terms = {"heartbeat_ms": 500, "lease_ms": 5_000}
    async with swarm_in(tmp_path, heirs=("heir",), verifiers=(), terms=terms) as swarm:
        leader = await swarm.start("trainer", *TRAINER)
        heir = await swarm.start("heir", *TRAINER)
        await leader.until(leads, within=300)
        await heir.until(lambda node: node.last("progress").get("held") == 0, within=300)
        await leader.kill()
        await heir.stop()
        assert not leads(heir)
        promoted = await swarm.start("heir", *TRAINER, "--promote")
        await promoted.until(leads, within=300)
