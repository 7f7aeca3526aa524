"""Sampler of a node: engine, puller, outbox and ledger around a SamplerLoop."""

from __future__ import annotations

from contextlib import nullcontext

from echo_node import __version__
from echo_node.election.leader_monitor import LeaderMonitor
from echo_node.engine.base import Engine
from echo_node.net.outbox.outbox import open_outbox
from echo_node.node.context import NodeContext
from echo_node.sampler.ledger_sync import open_ledger_sync
from echo_node.sampler.loop import SamplerLoop
from echo_node.telemetry.role_report import RoleReport


async def run_sampler(
    node: NodeContext,
    *,
    slots_per_call: int,
    engine: Engine | None,
    engine_class: str | None,
    threads: int | None,
) -> None:
    """Run as a sampler until cancelled.

    Without an engine, one is started in its own process: of the class named, or the fastest that
    the run allows.
    """
    run = node.run
    chosen_class = engine_class or (node.best_class() if engine is None else "")
    async with (
        node.open_engine(chosen_class, slots_per_call * run.manifest.sampling.group_size, threads)
        if engine is None
        else nullcontext(engine) as chosen,
        node.join(node.identity) as network,
        node.open_store(network) as store,
        open_outbox(node.folder / "outbox.sqlite" if node.folder else None) as outbox,
        open_ledger_sync(node.folder, run, node.identity) as ledger_sync,
    ):
        puller = node.puller(network, store)
        watch = LeaderMonitor(network, puller.chain, run.manifest.terms, times=node.heartbeat_times)
        loop = SamplerLoop(
            run,
            network,
            node.identity,
            chosen,
            puller,
            outbox,
            slots_per_call=slots_per_call,
            agent=f"echo-node/{__version__}",
            lease=watch.lease,
            gate=node.gate,
            ledger_sync=ledger_sync,
        )
        node.publish_report(
            RoleReport("sampler", lambda: {**loop.status(), "clock": watch.clock}, tokens=loop.tokens)
        )
        async with watch.work(), node.in_role(network, "sampler", "trainer", "verifier"):
            await loop.work()
