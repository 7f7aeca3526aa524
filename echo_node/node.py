"""Composition root: one node with an identity, a network and a role in a run.

    sample   engine -> SamplerLoop -> outbox; the puller follows the weights chain
    verify   VerifierLoop with a torch engine -> signed verdicts, ledger
    train    Standby until elected -> TrainerLoop -> Publisher -> WeightsSeeder

A role owns its tasks: leaving `sample`, `verify` or `train` ends them all.
"""

from __future__ import annotations

import logging
import secrets
import tempfile
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    ExitStack,
    asynccontextmanager,
    nullcontext,
)
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import trio

from echo_node import __version__
from echo_node.credit.ledger import Entry, Ledger
from echo_node.credit.statement_server import ledger_sums, serve_statements
from echo_node.election.elector import VoteLog
from echo_node.election.heartbeat_times import HEARTBEATS
from echo_node.election.leader_monitor import LeaderMonitor
from echo_node.engine.base import Engine
from echo_node.engine.engine_classes import EngineSpec, best_class
from echo_node.engine.worker.client import WorkerEngine
from echo_node.errors import ConfigError, ContractError, EngineError, StoreError
from echo_node.net.base import Mute, Network
from echo_node.net.discovery.role_peers import SEVERAL, RolePeers
from echo_node.net.outbox.outbox import Outbox, open_outbox
from echo_node.net.rate_limit import Throttle, UploadLimit
from echo_node.rollouts.record import RolloutRecord
from echo_node.runs.manifest_exchange import serve_manifest
from echo_node.runs.run import Run, read_model
from echo_node.runtime.pause_gate import PauseGate
from echo_node.runtime.reputation import PeerReputation, Reputations
from echo_node.runtime.resource_limits import EVERYTHING, ResourceLimits
from echo_node.runtime.threads import run_abandonable
from echo_node.sampler.ledger_sync import open_ledger_sync
from echo_node.sampler.loop import SamplerLoop
from echo_node.telemetry.exporters import open_writer
from echo_node.telemetry.metrics import Rate, Records
from echo_node.telemetry.step_db import StepDb, read_records
from echo_node.verifier.loop import VerifierLoop
from echo_node.verifier.recheck import Recheck
from echo_node.weights.engine_sync import EngineSync
from echo_node.weights.open_store import open_store
from echo_node.weights.publisher import Publisher
from echo_node.weights.puller import Puller
from echo_node.weights.store import WeightsStore
from echo_node.weights.store_metadata import write_metadata
from echo_node.weights.tensors import layout_of
from protocol import Identity, Manifest, Opened, Verdict, peer_id, topics

if TYPE_CHECKING:
    from echo_node.trainer.distributed import Ranks
    from echo_node.trainer.step import TrainStep

log = logging.getLogger(__name__)
MOST_ROWS: Final = 128
"""Completions that an engine samples at once."""
OPEN: Final = "open"
"""File in a trainer's folder of a run; while it exists, the run is listed as open."""
MOST_PEERS: Final = 500
"""Peers that one report of the swarm lists."""
Joining = Callable[[Identity], AbstractAsyncContextManager[Network]]


