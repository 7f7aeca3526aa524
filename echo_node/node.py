"""Composition root: one node with an identity, a network and a role in a run.

    sample   engine -> SamplerLoop -> outbox; the puller follows the weights chain
    verify   VerifierLoop with a torch engine -> signed verdicts, ledger
    train    Standby until elected -> TrainerLoop -> Publisher -> WeightsSeeder

A role owns its tasks: leaving `sample`, `verify` or `train` ends them all.
"""

from __future__ import annotations

import secrets
import tempfile
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from echo_node import __version__
from echo_node.credit.ledger import Entry, Ledger
from echo_node.credit.statement_server import ledger_sums, serve_statements
from echo_node.election.elector import VoteLog
from echo_node.election.heartbeat_times import HEARTBEATS
from echo_node.election.leader_monitor import LeaderMonitor
from echo_node.engine.base import Engine
from echo_node.engine.engine_classes import best_class
from echo_node.errors import ConfigError
from echo_node.net.base import Mute, Network
from echo_node.net.outbox.outbox import open_outbox
from echo_node.net.rate_limit import Throttle, UploadLimit
from echo_node.rollouts.record import RolloutRecord
from echo_node.runs.engine_selection import open_worker
from echo_node.runs.role_presence import present_as
from echo_node.runs.run import Run
from echo_node.runtime.pause_gate import PauseGate
from echo_node.runtime.resource_limits import EVERYTHING, ResourceLimits
from echo_node.runtime.threads import enter_in_thread
from echo_node.sampler.ledger_sync import open_ledger_sync
from echo_node.sampler.loop import SamplerLoop
from echo_node.telemetry.metrics import Rate, Records
from echo_node.telemetry.role_report import RoleReport
from echo_node.verifier.loop import VerifierLoop
from echo_node.verifier.recheck import Recheck
from echo_node.weights.engine_sync import EngineSync
from echo_node.weights.open_store import open_store
from echo_node.weights.publisher import Publisher
from echo_node.weights.puller import Puller
from echo_node.weights.store import WeightsStore
from protocol import Identity, Manifest, Opened, Verdict

if TYPE_CHECKING:
    from echo_node.trainer.distributed import Ranks
    from echo_node.trainer.loop import TrainerLoop
    from echo_node.trainer.step import TrainStep
    from echo_node.trainer.training_state import TrainingState

SEVERAL_VERIFIERS: Final = 2
"""Verifiers from which on two can disagree, so that the trainer may have to look itself."""
Joining = Callable[[Identity], AbstractAsyncContextManager[Network]]


