"""A LoRA run over real processes: both engines, a verifier, and a base that travels once."""

from __future__ import annotations

import pytest

from tests.swarm.processes import swarm_in
from tests.swarm.test_swarm import LLAMA, TORCH, VERIFIER, mean_reward, trainer_words

STEPS = 12
LEARNING = {"learning_rate": 3e-3, "warm_up": 4}


@pytest.mark.timeout(400)
async def test_processes_learn_an_adapter_with_both_engines_and_a_verifier(tmp_path):
    verification = {"policy": "quorum", "quorum": 1}
    async with swarm_in(
        tmp_path,
        lora={"rank": 8},
        algorithm={**LEARNING, "batch_groups": 8},
        verification=verification,
        sync={"mode": "async", "async_from": 4},
    ) as swarm:
        trainer = await swarm.start("trainer", *trainer_words(steps=STEPS, first_samplers=2))
        samplers = [await swarm.start("torch", *TORCH), await swarm.start("llama", *LLAMA)]
        verifier = await swarm.start("verifier", *VERIFIER)
        await trainer.until(lambda node: node.all("stopped"), within=300)
        assert [step["step"] for step in trainer.all("step")] == list(range(1, STEPS + 1))
        for sampler in samplers:
            assert sampler.all("progress")[-1]["accepted"] > 0
        assert set(verifier.all("progress")[-1]["verdicts"]) == {"honest"}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("mode", ["sequential", "async"])
async def test_an_adapter_learns_the_task_over_processes(tmp_path, mode):
    async with swarm_in(tmp_path, lora={"rank": 16}, algorithm=LEARNING, sync={"mode": mode}) as swarm:
        trainer = await swarm.start("trainer", *trainer_words(steps=300, first_samplers=2))
        for name, words in (("torch", TORCH), ("llama", LLAMA), ("verifier", VERIFIER)):
            await swarm.start(name, *words)
        await trainer.until(lambda node: node.all("stopped"), within=800)
        assert mean_reward(trainer.all("step")[-20:]) >= 0.8
