"""Verifier of a node: engine, puller, votes and ledger around a VerifierLoop.

The engine scores by prefill; the puller is that of the weights.
"""

from __future__ import annotations

import tempfile
from contextlib import nullcontext
from pathlib import Path

from echo_node.credit.ledger import Entry, Ledger
from echo_node.credit.statement_server import ledger_sums, serve_statements
from echo_node.election.elector import VoteLog
from echo_node.election.leader_monitor import LeaderMonitor
from echo_node.engine.base import Engine
from echo_node.errors import ConfigError
from echo_node.node.context import NodeContext, chain_version
from echo_node.rollouts.record import RolloutRecord
from echo_node.telemetry.role_report import RoleReport
from echo_node.verifier.loop import VerifierLoop
from protocol import Opened, Verdict


async def run_verifier(
    node: NodeContext, *, engine: Engine | None, threads: int | None, ledger: Ledger | None
) -> None:
    """Run as a verifier until cancelled; the manifest must name this node's key.

    Without an engine, torch/f32 is started. Verdicts are recorded in the ledger.
    """
    run = node.run
    if node.identity.public not in run.manifest.verifiers:
        raise ConfigError("this key is none of the run's verifiers", advice="its author must name it")
    async with (
        node.open_engine("torch/f32", run.manifest.sampling.group_size, threads)
        if engine is None
        else nullcontext(engine) as scoring_engine,
        node.join(node.identity) as network,
        node.open_store(network) as store,
    ):

        def record(group: RolloutRecord, verdict: Opened[Verdict]) -> None:
            head = store.find(group.message.heads[0])
            if ledger is not None and head is not None:
                ledger.verdict(verdict, Entry.of(group, run.id, head.message.version))

        puller = node.puller(network, store)
        loop = VerifierLoop(
            run,
            network,
            node.identity,
            scoring_engine,
            puller,
            on_verdict=record,
            gate=node.gate,
            evidence_folder=node.evidence_folder,
        )
        with tempfile.TemporaryDirectory(prefix="echo-votes-") as temporary:
            votes = VoteLog((node.folder or Path(temporary)) / "votes", node.identity, run.id)
            watch = LeaderMonitor(
                network,
                puller.chain,
                run.manifest.terms,
                votes=votes,
                held=lambda: store.tip,
                times=node.heartbeat_times,
            )
            node.publish_report(
                RoleReport(
                    "verifier",
                    lambda: {
                        "version": chain_version(store),
                        "verdicts": dict(sorted(loop.results.items())),
                        "inventories": dict(sorted(loop.inventories.counts.items())),
                        "passed_over": loop.selection.passed_over,
                        "paused": list(node.gate.reasons),
                        "clock": watch.clock,
                    },
                    verdicts=loop.results,
                )
            )
            sums = ledger_sums(ledger, network.public, run.id) if ledger else None
            with serve_statements(network, node.identity, run.id, sums) if sums else nullcontext():
                async with watch.work(), node.in_role(network, "verifier", "trainer"):
                    await loop.work()
