"""Large blobs: our door against a bare blocking TLS 1.3 socket, and four throttled sources against one.

Both sides of the first pair move the same bytes on the loopback of this process, client and server in a thread each, into
a buffer of 1 MiB that is used again and again. Ours asks over the network for a token, dials, checks the pin and shows its
pass every time; the bare one dials and reads. The second pair is our whole download, hashed and in memory, from one source
and from four, each of which sends at most so many bytes a second.
"""

from __future__ import annotations

import json
import random
import socket
import ssl
import threading
from collections.abc import AsyncGenerator, Generator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager

import trio
from rich.console import Console
from rich.table import Table

from benchmarks.pairs import interleaved, median_ratio, median_times
from echo_node.net.base import Network
from echo_node.net.blobs.blobs import Blobs
from echo_node.net.blobs.bulk import open_port
from echo_node.net.blobs.bulk_reader import read_bulk
from echo_node.net.blobs.holders import Want
from echo_node.net.blobs.serving import BlobDesk
from echo_node.net.blobs.shelf import Shelf
from echo_node.net.blobs.tls import asking, door
from echo_node.net.memory import MemorySwarm
from echo_node.net.throttle import Uplink
from protocol import Identity, blob_id
from protocol.blob import Slice

MIB = 1024 * 1024
HERE = "127.0.0.1"
PAYLOAD_BYTES = 256 * MIB
SHARED_BYTES = 32 * MIB
THROTTLE = 12 * MIB
"""Bytes a second of each source: far less than this machine can move, so that it is the sources that are measured."""

Pairs = list[tuple[float, float]]


def bulk_over_tls() -> float:
    """Our throughput at the door, over that of a bare TLS socket with the same payload."""
    return median_ratio(_bulk_pairs())


def four_sources_over_one() -> float:
    """Our throughput from four throttled sources, over that from one of them."""
    return median_ratio(_source_pairs())


def _bulk_pairs() -> Pairs:
    payload = _random_bytes(PAYLOAD_BYTES)

    async def main() -> Pairs:
        async with _sources(1, payload, None) as (asker, peers):
            slices, portions = [Slice(blob_id(payload), 0, PAYLOAD_BYTES)], [MIB] * (PAYLOAD_BYTES // MIB)
            threads = trio.CapacityLimiter(1)
            got = 0

            def deliver(_number: int, data: memoryview) -> None:
                nonlocal got
                got += len(data)

            async def read() -> None:
                nonlocal got
                got = 0
                await read_bulk(asker, peers[0], slices, portions, deliver, threads=threads)
                assert got == PAYLOAD_BYTES

            def ours() -> None:
                trio.from_thread.run(read)

            with _bare_server(payload) as port:
                return await trio.to_thread.run_sync(interleaved, ours, lambda: _bare_read(port), 1)

    return trio.run(main)


@contextmanager
def _bare_server(payload: bytes) -> Generator[int]:
    """What anybody would write: a thread that accepts, wraps and sends all of it."""
    with socket.create_server((HERE, 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    plain, _ = listener.accept()
                except OSError:
                    return
                with door().context.wrap_socket(plain, server_side=True) as connection:
                    view = memoryview(payload)
                    for at in range(0, len(view), MIB):
                        connection.sendall(view[at : at + MIB])

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def _bare_read(port: int) -> None:
    got, buffer = 0, memoryview(bytearray(MIB))
    with socket.create_connection((HERE, port)) as plain, asking().wrap_socket(plain) as connection:
        assert connection.version() == "TLSv1.3"
        while got < PAYLOAD_BYTES:
            count = connection.recv_into(buffer)
            assert count
            got += count


def _source_pairs() -> Pairs:
    shared = _random_bytes(SHARED_BYTES)

    async def main() -> Pairs:
        async with _sources(4, shared, THROTTLE) as (asker, peers):
            blob = blob_id(shared)

            async def fetch(named: list[bytes]) -> None:
                blobs = Blobs(asker)
                found = await blobs.fetch([Want(blob, SHARED_BYTES)], named=named)
                assert found[blob] == shared

            def ours() -> None:
                trio.from_thread.run(fetch, peers)

            def one() -> None:
                trio.from_thread.run(fetch, peers[:1])

            return await trio.to_thread.run_sync(interleaved, ours, one, 1)

    return trio.run(main)


@asynccontextmanager
async def _sources(
    count: int, data: bytes, throttle: float | None
) -> AsyncGenerator[tuple[Network, list[bytes]]]:
    """A node that asks, and so many that hold some bytes, with doors on the loopback."""
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        swarm = await enter(MemorySwarm(address=HERE))
        asker = await enter(swarm.join(Identity(b"a" * 32)))
        peers = []
        for number in range(1, count + 1):
            network = await enter(swarm.join(Identity(bytes([number]) * 32)))
            shelf, uplink = Shelf(), Uplink(each=throttle)
            shelf.keep(b"all", {blob_id(data): data})
            port = await enter(open_port(network, shelf, uplink, host=HERE))
            stack.enter_context(BlobDesk(network, shelf, uplink, port).serve())
            peers.append(network.public)
        yield asker, peers


def _random_bytes(size: int) -> bytes:
    return random.Random(1).randbytes(16 * MIB) * (size // (16 * MIB))


def main() -> None:
    table = Table(title=f"Medians of 7 pairs; {ssl.OPENSSL_VERSION}")
    for column in ("", "bytes", "ours MB/s", "other MB/s", "ratio"):
        table.add_column(column, justify="right" if column else "left")
    figures = {}
    for what, pairs, size in (
        ("bulk_over_tls", _bulk_pairs(), PAYLOAD_BYTES),
        ("four_sources_over_one", _source_pairs(), SHARED_BYTES),
    ):
        mine, other = median_times(pairs)
        figures[what] = round(median_ratio(pairs), 3)
        rates = (f"{size / mine / 1e6:.0f}", f"{size / other / 1e6:.0f}")
        table.add_row(what, f"{size:,}", *rates, f"{figures[what]:.2f}")
    Console().print(table)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
