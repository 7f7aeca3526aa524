"""Trainer of a node: standby until elected, then a TrainerLoop for one term.

Modules that need torch are imported when a trainer starts, since samplers may lack torch.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from echo_node.credit.statement_server import serve_statements
from echo_node.net.base import Network
from echo_node.node.context import NodeContext, chain_version
from echo_node.rollouts.record import RolloutRecord
from echo_node.runs.algorithm import training_settings
from echo_node.runs.evaluation import AT_ONCE
from echo_node.runs.evaluation_settings import evaluation_settings
from echo_node.runtime.threads import enter_in_thread
from echo_node.telemetry.metrics import Records
from echo_node.telemetry.role_report import RoleReport
from echo_node.verifier.recheck import Recheck
from echo_node.weights.engine_sync import EngineSync
from echo_node.weights.publisher import Publisher
from echo_node.weights.store import WeightsStore

if TYPE_CHECKING:
    from echo_node.trainer.distributed import Ranks
    from echo_node.trainer.evaluator import Evaluator
    from echo_node.trainer.loop import TrainerLoop
    from echo_node.trainer.step import TrainStep
    from echo_node.trainer.training_state import TrainingState

SEVERAL_VERIFIERS: Final = 2
"""Verifiers from which on two can disagree, so that the trainer may have to look itself."""
Split = Literal["even", "speed"]


@dataclass(frozen=True, slots=True)
class TrainerRole:
    """Settings of a trainer that last over its terms. The fields are those of `Node`."""

    node: NodeContext
    records: Records
    luck: Callable[[], bytes]
    spread: Split
    ranks: Ranks | None
    threads: int
    checkpoint_every: int | None

    async def run(
        self,
        steps: int,
        *,
        first_samplers: int,
        folder: Path | None,
        writers: Iterable[str],
        promote: bool,
        early: bool,
        linger: float,
    ) -> None:
        """Run until the run has had `steps` steps: lead, or stand by for the leader."""
        from echo_node.trainer.standby import Standby  # noqa: PLC0415
        from echo_node.trainer.training_state import open_training_state  # noqa: PLC0415

        node = self.node
        async with (
            open_training_state(node.run, folder or node.folder, self.records, writers) as state,
            node.join(node.identity) as network,
        ):
            store = state.store
            standby = Standby(
                node.run,
                network,
                node.identity,
                store,
                state.folder,
                state.journal,
                uplink=node.uplink,
                downlink=node.downlink,
            )
            node.publish_report(
                RoleReport(
                    "trainer",
                    lambda: {
                        "version": chain_version(store),
                        "held": store.tip.message.version if store.tip else None,
                        "leading": False,
                        "clock": standby.clock,
                    },
                )
            )
            if promote:
                standby.promote()

            async def lead() -> None:
                async with self._open_loop(network, state) as loop:
                    await loop.work(steps, first_samplers=first_samplers, early=early, linger=linger)

            with serve_statements(network, node.identity, node.run.id, state.journal.sums):
                async with node.in_role(network, "trainer", "trainer", "verifier"):
                    await standby.take_turns(lead)

    @asynccontextmanager
    async def _open_loop(self, network: Network, state: TrainingState) -> AsyncGenerator[TrainerLoop]:
        """Open the loop of a leading trainer, for one term."""
        from echo_node.trainer.loop import TrainerLoop  # noqa: PLC0415
        from echo_node.trainer.recovery import CHECKPOINT_EVERY  # noqa: PLC0415
        from echo_node.trainer.verdict_policy import VerdictPolicy  # noqa: PLC0415
        from echo_node.trainer.work_split import SpeedSplit  # noqa: PLC0415

        node = self.node
        async with (
            self.open_step() as step,
            self._open_own_check(state.store) as check,
            self._open_evaluator(state) as evaluator,
        ):
            loop = TrainerLoop(
                node.run,
                network,
                node.identity,
                step=step,
                publisher=Publisher(state.store, node.identity, luck=self.luck),
                records=self.records,
                journal=state.journal,
                policy=VerdictPolicy(node.run, node.identity, check=check),
                checkpoints=state.checkpoints,
                checkpoint_every=self.checkpoint_every or CHECKPOINT_EVERY,
                spread=SpeedSplit() if self.spread == "speed" else None,
                gate=node.gate,
                uplink=node.uplink,
                evaluator=evaluator,
            )
            node.publish_report(
                RoleReport(
                    "trainer",
                    lambda: {**loop.status(), "leading": True},
                    tokens=loop.groups.admission.tokens,
                    reputation=loop.groups.reputation,
                    members=loop.members,
                )
            )
            yield loop

    def open_step(self) -> AbstractAsyncContextManager[TrainStep]:
        """Open the optimiser step; under torchrun it is sharded, with rank 0 here."""
        from echo_node.trainer.distributed import Ranks  # noqa: PLC0415

        run = self.node.run
        opening = (self.ranks or Ranks()).open_step(
            run.folder,
            training_settings(run.manifest).step,
            threads=self.threads,
            device=self.node.allowance.device,
        )
        return enter_in_thread(opening)

    @asynccontextmanager
    async def _open_evaluator(self, state: TrainingState) -> AsyncGenerator[Evaluator | None]:
        """Yield what evaluates versions during the run, if its manifest asks for that.

        Its engine starts with the first evaluation.
        """
        from echo_node.trainer.evaluator import Evaluator  # noqa: PLC0415

        node = self.node
        settings = evaluation_settings(node.run.manifest)
        if settings is None:
            yield None
            return
        rows = min(AT_ONCE, settings.prompts)
        folder = state.folder if state.checkpoints is not None else None
        async with node.open_engine(node.best_class(), rows, self.threads, start=False) as engine:
            yield Evaluator(
                node.run, state.store, engine, settings, self.records, folder=folder, gate=node.gate
            )

    @asynccontextmanager
    async def _open_own_check(
        self, store: WeightsStore
    ) -> AsyncGenerator[Callable[[RolloutRecord], str | None] | None]:
        """Yield the trainer's own replay check of a group.

        It is needed under the verdict policy `self`, and where verifiers may disagree or be absent;
        in that case the engine starts with the first group to look at.
        """
        node = self.node
        verification, verifiers = node.run.manifest.verification, node.run.manifest.verifiers
        looks = verification.policy == "self" and verification.share > 0
        stands_in = verification.policy == "sampled" and verifiers
        if not looks and not stands_in and len(verifiers) < SEVERAL_VERIFIERS:
            yield None
            return
        async with node.open_engine("torch/f32", 1, self.threads, start=looks) as engine:
            yield Recheck(node.run, EngineSync(store, engine), node.evidence_folder).result_of
