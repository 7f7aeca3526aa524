"""One node: an identity, a place in a swarm, and a role in a run. Here the rooms are put together, and nowhere else.

A node knows how to get onto a network (`join`, such as a swarm's own method) and owns every task of its role: leaving
`sample` or `train` ends them all.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import Final

import trio

from echo_node import __version__
from echo_node.admission import Admitted
from echo_node.engine.base import Engine
from echo_node.engine.kinds import EngineSpec, best_class
from echo_node.engine.worker import WorkerEngine
from echo_node.errors import ConfigError
from echo_node.ledger import Entry, Ledger
from echo_node.metrics import Rate, Records
from echo_node.net.base import Network
from echo_node.net.meeting.company import SEVERAL, Company
from echo_node.run import Run, read_model
from echo_node.sampler.loop import SamplerLoop
from echo_node.threads import run_abandonable
from echo_node.verifier.loop import VerifierLoop
from echo_node.weights.opening import open_store
from echo_node.weights.publish import Publisher
from echo_node.weights.pull import Puller
from echo_node.weights.state import layout_of
from echo_node.weights.store import WeightsStore
from protocol import Identity, Opened, Verdict, topics

MOST_ROWS: Final = 128
"""Completions that an engine draws at once."""
Joining = Callable[[Identity], AbstractAsyncContextManager[Network]]


class Node:
    """A peer of a run. `luck` gives the random bytes of heads, for a trainer."""

    def __init__(
        self,
        run: Run,
        identity: Identity,
        join: Joining,
        *,
        luck: Callable[[], bytes] = lambda: secrets.token_bytes(32),
    ) -> None:
        self._run = run
        self._identity = identity
        self._join = join
        self._luck = luck
        self.tokens = Rate()
        """Tokens generated or admitted, by the second."""
        self.verdicts: Counter[str] = Counter()
        """What groups were found to be, for a verifier."""

    @property
    def peer_id(self) -> str:
        return self._identity.peer_id

    async def sample(
        self, *, slots_per_call: int = 16, engine: Engine | None = None, threads: int | None = None
    ) -> None:
        """Be a sampler until cancelled. Without an engine, the best that the run allows is started in a process of its own."""
        async with (
            self._worker(self._best_class(), slots_per_call * self._run.told.sampling.group_size, threads)
            if engine is None
            else nullcontext(engine) as chosen,
            self._join(self._identity) as network,
            open_store(None, self._run.rules, network, model=self._run.folder) as store,
        ):
            loop = SamplerLoop(
                self._run,
                network,
                self._identity,
                chosen,
                Puller(network, store),
                slots_per_call=slots_per_call,
                agent=f"echo-node/{__version__}",
            )
            self.tokens = loop.tokens
            async with self._company(network, "sampler", needed=("trainer", "verifier")):
                await loop.work()

    async def verify(
        self, *, engine: Engine | None = None, threads: int | None = None, ledger: Ledger | None = None
    ) -> None:
        """Be a verifier until cancelled: the run must name this node's key as one. Without an engine, torch in float32 is started.

        What was found is written down in the ledger.
        """
        if self._identity.public not in self._run.told.verifiers:
            raise ConfigError("this key is none of the run's verifiers", advice="its author must name it")
        async with (
            self._worker("torch/f32", 1, threads) if engine is None else nullcontext(engine) as judge,
            self._join(self._identity) as network,
            open_store(None, self._run.rules, network, model=self._run.folder) as store,
        ):

            def note(admitted: Admitted, verdict: Opened[Verdict]) -> None:
                head = store.find(admitted.group.message.heads[0])
                if ledger is not None and head is not None:
                    ledger.verdict(verdict, Entry.of(admitted.group, head.message.version))

            puller = Puller(network, store)
            loop = VerifierLoop(self._run, network, self._identity, judge, puller, told=note)
            self.verdicts = loop.results
            async with self._company(network, "verifier", needed=("trainer",)):
                await loop.work()

    async def train(self, steps: int, *, records: Records, first_samplers: int = 1, threads: int = 1) -> None:
        """Be the trainer that leads the run, for so many steps."""
        from echo_node.trainer.loop import TrainerLoop  # noqa: PLC0415 - it needs torch, which a sampler may lack
        from echo_node.trainer.settings import training_settings  # noqa: PLC0415
        from echo_node.trainer.step import TrainStep  # noqa: PLC0415

        settings = training_settings(self._run.told).step

        step = await run_abandonable(lambda: TrainStep(self._run.folder, settings, threads=threads))
        layout = layout_of(read_model(self._run.folder))
        with WeightsStore.temporary(self._run.rules, layout) as store:
            publisher = Publisher(store, self._identity, luck=self._luck)
            async with self._join(self._identity) as network:
                loop = TrainerLoop(
                    self._run, network, self._identity, step=step, publisher=publisher, records=records
                )
                self.tokens = loop.tokens
                async with self._company(network, "trainer", needed=("verifier",)):
                    await loop.work(steps, first_samplers=first_samplers)

    def _best_class(self) -> str:
        return best_class({tolerance.engine for tolerance in self._run.told.engines})

    @asynccontextmanager
    async def _company(self, network: Network, role: str, needed: Iterable[str]) -> AsyncGenerator[None]:
        """Be found in a role, and keep a way to those that it works with, for as long as the block lasts."""
        keys = {topics.role_key(self._run.id, each): SEVERAL for each in needed}
        company = Company(network, announced=[topics.role_key(self._run.id, role)], needed=keys)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(company.keep)
            yield
            nursery.cancel_scope.cancel()

    @asynccontextmanager
    async def _worker(
        self, engine_class: str, completions: int, threads: int | None
    ) -> AsyncGenerator[Engine]:
        """An engine in a process of its own, for as long as the block lasts."""
        rows = max(1, min(MOST_ROWS, completions))
        engine = WorkerEngine(EngineSpec(engine_class, self._run.folder, rows=rows, threads=threads))
        try:
            await run_abandonable(engine.start)
            yield engine
        finally:
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(engine.close)
