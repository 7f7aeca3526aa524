"""Demo in one process: a trainer and samplers on the in-memory network.

Sequential runs with the same seed repeat exactly.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import closing

import torch
import trio

from echo_node.config import DemoConfig
from echo_node.contract import load
from echo_node.demo.node_status import NodeStatus
from echo_node.demo.task import task_of
from echo_node.errors import ConfigError
from echo_node.models import embedded
from echo_node.net.memory import MemorySwarm
from echo_node.node import Node
from echo_node.runs.run import ENGINES, Run, draft
from echo_node.telemetry.metrics import Records
from protocol import Identity, derive
from protocol.manifest import EngineTolerance, Sampling, Sync

CONTRACT = ("digits-reverse", "1")
PROMPT_TOKENS, ANSWER_TOKENS = 7, 6


class Demo:
    """A demo in one process, running or ended."""

    def __init__(self, config: DemoConfig, records: Records) -> None:
        self.config = config
        self.page = ""
        self.task = task_of(config)
        self.first = self.last = None
        self.records = records
        self.samplers: list[Node] = []
        self.members: tuple[NodeStatus, ...] = ()
        """Empty: no node is a process of its own."""
        self.model_bytes = 0
        self.began = time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of all samplers together."""
        return sum(node.tokens.per_second() for node in self.samplers)

    async def play(self) -> None:
        """Run the demo to its end."""
        torch.set_num_threads(1)  # several thread pools on the same cores are far slower
        run = self._open_run()
        with closing(run):
            await self._play(run, itertools.count())

    async def _play(self, run: Run, heads: Iterator[int]) -> None:
        config = self.config
        async with MemorySwarm(config.seed) as swarm, trio.open_nursery() as nursery:
            self.samplers = [
                Node(run, self._identity(f"sampler {n}"), swarm.join) for n in range(config.samplers)
            ]
            for node in self.samplers:
                nursery.start_soon(
                    lambda node=node: node.sample(slots_per_call=self._slots_per_call, threads=1)
                )
            trainer = Node(
                run,
                self._identity("trainer"),
                swarm.join,
                luck=lambda: self._bytes(f"luck of head {next(heads)}"),
            )
            self.began = time.monotonic()
            await trainer.train(config.steps, records=self.records, first_samplers=config.samplers)
            nursery.cancel_scope.cancel()

    @property
    def _slots_per_call(self) -> int:
        """Groups per call: a sampler's share of a batch."""
        return max(1, self.config.batch_groups // self.config.samplers)

    def _open_run(self, *, jailed: bool = True) -> Run:
        config = self.config
        trainer = self._identity("trainer")
        sealed = draft(
            name="demo: reverse five digits",
            folder=embedded.folder(),
            contract=load(*CONTRACT),
            params={},
            pure=True,  # as the purity test finds it
            algorithm={"batch_groups": config.batch_groups, **config.algorithm},
            sampling_=Sampling(
                group_size=config.group_size,
                max_prompt=PROMPT_TOKENS,
                max_tokens=ANSWER_TOKENS,
                temperature=config.temperature,
            ),
            sync=Sync(
                async_from=0 if config.mode == "async" else None,
                head_every=1,
                in_flight=config.in_flight,
                staleness=config.staleness if config.mode == "async" else 0,
            ),
            author=trainer,
            trainers=[trainer.public],
            engines=self._engines(),
            nonce=self._bytes("nonce"),
        )
        # A run of its own with a built-in contract: layers that this system lacks stop nobody.
        return Run.open(sealed, embedded.folder(), jailed=jailed, require=())

    def _engines(self) -> Sequence[EngineTolerance]:
        wanted = self.config.engine
        found = [each for each in ENGINES if wanted in {"auto", each.engine}]
        if not found:
            known = ", ".join(each.engine for each in ENGINES)
            raise ConfigError(
                f"no tolerance is known for the engine class {wanted}", advice=f"use one of {known}"
            )
        return found

    def _identity(self, name: str) -> Identity:
        return Identity(self._bytes(f"identity of {name}"))

    def _bytes(self, name: str) -> bytes:
        """Derive bytes from the seed and a name."""
        return derive("demo", self.config.seed.to_bytes(8), name.encode())
