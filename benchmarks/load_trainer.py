"""Trainer process of the load benchmark: a paused node on a real network and disk.

Beside it stand the instruments: bytes that came in at its sockets, the time of its processor, and a
look at where that goes.
"""

from __future__ import annotations

import resource
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any, Final

import trio

from benchmarks.load_profile import Watching
from benchmarks.load_run import Orders, identity, obey, open_run, read_orders, say, swarm_settings
from echo_node.contract.sandbox import JailedContract
from echo_node.net.base import Network
from echo_node.net.libp2p import Libp2pNetwork, join_swarm
from echo_node.node import Node
from echo_node.runs.run import Run
from echo_node.runtime.pause_gate import PauseGate
from echo_node.telemetry.metrics import Records
from protocol import Identity

FOREVER: Final = 10**9


class Wire:
    """Bytes that came in over every TCP connection of this process, below the encryption."""

    def __init__(self) -> None:
        self.bytes_in = 0
        receive = trio.SocketStream.receive_some

        async def counted(stream: trio.SocketStream, most: int | None = None) -> bytes | bytearray:
            data = await receive(stream, most)
            self.bytes_in += len(data)
            return data

        trio.SocketStream.receive_some = counted  # type: ignore[method-assign]


class Instruments:
    """Measurements that the benchmark takes of a working trainer."""

    def __init__(self, run: Run, node: Node, wire: Wire) -> None:
        self._run = run
        self._node = node
        self._wire = wire
        self.network: Libp2pNetwork | None = None
        self._watching: Watching | None = None
        self._scored: dict[str, int] = {}

    @asynccontextmanager
    async def join(self, who: Identity, seeds: tuple[str, ...]) -> AsyncGenerator[Network]:
        async with join_swarm(who, swarm_settings(seeds)) as network:
            self.network = network
            say({"addresses": network.addresses, "public": network.public.hex()})
            yield network

    async def mark(self, *, watch: bool = False, stop: bool = False) -> dict[str, Any]:
        """Return the counters. `watch` starts the profiler; `stop` ends it and adds its shares."""
        assert self.network is not None
        spent = self._watching.stop() if stop and self._watching else {}
        self._watching = Watching() if watch else None
        own = resource.getrusage(resource.RUSAGE_SELF)
        status = dict(self._node.status())
        return {
            "at": time.monotonic(),
            "cpu": own.ru_utime + own.ru_stime,
            "jail_cpu": _jail_seconds(self._run),
            "bytes_in": self._wire.bytes_in,
            "waiting": status.get("waiting", 0),
            "version": status.get("version"),
            "dropped": status.get("dropped", {}),
            "counts": dict(self.network.counts()),
            "mutes": len(self.network.mutes()),
            "spent": spent,
        }


def _jail_seconds(run: Run) -> float:
    """Return the CPU seconds of the contract's processes."""
    assert isinstance(run.contract, JailedContract)
    total = 0.0
    for seat in run.contract.sandbox._workers:  # noqa: SLF001 - an instrument
        if seat.pid is not None and (stat := Path(f"/proc/{seat.pid}/stat")).exists():
            fields = stat.read_text().rpartition(")")[2].split()
            total += (int(fields[11]) + int(fields[12])) / 100
    return total


async def work(given: Orders) -> None:
    wire = Wire()
    gate = PauseGate()
    gate.close("load")
    with closing(open_run(jailed=True)) as run:
        async with trio.open_nursery() as nursery:
            node = Node(
                run,
                identity("trainer"),
                lambda who: instruments.join(who, given.seeds),
                folder=Path(given.folder),
                gate=gate,
            )
            instruments = Instruments(run, node, wire)

            async def lead() -> None:
                await node.train(FOREVER, records=Records(), first_samplers=given.samplers, early=True)

            nursery.start_soon(lead)
            await obey({"mark": instruments.mark})
            nursery.cancel_scope.cancel()


if __name__ == "__main__":
    trio.run(work, read_orders())
