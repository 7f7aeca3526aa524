"""A node: an identity, a network and one role in a run.

A role owns its tasks: leaving `sample`, `verify` or `train` ends them all.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from echo_node.credit.ledger import Ledger
from echo_node.engine.base import Engine
from echo_node.net.base import Mute, Network
from echo_node.node.context import Joining, NodeContext
from echo_node.node.sampler_role import run_sampler
from echo_node.node.trainer_role import Split, TrainerRole
from echo_node.node.verifier_role import run_verifier
from echo_node.runs.run import Run
from echo_node.runtime.pause_gate import PauseGate
from echo_node.runtime.resource_limits import EVERYTHING, ResourceLimits
from echo_node.telemetry.metrics import Rate, Records
from protocol import Identity, Manifest

if TYPE_CHECKING:
    from echo_node.trainer.distributed import Ranks


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
        spread: Split = "even",
        gate: PauseGate | None = None,
        allowance: ResourceLimits = EVERYTHING,
        ranks: Ranks | None = None,
    ) -> None:
        self._context = NodeContext(
            run, identity, join, folder=folder, gate=gate or PauseGate(), allowance=allowance
        )
        self._luck = luck
        self._spread: Split = spread
        self._ranks = ranks

    def status(self) -> Mapping[str, Any]:
        """Return the role's figures as plain values; empty before the role has begun."""
        return self._context.report.status()

    @property
    def tokens(self) -> Rate:
        """Tokens sampled or admitted per second."""
        return self._context.report.tokens

    @property
    def verdicts(self) -> Counter[str]:
        """A verifier's verdicts, by result."""
        return self._context.report.verdicts

    def swarm(self, network: Network) -> list[dict[str, Any]]:
        """List the run's peers: this node, manifest keys, samplers, connections."""
        return self._context.report.peers(self._context.identity.public, self.manifest, network)

    def mutes(self, network: Network) -> Mapping[bytes, Mute]:
        """Return all peers that are muted now, by the role or by the network."""
        return self._context.report.mutes(network)

    @property
    def peer_id(self) -> str:
        return self._context.identity.peer_id

    @property
    def manifest(self) -> Manifest:
        """The run's manifest."""
        return self._context.run.manifest

    def best_class(self) -> str:
        """Return the fastest engine class of this machine that the run allows."""
        return self._context.best_class()

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
        await run_sampler(
            self._context,
            slots_per_call=slots_per_call,
            engine=engine,
            engine_class=engine_class,
            threads=threads,
        )

    async def verify(
        self, *, engine: Engine | None = None, threads: int | None = None, ledger: Ledger | None = None
    ) -> None:
        """Run as a verifier until cancelled; the manifest must name this node's key.

        Without an engine, torch/f32 is started. Verdicts are recorded in the ledger.
        """
        await run_verifier(self._context, engine=engine, threads=threads, ledger=ledger)

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
        """Run as a trainer for `steps` steps of the run: lead, or stand by.

        Weights, journal, checkpoints and records are in `folder` (by default the node's own), from
        which a restart recovers. `promote` is the operator's decision to lead where there are too
        few electors for an election. `writers` are names of `echo_node.telemetry.exporters`;
        `early` and `linger` are those of `TrainerLoop.work`.
        """
        role = TrainerRole(
            self._context,
            records,
            luck=self._luck,
            spread=self._spread,
            ranks=self._ranks,
            threads=threads,
            checkpoint_every=checkpoint_every,
        )
        await role.run(
            steps,
            first_samplers=first_samplers,
            folder=folder,
            writers=writers,
            promote=promote,
            early=early,
            linger=linger,
        )