@dataclass(frozen=True, slots=True)
class RoleReport:
    """Figures of a running role."""

    role: str = "peer"
    status: Callable[[], Mapping[str, Any]] = dict
    """Current figures as plain values."""
    tokens: Rate = field(default_factory=Rate)
    """Tokens sampled or admitted per second."""
    verdicts: Counter[str] = field(default_factory=Counter)
    """A verifier's verdicts, by result."""
    reputation: PeerReputation = field(default_factory=Reputations)
    """The role's mute rules, beside those of the network."""
    members: Callable[[], Mapping[bytes, Mapping[str, Any]]] = dict
    """The samplers in the roster, with what is known of each."""


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
        manifest, members = self._run.manifest, self._report.members()
        connected, mutes = network.peers(), self.mutes(network)
        roles = dict.fromkeys(members, "sampler") | {self._identity.public: self._report.role}
        roles |= dict.fromkeys(manifest.verifiers, "verifier") | dict.fromkeys(manifest.trainers, "trainer")
        return [
            {
                "peer_id": peer_id(key),
                "role": roles.get(key, "peer"),
                "me": key == self._identity.public,
                "connected": key in connected or key == self._identity.public,
                "muted": ", ".join(sorted(mutes[key].reasons)) if key in mutes else None,
                **members.get(key, {}),
            }
            for key in sorted({self._identity.public, *roles, *connected, *mutes})[:MOST_PEERS]
        ]

    def mutes(self, network: Network) -> Mapping[bytes, Mute]:
        """Return all peers that are muted now, by the role or by the network."""
        return {**self._report.reputation.mutes(), **network.mutes()}

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
            self._outbox() as outbox,
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
            async with watch.work(), self._in_role(network, "sampler", needed=("trainer", "verifier")):
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
                        "paused": list(self._gate.reasons),
                        "clock": watch.clock,
                    },
                    verdicts=loop.results,
                )
                statements = (
                    nullcontext()
                    if ledger is None
                    else serve_statements(
                        network,
                        self._identity,
                        self._run.id,
                        ledger_sums(ledger, network.public, self._run.id),
                    )
                )
                with statements:
                    async with watch.work(), self._in_role(network, "verifier", needed=("trainer",)):
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
        from echo_node.trainer.journal import open_journal  # noqa: PLC0415
        from echo_node.trainer.loop import TrainerLoop  # noqa: PLC0415 - torch, which a sampler may lack
        from echo_node.trainer.recovery import CHECKPOINT_EVERY  # noqa: PLC0415
        from echo_node.trainer.standby import Standby  # noqa: PLC0415
        from echo_node.trainer.verdict_policy import VerdictPolicy  # noqa: PLC0415
        from echo_node.trainer.work_split import SpeedSplit  # noqa: PLC0415

        layout = layout_of(read_model(self._run.folder))
        async with AsyncExitStack() as stack:
            place = folder or self._folder
            kept = place is not None
            if place is None:
                place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="echo-trainer-")))
            else:
                await trio.to_thread.run_sync(
                    write_metadata, place / "weights", self._run.sealed_manifest, layout
                )
            store = stack.enter_context(
                WeightsStore.open(place / "weights", self._run.rules, layout)
                if kept
                else WeightsStore.temporary(self._run.rules, layout)
            )
            journal = await stack.enter_async_context(
                open_journal(place / "journal.sqlite" if kept else None, self._run.id)
            )
            if kept:
                records.recall(read_records(place / "records.sqlite"))
                stack.enter_context(records.writing_to(StepDb(place / "records.sqlite")))
            for name in writers:
                writer = await run_abandonable(partial(open_writer, name, self._run.id.hex()[:16], place))
                stack.enter_context(records.writing_to(writer))
            network = await stack.enter_async_context(self._join(self._identity))
            standby = Standby(
                self._run,
                network,
                self._identity,
                store,
                place,
                journal,
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
                async with self._step(threads) as step, self._own_check(store, threads) as check:
                    loop = TrainerLoop(
                        self._run,
                        network,
                        self._identity,
                        step=step,
                        publisher=Publisher(store, self._identity, luck=self._luck),
                        records=records,
                        journal=journal,
                        policy=VerdictPolicy(self._run, self._identity, check=check),
                        checkpoints=place / "checkpoints" if kept else None,
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
                    await loop.work(steps, first_samplers=first_samplers, early=early, linger=linger)

            stack.enter_context(serve_statements(network, self._identity, self._run.id, journal.sums))
            await stack.enter_async_context(self._in_role(network, "trainer", needed=("trainer", "verifier")))
            await standby.take_turns(lead)

    @asynccontextmanager
    async def _step(self, threads: int) -> AsyncGenerator[TrainStep]:
        """Open the optimiser step; under torchrun it is sharded, and this process is rank 0."""
        from echo_node.runs.algorithm import training_settings  # noqa: PLC0415
        from echo_node.trainer.distributed import Ranks  # noqa: PLC0415 - torch, which a sampler may lack

        settings = training_settings(self._run.manifest).step
        opening = (self._ranks or Ranks()).open_step(
            self._run.folder, settings, threads=threads, device=self._allowance.device
        )
        step = await run_abandonable(opening.__enter__)
        with ExitStack() as stack:
            stack.push(opening.__exit__)  # as if it had been entered here, not in a thread
            yield step

    @asynccontextmanager
    async def _own_check(
        self, store: WeightsStore, threads: int
    ) -> AsyncGenerator[Callable[[RolloutRecord], str | None] | None]:
        """Yield the trainer's own replay check of a group, under the verdict policy `self`."""
        from echo_node.trainer.verdict_policy import UNDECIDED  # noqa: PLC0415

        verification = self._run.manifest.verification
        if verification.policy != "self" or verification.share <= 0:
            yield None
            return
        async with self._worker("torch/f32", 1, threads) as engine:
            recheck = Recheck(self._run, EngineSync(store, engine), self._evidence_folder)

            def check(group: RolloutRecord) -> str | None:
                try:
                    finding = recheck.check(group)
                except (ContractError, EngineError, StoreError) as error:  # of this node, not of the group
                    log.warning("group %s not checked: %s", group.id.hex()[:16], error)
                    return UNDECIDED
                if finding is None or (finding.breach and not finding.breach.sure):
                    return UNDECIDED
                return finding.breach.reason if finding.breach else None

            yield check

    @property
    def _heartbeat_times(self) -> Path | None:
        """File with the times of the leader's last heartbeats."""
        return self._folder / HEARTBEATS if self._folder else None

    @property
    def _evidence_folder(self) -> Path | None:
        """Folder of the evidence on dishonest groups."""
        return self._folder / "condemned" if self._folder else None

    @asynccontextmanager
    async def _store(self, network: Network) -> AsyncGenerator[WeightsStore]:
        """Open the weights store of the run."""
        folder = self._folder / "weights" if self._folder else None
        async with open_store(
            folder, self._run.rules, network, model=self._run.folder, manifest=self._run.sealed_manifest
        ) as store:
            yield store

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

    @asynccontextmanager
    async def _outbox(self) -> AsyncGenerator[Outbox]:
        """Open the outbox of groups that are not acknowledged yet."""
        with tempfile.TemporaryDirectory(prefix="echo-outbox-") as temporary:
            async with open_outbox((self._folder or Path(temporary)) / "outbox.sqlite") as outbox:
                yield outbox

    def best_class(self) -> str:
        """Return the fastest engine class of this machine that the run allows."""
        return best_class(
            {tolerance.engine for tolerance in self._run.manifest.engines}, self._allowance.device
        )

    @asynccontextmanager
    async def _in_role(self, network: Network, role: str, needed: Iterable[str]) -> AsyncGenerator[None]:
        """Announce the role, serve the manifest, and stay connected to the roles it needs."""
        keys = {topics.role_key(self._run.id, each): SEVERAL for each in needed}
        role_peers = RolePeers(network, announced=[topics.role_key(self._run.id, role)], needed=keys)

        def is_open() -> bool:
            return role == "trainer" and self._folder is not None and (self._folder / OPEN).exists()

        async with (
            serve_manifest(network, self._run.sealed_manifest, is_open),
            trio.open_nursery() as nursery,
        ):
            nursery.start_soon(role_peers.run)
            yield
            nursery.cancel_scope.cancel()

    @asynccontextmanager
    async def _worker(
        self, engine_class: str, completions: int, threads: int | None
    ) -> AsyncGenerator[Engine]:
        """Start an engine in its own process, and close it at the end."""
        rows = max(1, min(MOST_ROWS, completions))
        spec = EngineSpec(
            engine_class, self._run.folder, device=self._allowance.device, rows=rows, threads=threads
        )
        engine = WorkerEngine(spec, memory_bytes=self._allowance.memory)
        try:
            await run_abandonable(engine.start)
            yield engine
        finally:
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(engine.close)


def _version_of(store: WeightsStore) -> int | None:
    tip = store.follower.tip
    return tip.message.version if tip else None
