"""One node: an identity, a place in a swarm, and a role in a run. Here the rooms are put together, and nowhere else.

A node knows how to get onto a network (`join`, such as a swarm's own method) and owns every task of its role: leaving
`sample` or `train` ends them all.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import trio

from echo_node import __version__
from echo_node.engine.base import Engine
from echo_node.metrics import Rate, Records
from echo_node.net.base import Network
from echo_node.net.meeting.company import SEVERAL, Company
from echo_node.run import Run, read_model
from echo_node.sampler.loop import SamplerLoop
from echo_node.threads import run_abandonable
from echo_node.weights.opening import open_store
from echo_node.weights.publish import Publisher
from echo_node.weights.pull import Puller
from echo_node.weights.state import layout_of
from echo_node.weights.store import WeightsStore
from protocol import Identity, topics

_BUILDING = threading.Lock()
"""Models are built one at a time: transformers changes global state while it builds one."""

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

    @property
    def peer_id(self) -> str:
        return self._identity.peer_id

    async def sample(self, *, slots_per_call: int = 16, engine: Engine | None = None) -> None:
        """Be a sampler until cancelled. Without an engine, a torch one is made."""
        chosen: Engine = await run_abandonable(self._torch_engine) if engine is None else engine
        async with (
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

    async def train(self, steps: int, *, records: Records, first_samplers: int = 1, threads: int = 1) -> None:
        """Be the trainer that leads the run, for so many steps."""
        from echo_node.trainer.loop import TrainerLoop  # noqa: PLC0415 - it needs torch, which a sampler may lack
        from echo_node.trainer.settings import training_settings  # noqa: PLC0415
        from echo_node.trainer.step import TrainStep  # noqa: PLC0415

        settings = training_settings(self._run.told).step

        def build() -> TrainStep:
            with _BUILDING:
                return TrainStep(self._run.folder, settings, threads=threads)

        step = await run_abandonable(build)
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

    @asynccontextmanager
    async def _company(self, network: Network, role: str, needed: Iterable[str]) -> AsyncGenerator[None]:
        """Be found in a role, and keep a way to those that it works with, for as long as the block lasts."""
        keys = {topics.role_key(self._run.id, each): SEVERAL for each in needed}
        company = Company(network, announced=[topics.role_key(self._run.id, role)], needed=keys)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(company.keep)
            yield
            nursery.cancel_scope.cancel()

    def _torch_engine(self) -> Engine:
        from echo_node.engine.local import LocalEngine  # noqa: PLC0415 - as above
        from echo_node.engine.torch import TorchDecoder  # noqa: PLC0415

        with _BUILDING:
            return LocalEngine(TorchDecoder(self._run.folder))
