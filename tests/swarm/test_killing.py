"""A live trainer is killed twenty times, at any moment of its life.

The records, the chain, the journal and the samplers' receipts prove that nothing acknowledged was
lost, used twice or used too stale. ECHO_NODE_KILLS sets the number of kills.
"""

from __future__ import annotations

import os
import random
import time

import pytest
import trio

from echo_node.telemetry.step_db import read_records
from tests.chaos.invariants import check
from tests.swarm.chaos_layout import lay_out
from tests.swarm.fork_server import hatchery
from tests.swarm.processes import swarm_in

KILLS = int(os.environ.get("ECHO_NODE_KILLS", "20"))
SEED = 20
STALENESS = 2
BATCH = 8
ONE_THREAD = ("--threads", "1")
TRAINER = ("--role", "trainer", *ONE_THREAD)
SAMPLER = ("--role", "sampler", "--engine", "llama/f16", *ONE_THREAD, "--slots", "4")
RUN = {
    "algorithm": {"batch_groups": BATCH},
    "sampling": {"group_size": 4},
    "sync": {"mode": "async", "staleness": STALENESS},
}
YOUNG = 0.4
"""Share of lives that end during recovery: opening files, replaying steps, connecting."""
COMING_BACK_SECONDS = 3.0
MOST_STEPS = 4
PATIENCE_SECONDS = 400.0
"""For whatever must come, on a machine that may have other work."""


async def live_and_die(trainer, luck) -> None:
    """Wait for a random moment after its start: during recovery, or within a later step."""
    await trainer.said("started", within=PATIENCE_SECONDS)
    seconds = COMING_BACK_SECONDS
    if luck.random() >= YOUNG:
        steps, seconds = luck.randint(1, MOST_STEPS), 1.0
        await trainer.until(lambda node: len(node.all("step")) >= steps, within=PATIENCE_SECONDS)
    await trio.sleep(luck.uniform(0, seconds))  # any moment will do, and none is better than another
    await trainer.kill()


def works(sampler, version, accepted) -> bool:
    """Whether a sampler has come so far, and had more groups accepted than these."""
    told = sampler.last("progress")
    return (told.get("version") or 0) >= version and told.get("accepted", 0) > accepted


@pytest.mark.slow
@pytest.mark.timeout(2400)
async def test_of_a_trainer_that_is_killed_twenty_times_nothing_acknowledged_is_lost_or_used_twice(tmp_path):
    luck, kills = random.Random(SEED), []
    with hatchery() as fork:
        async with swarm_in(tmp_path, verifiers=(), **RUN) as swarm:
            samplers = [await swarm.start(name, *SAMPLER) for name in ("ann", "bob")]
            for _ in range(KILLS):
                trainer = await swarm.start("trainer", *TRAINER, fork=fork)
                await live_and_die(trainer, luck)
                kills.append(time.time())
            before = [sampler.last("progress").get("accepted", 0) for sampler in samplers]
            last = await swarm.start("trainer", *TRAINER)
            await last.until(lambda node: len(node.all("step")) >= 2 * MOST_STEPS, within=PATIENCE_SECONDS)
            reached = last.last("step")["version"]
            for sampler, accepted in zip(samplers, before, strict=True):
                await sampler.until(
                    lambda node, accepted=accepted: works(node, reached, accepted), within=PATIENCE_SECONDS
                )
    records = read_records(swarm.folder_of("trainer") / "records.sqlite")
    assert [record.number for record in records] == list(range(1, len(records) + 1))
    assert len(records) >= KILLS
    used = [group.id for record in records for group in record.groups]
    assert len(used) == len(set(used))
    assert max(age for record in records for age in record.staleness) <= STALENESS
    report = check(lay_out(tmp_path / "left", swarm, kills, bound_seconds=PATIENCE_SECONDS))
    assert report.findings == []
    counts = report.counts
    told = sum(
        count for name, count in counts.items() if name.startswith(("groups dropped", "groups refused"))
    )
    waiting = counts.get("groups waiting at the end", 0)
    assert counts["groups acknowledged"] == counts["groups trained"] + told + waiting
    assert counts["groups trained"] == len(used)
    assert counts["groups acknowledged to samplers"] > len(used) / 2
