"""A trainer that gets SIGTERM, as by systemd: it finishes its step and repeats none later."""

from __future__ import annotations

import pytest

from echo_node.telemetry.step_db import read_records
from echo_node.trainer.checkpoint import newest_checkpoint
from tests.swarm.processes import swarm_in

TRAINER = ("--role", "trainer", "--threads", "1")
TORCH = ("--role", "sampler", "--engine", "torch/f32", "--threads", "1", "--slots", "8")
SMALL = {"algorithm": {"batch_groups": 8}, "sampling": {"group_size": 4}}


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_a_trainer_that_systemd_stops_has_a_checkpoint_of_all_that_it_told(tmp_path):
    async with swarm_in(tmp_path, **SMALL) as swarm:
        await swarm.start("torch", *TORCH)
        for more in (3, 2, 4):
            trainer = await swarm.start("trainer", *TRAINER)
            await trainer.until(lambda node, more=more: len(node.all("step")) >= more, within=200)
            await trainer.stop()
            told = read_records(swarm.folder_of("trainer") / "records.sqlite")
            kept = newest_checkpoint(swarm.folder_of("trainer") / "checkpoints")
            assert int(kept.notes["batch"]) == told[-1].number == len(told)
