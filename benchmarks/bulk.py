"""Bulk port against a bare TLS 1.3 socket, and four throttled sources against one.

Nodes are libp2p hosts with bulk ports on the loopback, joined as `echo-node join` does, all in this
process. Both sides of the first pair move the same bytes, client and server in a thread each, into
a buffer of 1 MiB that is reused. Ours asks over Noise for a token, dials, checks the pin and
redeems the token every time; the bare one dials and reads. The second pair is a whole download,
hashed and in memory, from one source and from four with an upload limit each.
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
from echo_node.net.blobs.blob_registry import BlobRegistry
from echo_node.net.blobs.bulk_client import read_bulk
from echo_node.net.blobs.bulk_tls import client_tls, server_tls
from echo_node.net.blobs.client import BlobClient
from echo_node.net.blobs.providers import Want
from echo_node.net.blobs.server import BlobServer
from echo_node.net.libp2p import SwarmSettings, join_swarm
from echo_node.net.rate_limit import UploadLimit
from protocol import Identity, blob_id
from protocol.blob import Slice

MIB = 1024 * 1024
HERE = "127.0.0.1"
LISTEN = ("/ip4/127.0.0.1/tcp/0",)
CONNECT_SECONDS = 30
PAYLOAD_BYTES = 256 * MIB
SHARED_BYTES = 32 * MIB
THROTTLE = 12 * MIB
"""Upload limit of each source in bytes/s: far below what this machine can move."""

Pairs = list[tuple[float, float]]


def bulk_over_tls() -> float:
    """Return the bulk port's throughput over that of a bare TLS socket."""
    return median_ratio(_bulk_pairs())


def four_sources_over_one() -> float:
    """Return the throughput from four throttled sources over that from one."""
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
    """Serve the payload over a bare TLS socket in a thread; yields its port."""
    with socket.create_server((HERE, 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    plain, _ = listener.accept()
                except OSError:
                    return
                with server_tls().context.wrap_socket(plain, server_side=True) as connection:
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
    with socket.create_connection((HERE, port)) as plain, client_tls().wrap_socket(plain) as connection:
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
                blobs = BlobClient(asker)
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
    """Start a node that fetches and so many that hold the bytes; yields it and their keys."""
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        peers, addresses = [], []
        for number in range(1, count + 1):
            network = await enter(
                join_swarm(Identity(bytes([number]) * 32), SwarmSettings(listen=LISTEN, wanted=0))
            )
            registry, uplink = BlobRegistry(), UploadLimit(each=throttle)
            registry.keep(b"all", {blob_id(data): data})
            stack.enter_context(BlobServer(network, registry, uplink).serve())
            peers.append(network.public)
            addresses.append(network.addresses[0])
        asker = await enter(
            join_swarm(Identity(b"a" * 32), SwarmSettings(listen=LISTEN, seeds=tuple(addresses)))
        )
        with trio.fail_after(CONNECT_SECONDS):
            while not asker.peers() >= {*peers}:  # noqa: ASYNC110 - seeds are dialled in the background
                await trio.sleep(0.1)
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
