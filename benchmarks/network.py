"""Bulk port and streams against a bare TLS 1.3 socket, then a swarm of ten nodes.

The swarm is left alone first, to see what a quiet node costs; then nodes look for keys that others
have just announced; then eight of them gossip signed messages of 1 kB by the clock. All of it is on
one machine, over loopback.
"""

from __future__ import annotations

import json
import os
import secrets
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import trio
from rich.console import Console
from rich.table import Table

from benchmarks.bulk import bulk_over_tls, four_sources_over_one
from benchmarks.stream import stream_over_tls
from tests.net.processes import Place, start_nodes

NODES = 10
SETTLE_SECONDS = 35.0
"""After the start, until the tables are full and the refreshing has become rare."""
IDLE_SECONDS = 30.0
LOOKUPS = 40
GOSSIPERS = 8
PER_SECOND = 20
GOSSIP_SECONDS = 30
LATE_SECONDS = 10.0
"""After the last message, for those that are on their way."""


def main() -> None:
    ratios = {
        "stream_over_tls": stream_over_tls(),
        "bulk_over_tls": bulk_over_tls(),
        "four_sources_over_one": four_sources_over_one(),
    }
    swarm = trio.run(measure_swarm)
    table = Table(title="The network: medians of 7 interleaved pairs, then a swarm of ten processes")
    for column in ("", "measured", "wanted"):
        table.add_column(column, justify="right" if column else "left")
    for row in (
        ("one stream over a TLS socket", f"{ratios['stream_over_tls']:.2f}", "≥ 0.25"),
        ("bulk over a TLS socket", f"{ratios['bulk_over_tls']:.2f}", "≥ 0.75"),
        ("four throttled sources over one", f"{ratios['four_sources_over_one']:.2f}", "≥ 1.5"),
        (f"gossip lost, 8 nodes, {PER_SECOND}/s, {GOSSIP_SECONDS} s", f"{swarm['gossip_lost']}", "0"),
        ("gossip, median way", f"{swarm['gossip_p50_ms']:.1f} ms", ""),
        ("finding a new key, median", f"{swarm['dht_find_p50_ms']:.1f} ms", ""),
        ("a quiet node's share of a core", f"{swarm['idle_cpu_percent']:.2f} %", "≤ 3 %"),
        ("a quiet node's memory", f"{swarm['idle_rss_mb']:.0f} MB", ""),
    ):
        table.add_row(*row)
    Console().print(table)
    print(json.dumps({name: round(value, 3) for name, value in (ratios | swarm).items()}))


async def measure_swarm() -> dict[str, float]:
    async with start_nodes(NODES) as nodes:
        await trio.sleep(SETTLE_SECONDS)
        idle = await _idle(nodes[NODES // 2])
        find = await _find(nodes)
        gossip = await _gossip(nodes[:GOSSIPERS])
    return {**gossip, "dht_find_p50_ms": find, **idle}


async def _idle(node: Place) -> dict[str, float]:
    """Return the CPU time and the memory of one idle process."""
    before, began = _cpu_seconds(node.process.pid), time.monotonic()
    await trio.sleep(IDLE_SECONDS)
    spent, seconds = _cpu_seconds(node.process.pid) - before, time.monotonic() - began
    return {"idle_cpu_percent": 100 * spent / seconds, "idle_rss_mb": _resident_mb(node.process.pid)}


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _resident_mb(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


async def _find(nodes: Sequence[Place]) -> float:
    """Milliseconds until a node has found, and met, the one that announced a key."""
    took = []
    for n in range(LOOKUPS):
        provider, seeker = nodes[n % NODES], nodes[(n * 3 + 1) % NODES]
        if provider is seeker:
            continue
        key = secrets.token_hex(32)
        await provider.ask("provide", key=key)
        answer = await seeker.ask("find", key=key, count=1)
        assert answer["found"] == [provider.public], "the one that has it"
        took.append(answer["seconds"])
    return 1000 * statistics.median(took)


async def _gossip(nodes: Sequence[Place]) -> dict[str, float]:
    """Return the messages lost or doubled, and the median latency of the others."""
    interval, count = len(nodes) / PER_SECOND, GOSSIP_SECONDS * PER_SECOND // len(nodes)
    for node in nodes:
        await node.ask("subscribe", sealed=True)
    for node in nodes:
        await node.until("subscribers", lambda count: count == len(nodes) - 1)
    sent: dict[tuple[str, int], float] = {}

    async def flow(node: Place, start: float) -> None:
        within = GOSSIP_SECONDS + LATE_SECONDS
        for n, at in await node.ask("flow", start=start, interval=interval, count=count, within=within):
            sent[node.public, n] = at

    start = time.monotonic() + 1
    async with trio.open_nursery() as nursery:
        for n, node in enumerate(nodes):
            nursery.start_soon(flow, node, start + n * interval / len(nodes))
    wanted = count * (len(nodes) - 1)
    lost, ways = 0, []
    deadline = time.monotonic() + LATE_SECONDS
    for node in nodes:
        within = max(1.0, deadline - time.monotonic())
        with trio.move_on_after(within):
            await node.until("arrived", lambda arrived: len(arrived) >= wanted, within=2 * within)
        arrived = await node.ask("arrived")
        once = Counter((signer, n) for signer, n, _ in arrived)
        assert set(once.values()) <= {1}, "each message once"
        lost += wanted - len(once)
        ways += [at - sent[signer, n] for signer, n, at in arrived]
    return {"gossip_lost": lost, "gossip_p50_ms": 1000 * statistics.median(ways)}


if __name__ == "__main__":
    main()
