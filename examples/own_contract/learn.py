"""The embedded model learns a task of your own: one trainer and two samplers in one process.

python examples/own_contract/learn.py [STEPS]     (after pip install examples/own_contract)
"""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import trio

from echo_node.net.memory import MemorySwarm
from echo_node.node import Node
from echo_node.runs.spec import RunSpec, new_run, open_run, write_run
from echo_node.telemetry.metrics import Records
from protocol import Identity


async def main(steps: int, folder: Path) -> None:
    trainer, *samplers = (Identity.generate() for _ in range(3))
    spec = RunSpec(
        name="digits in order",
        contract="digits-sorted@1",
        trainers=[trainer.peer_id],
        algorithm={"batch_groups": 32, "learning_rate": 3e-4},
        sampling={"group_size": 8, "max_prompt": 7, "max_tokens": 6},
        verification={"policy": "self", "share": 0.0},
    )
    write_run(folder / "run", new_run(spec, trainer, nonce=bytes(32)))
    run = open_run(folder / "run")
    records = Records()
    async with MemorySwarm() as swarm, trio.open_nursery() as nursery:
        for identity in samplers:
            nursery.start_soon(Node(run, identity, swarm.join).sample)
        await Node(run, trainer, swarm.join).train(steps, records=records, first_samplers=2)
        nursery.cancel_scope.cancel()
    run.close()
    print(f"reward {records.steps[0].reward:.2f} at first, {records.reward():.2f} after {steps} steps")


if __name__ == "__main__":
    with TemporaryDirectory() as place:
        trio.run(main, int(sys.argv[1]) if len(sys.argv) > 1 else 200, Path(place))
