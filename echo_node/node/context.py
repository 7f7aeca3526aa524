"""Parts shared by every role: run, key, folder, limits, store, engines."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from echo_node.election.heartbeat_times import HEARTBEATS
from echo_node.engine.base import Engine
from echo_node.engine.engine_classes import best_class
from echo_node.net.base import Network
from echo_node.net.rate_limit import Throttle, UploadLimit
from echo_node.runs.engine_selection import open_worker
from echo_node.runs.role_presence import present_as
from echo_node.runs.run import Run
from echo_node.runtime.pause_gate import PauseGate
from echo_node.runtime.resource_limits import ResourceLimits
from echo_node.telemetry.role_report import RoleReport
from echo_node.weights.open_store import open_store
from echo_node.weights.puller import Puller
from echo_node.weights.store import WeightsStore
from protocol import Identity

Joining = Callable[[Identity], AbstractAsyncContextManager[Network]]


class NodeContext:
    """One node of a run, whatever its role."""

    def __init__(
        self,
        run: Run,
        identity: Identity,
        join: Joining,
        *,
        folder: Path | None,
        gate: PauseGate,
        allowance: ResourceLimits,
    ) -> None:
        self.run = run
        self.identity = identity
        self.join = join
        self.folder = folder
        self.gate = gate
        self.allowance = allowance
        self.uplink = UploadLimit(allowance.up)
        self.downlink = Throttle(allowance.down)
        self._report = RoleReport()

    @property
    def report(self) -> RoleReport:
        """Report of the running role; an empty one before the role has begun."""
        return self._report

    def publish_report(self, report: RoleReport) -> None:
        """Show the report of the role that runs from now on."""
        self._report = report

    @property
    def heartbeat_times(self) -> Path | None:
        """File with the times of the leader's last heartbeats."""
        return self.folder / HEARTBEATS if self.folder else None

    @property
    def evidence_folder(self) -> Path | None:
        """Folder of the evidence on dishonest groups."""
        return self.folder / "condemned" if self.folder else None

    def open_store(self, network: Network) -> AbstractAsyncContextManager[WeightsStore]:
        """Open the weights store of the run."""
        folder = self.folder / "weights" if self.folder else None
        return open_store(
            folder, self.run.rules, network, model=self.run.folder, manifest=self.run.sealed_manifest
        )

    def puller(self, network: Network, store: WeightsStore) -> Puller:
        """Return a puller within the node's bandwidth limits."""
        return Puller(
            network,
            store,
            uplink=self.uplink,
            downlink=self.downlink,
            files=self.run.files(),
            versions=self.run.manifest.sync.staleness + 2,
        )

    def best_class(self) -> str:
        """Return the fastest engine class of this machine that the run allows."""
        return best_class(
            {tolerance.engine for tolerance in self.run.manifest.engines}, self.allowance.device
        )

    def open_engine(
        self, engine_class: str, completions: int, threads: int | None, *, start: bool = True
    ) -> AbstractAsyncContextManager[Engine]:
        """Open an engine of this run in its own process, and close it at the end."""
        return open_worker(
            self.run, self.allowance, engine_class, completions=completions, threads=threads, start=start
        )

    def in_role(self, network: Network, role: str, *needed: str) -> AbstractAsyncContextManager[None]:
        """Announce the role, serve the manifest, and stay connected to the roles it needs."""
        return present_as(role, self.run, network, needed=needed, folder=self.folder)


def chain_version(store: WeightsStore) -> int | None:
    """Return the newest version of the chain as this node knows it, if there is one."""
    tip = store.follower.tip
    return tip.message.version if tip else None