class Node:
    """A peer of a run.

    join    opens the network with this node's key, such as `MemorySwarm.join`
    luck    random bytes of the next head, for a trainer
    folder  where the node's state is kept; without one it is lost at the end
    spread  how a sequential trainer splits a batch: "even" repeats exactly, "speed" measures
    gate    pauses the role while it is closed
    ranks   the torchrun processes of a trainer, if it has several
    """

    def __init__(
        self,
        run: Run,
        identity: Identity,
        join: Joining,
        *,
        luck: Callable[[], bytes] = lambda: secrets.token_bytes(32),
        folder: Path | None = None,
        spread: Literal["even", "speed"] = "even",
        gate: PauseGate | None = None,
        allowance: ResourceLimits = EVERYTHING,
        ranks: Ranks | None = None,
    ) -> None:
        self._run = run
        self._identity = identity
        self._join = join
        self._luck = luck
        self._folder = folder
        self._spread = spread
        self._gate = gate or PauseGate()
        self._allowance = allowance
        self._ranks = ranks
        self._uplink = UploadLimit(allowance.up)
        self._downlink = Throttle(allowance.down)
        self._report = RoleReport()

    def status(self) -> Mapping[str, Any]:
        """Return the role's figures as plain values; empty before the role has begun."""
        return self._report.status()

    @property
    def tokens(self) -> Rate:
        """Tokens sampled or admitted per second."""
        return self._report.tokens

    @property
    def verdicts(self) -> Counter[str]:
        """A verifier's verdicts, by result."""
        return self._report.verdicts

    def swarm(self, network: Network) -> list[dict[str, Any]]:
        """List the peers of the run: this node, the manifest's keys, samplers, connections."""
        return self._report.peers(self._identity.public, self._run.manifest, network)

    def mutes(self, network: Network) -> Mapping[bytes, Mute]:
        """Return all peers that are muted now, by the role or by the network."""
        return self._report.mutes(network)

    @property
    def peer_id(self) -> str:
        return self._identity.peer_id

    @property
    def manifest(self) -> Manifest:
        """The run's manifest."""
        return self._run.manifest

    async def sample(
        self,
        *,
        slots_per_call: int = 16,
        engine: Engine | None = None,
        engine_class: str | None = None,
        threads: int | None = None,
    ) -> None:
        """Run as a sampler until cancelled.

        Without an engine, one is started in its own process: of the class named, or the fastest
        that the run allows.
        """
        chosen_class = engine_class or (self.best_class() if engine is None else "")
        async with (
            self._worker(chosen_class, slots_per_call * self._run.manifest.sampling.group_size, threads)
            if engine is None
            else nullcontext(engine) as chosen,
            self._join(self._identity) as network,
            self._store(network) as store,
            open_outbox(self._folder / "outbox.sqlite" if self._folder else None) as outbox,
            open_ledger_sync(self._folder, self._run, self._identity) as ledger_sync,
        ):
            puller = self._puller(network, store)
            watch = LeaderMonitor(
                network, puller.chain, self._run.manifest.terms, times=self._heartbeat_times
            )
            loop = SamplerLoop(
                self._run,
                network,
                self._identity,
                chosen,
                puller,
                outbox,
                slots_per_call=slots_per_call,
                agent=f"echo-node/{__version__}",
                lease=watch.lease,
                gate=self._gate,
                ledger_sync=ledger_sync,
            )
            self._report = RoleReport(
                "sampler", lambda: {**loop.status(), "clock": watch.clock}, tokens=loop.tokens
            )
            async with watch.work(), self._in_role(network, "sampler", "trainer", "verifier"):
                await loop.work()

    async def verify(
        self, *, engine: Engine | None = None, threads: int | None = None, ledger: Ledger | None = None
    ) -> None:
        """Run as a verifier until cancelled; the manifest must name this node's key.

        Without an engine, torch/f32 is started. Verdicts are recorded in the ledger.
        """
        if self._identity.public not in self._run.manifest.verifiers:
            raise ConfigError("this key is none of the run's verifiers", advice="its author must name it")
        async with (
            self._worker("torch/f32", self._run.manifest.sampling.group_size, threads)
            if engine is None
            else nullcontext(engine) as scoring_engine,
            self._join(self._identity) as network,
            self._store(network) as store,
        ):

            def record(group: RolloutRecord, verdict: Opened[Verdict]) -> None:
                head = store.find(group.message.heads[0])
                if ledger is not None and head is not None:
                    ledger.verdict(verdict, Entry.of(group, self._run.id, head.message.version))

            puller = self._puller(network, store)
            loop = VerifierLoop(
                self._run,
                network,
                self._identity,
                scoring_engine,
                puller,
                on_verdict=record,
                gate=self._gate,
                evidence_folder=self._evidence_folder,
            )
            with tempfile.TemporaryDirectory(prefix="echo-votes-") as temporary:
                votes = VoteLog((self._folder or Path(temporary)) / "votes", self._identity, self._run.id)
                watch = LeaderMonitor(
                    network,
                    puller.chain,
                    self._run.manifest.terms,
                    votes=votes,
                    held=lambda: store.tip,
                    times=self._heartbeat_times,
                )
                self._report = RoleReport(
                    "verifier",
                    lambda: {
                        "version": _version_of(store),
                        "verdicts": dict(sorted(loop.results.items())),
                        "inventories": dict(sorted(loop.inventories.counts.items())),
                        "paused": list(self._gate.reasons),
                        "clock": watch.clock,
                    },
                    verdicts=loop.results,
                )
                sums = ledger_sums(ledger, network.public, self._run.id) if ledger else None
                with serve_statements(network, self._identity, self._run.id, sums) if sums else nullcontext():
                    async with watch.work(), self._in_role(network, "verifier", "trainer"):
                        await loop.work()

    async def train(
        self,
        steps: int,
        *,
        records: Records,
        first_samplers: int = 1,
        threads: int = 1,
        folder: Path | None = None,
        checkpoint_every: int | None = None,
        writers: Iterable[str] = (),
        promote: bool = False,
        early: bool = False,
        linger: float = 0.0,
    ) -> None:
        """Run as a trainer until the run has had `steps` steps: lead, or stand by for the leader.

        Weights, journal, checkpoints and records are in `folder` (by default the node's own), from
        which a restart recovers. `promote` is the operator's decision to lead where there are too
        few electors for an election. `writers` are names of `echo_node.telemetry.exporters`;
        `early` and `linger` are those of `TrainerLoop.work`.
        """
        from echo_node.trainer.standby import Standby  # noqa: PLC0415 - torch, which a sampler may lack
        from echo_node.trainer.training_state import open_training_state  # noqa: PLC0415

        async with (
            open_training_state(self._run, folder or self._folder, records, writers) as state,
            self._join(self._identity) as network,
        ):
            store = state.store
            standby = Standby(
                self._run,
                network,
                self._identity,
                store,
                state.folder,
                state.journal,
                uplink=self._uplink,
                downlink=self._downlink,
            )
            self._report = RoleReport(
                "trainer",
                lambda: {
                    "version": _version_of(store),
                    "held": store.tip.message.version if store.tip else None,
                    "leading": False,
                    "clock": standby.clock,
                },
            )
            if promote:
                standby.promote()

            async def lead() -> None:
                async with self._trainer_loop(network, state, records, threads, checkpoint_every) as loop:
                    await loop.work(steps, first_samplers=first_samplers, early=early, linger=linger)

            with serve_statements(network, self._identity, self._run.id, state.journal.sums):
                async with self._in_role(network, "trainer", "trainer", "verifier"):
                    await standby.take_turns(lead)

    @asynccontextmanager
    async def _trainer_loop(
        self,
        network: Network,
        state: TrainingState,
        records: Records,
        threads: int,
        checkpoint_every: int | None,
    ) -> AsyncGenerator[TrainerLoop]:
        """Open the loop of a leading trainer, for one term."""
        from echo_node.trainer.loop import TrainerLoop  # noqa: PLC0415 - torch, which a sampler may lack
        from echo_node.trainer.recovery import CHECKPOINT_EVERY  # noqa: PLC0415
        from echo_node.trainer.verdict_policy import VerdictPolicy  # noqa: PLC0415
        from echo_node.trainer.work_split import SpeedSplit  # noqa: PLC0415

        async with self._step(threads) as step, self._own_check(state.store, threads) as check:
            loop = TrainerLoop(
                self._run,
                network,
                self._identity,
                step=step,
                publisher=Publisher(state.store, self._identity, luck=self._luck),
                records=records,
                journal=state.journal,
                policy=VerdictPolicy(self._run, self._identity, check=check),
                checkpoints=state.checkpoints,
                checkpoint_every=checkpoint_every or CHECKPOINT_EVERY,
                spread=SpeedSplit() if self._spread == "speed" else None,
                gate=self._gate,
                uplink=self._uplink,
            )
            self._report = RoleReport(
                "trainer",
                lambda: {**loop.status(), "leading": True},
                tokens=loop.tokens,
                reputation=loop.reputation,
                members=loop.members,
            )
            yield loop

    def _step(self, threads: int) -> AbstractAsyncContextManager[TrainStep]:
        """Open the optimiser step; under torchrun it is sharded, and this process is rank 0."""
        from echo_node.runs.algorithm import training_settings  # noqa: PLC0415
        from echo_node.trainer.distributed import Ranks  # noqa: PLC0415 - torch, which a sampler may lack

        settings = training_settings(self._run.manifest).step
        opening = (self._ranks or Ranks()).open_step(
            self._run.folder, settings, threads=threads, device=self._allowance.device
        )
        return enter_in_thread(opening)

    @asynccontextmanager
    async def _own_check(
        self, store: WeightsStore, threads: int
    ) -> AsyncGenerator[Callable[[RolloutRecord], str | None] | None]:
        """Yield the trainer's own replay check of a group.

        It is needed under the verdict policy `self`, and where several verifiers may disagree; in
        that case the engine starts with the first dispute.
        """
        verification = self._run.manifest.verification
        looks = verification.policy == "self" and verification.share > 0
        if not looks and len(self._run.manifest.verifiers) < SEVERAL_VERIFIERS:
            yield None
            return
        async with self._worker("torch/f32", 1, threads, start=looks) as engine:
            yield Recheck(self._run, EngineSync(store, engine), self._evidence_folder).result_of

    @property
    def _heartbeat_times(self) -> Path | None:
        """File with the times of the leader's last heartbeats."""
        return self._folder / HEARTBEATS if self._folder else None

    @property
    def _evidence_folder(self) -> Path | None:
        """Folder of the evidence on dishonest groups."""
        return self._folder / "condemned" if self._folder else None

    def _store(self, network: Network) -> AbstractAsyncContextManager[WeightsStore]:
        """Open the weights store of the run."""
        folder = self._folder / "weights" if self._folder else None
        return open_store(
            folder, self._run.rules, network, model=self._run.folder, manifest=self._run.sealed_manifest
        )

    def _puller(self, network: Network, store: WeightsStore) -> Puller:
        """Return a puller within the node's bandwidth limits."""
        return Puller(
            network,
            store,
            uplink=self._uplink,
            downlink=self._downlink,
            files=self._run.files(),
            versions=self._run.manifest.sync.staleness + 2,
        )

    def best_class(self) -> str:
        """Return the fastest engine class of this machine that the run allows."""
        return best_class(
            {tolerance.engine for tolerance in self._run.manifest.engines}, self._allowance.device
        )

    def _in_role(self, network: Network, role: str, *needed: str) -> AbstractAsyncContextManager[None]:
        """Announce the role, serve the manifest, and stay connected to the roles it needs."""
        return present_as(role, self._run, network, needed=needed, folder=self._folder)

    def _worker(
        self, engine_class: str, completions: int, threads: int | None, *, start: bool = True
    ) -> AbstractAsyncContextManager[Engine]:
        """Open an engine of this run in its own process, and close it at the end."""
        return open_worker(
            self._run, self._allowance, engine_class, completions=completions, threads=threads, start=start
        )


def _version_of(store: WeightsStore) -> int | None:
    tip = store.follower.tip
    return tip.message.version if tip else None
