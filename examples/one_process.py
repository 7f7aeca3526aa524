"""A whole swarm in one process: one trainer, two samplers, the embedded model.

python examples/one_process.py [STEPS]
"""

import sys

import trio

from echo_node.contract import load
from echo_node.models import embedded
from echo_node.net.memory import MemorySwarm
from echo_node.node import Node
from echo_node.runs.run import Run, draft
from echo_node.telemetry.metrics import Records
from protocol import Identity
from protocol.manifest import Sampling, Sync


async def main(steps: int) -> None:
    trainer, *samplers = (Identity.generate() for _ in range(3))
    manifest = draft(
        name="my first run",
        folder=embedded.folder(),
        contract=load("digits-reverse", "1"),
        params={},
        algorithm={"batch_groups": 32, "learning_rate": 1.5e-4},
        sampling_=Sampling(group_size=8, max_prompt=7, max_tokens=6, temperature=1.0),
        sync=Sync(async_from=0, head_every=1, in_flight=False, staleness=4),
        author=trainer,
        trainers=[trainer.public],
        nonce=bytes(32),
    )
    run = Run.open(manifest, embedded.folder())
    records = Records()
    async with MemorySwarm() as swarm, trio.open_nursery() as nursery:
        for identity in samplers:
            nursery.start_soon(Node(run, identity, swarm.join).sample)
        await Node(run, trainer, swarm.join).train(steps, records=records, first_samplers=2)
        nursery.cancel_scope.cancel()
    run.close()
    print(f"reward {records.steps[0].reward:.2f} at first, {records.reward():.2f} after {steps} steps")


if __name__ == "__main__":
    trio.run(main, int(sys.argv[1]) if len(sys.argv) > 1 else 200)
