"""One libp2p stream against a bare TLS 1.3 socket, between two processes.

Both sides write 1 MB at a time and read until all has come; the clock stops when the reader has
said that it has all. Connections are made before the clock starts; our stream is opened while it
runs.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import multiprocessing
import multiprocessing.connection
import socket
import ssl
import tempfile
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import trio
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from libp2p.abc import INetStream
from libp2p.custom_types import TProtocol
from libp2p.network.stream.exceptions import StreamEOF
from libp2p.peer.peerinfo import PeerInfo
from multiaddr import Multiaddr
from rich.console import Console
from rich.table import Table

from benchmarks.pairs import interleaved, median_ratio, median_times
from echo_node.net.host import build_host, running
from echo_node.net.swarm import id_of
from protocol import Identity

MEGABYTE = 1_000_000
MEGABYTES = 128
PROTOCOL = TProtocol("/echo/benchmark/1.0.0")
LOCALHOST = "/ip4/127.0.0.1/tcp/0"
SECONDS = 60
BLOCK = bytes(range(250)) * (MEGABYTE // 250)
Connection = multiprocessing.connection.Connection


def stream_over_tls(megabytes: int = MEGABYTES) -> float:
    """Return a stream's throughput over that of a TLS socket, median of pairs."""
    return median_ratio(_pairs(megabytes))


def _pairs(megabytes: int) -> list[tuple[float, float]]:
    with _sender(_stream_sender, megabytes) as ours, _sender(_tls_sender, megabytes) as bare:
        ours()
        bare()
        return interleaved(ours, bare, 1)


@contextlib.contextmanager
def _sender(main: Callable[[Connection, int], None], megabytes: int) -> Generator[Callable[[], None]]:
    """Start a sender and its receiver; yields a function that sends once."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=main, args=(there, megabytes))
    process.start()

    def send() -> None:
        here.send("once more")
        assert here.poll(SECONDS), "the sender took too long"
        assert here.recv() == "sent"

    try:
        assert here.recv() == "ready"
        yield send
    finally:
        here.send("")
        process.join(SECONDS)
        if process.is_alive():
            process.kill()


@contextlib.contextmanager
def _receiver(main: Callable[[Connection], None]) -> Generator[Any]:
    """Start a receiver process; yields it and its address."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=main, args=(there,))
    process.start()
    try:
        yield here.recv()
    finally:
        here.send("")
        process.join(SECONDS)
        if process.is_alive():
            process.kill()


def _stream_sender(orders: Connection, megabytes: int) -> None:
    with _receiver(_stream_receiver) as (public, address):
        trio.run(_send_streams, orders, megabytes, public, address)


async def _send_streams(orders: Connection, megabytes: int, public: bytes, address: str) -> None:
    host = build_host(Identity.generate())
    async with running(host, []):
        await host.connect(PeerInfo(id_of(public), [Multiaddr(address)]))
        await trio.sleep(1)  # until both have introduced themselves
        orders.send("ready")
        while await trio.to_thread.run_sync(orders.recv):
            stream = await host.new_stream(id_of(public), [PROTOCOL])
            for _ in range(megabytes):
                await stream.write(BLOCK)
            await stream.close_write()  # type: ignore[attr-defined]
            assert int.from_bytes(await stream.read(8)) == megabytes * MEGABYTE
            orders.send("sent")
            await stream.close()


def _stream_receiver(orders: Connection) -> None:
    trio.run(_receive_streams, orders)


async def _receive_streams(orders: Connection) -> None:
    identity = Identity.generate()
    host = build_host(identity)

    async def take(stream: INetStream) -> None:
        size = 0
        with contextlib.suppress(StreamEOF):
            while True:
                size += len(await stream.read(MEGABYTE))
        await stream.write(size.to_bytes(8))
        await stream.close()

    host.set_stream_handler(PROTOCOL, take)
    async with running(host, [LOCALHOST]):
        orders.send((identity.public, str(host.get_addrs()[0])))
        await trio.to_thread.run_sync(orders.recv)


def _tls_sender(orders: Connection, megabytes: int) -> None:
    with _receiver(_tls_receiver) as port:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        with (
            socket.create_connection(("127.0.0.1", port)) as raw,
            context.wrap_socket(raw) as tls,
        ):
            orders.send("ready")
            while orders.recv():
                tls.sendall((megabytes * MEGABYTE).to_bytes(8))
                for _ in range(megabytes):
                    tls.sendall(BLOCK)
                assert int.from_bytes(tls.recv(8)) == megabytes * MEGABYTE
                orders.send("sent")


def _tls_receiver(orders: Connection) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    with tempfile.TemporaryDirectory() as folder:
        context.load_cert_chain(_certificate(Path(folder)))
    with socket.create_server(("127.0.0.1", 0)) as server:
        orders.send(server.getsockname()[1])
        raw, _ = server.accept()
        with raw, context.wrap_socket(raw, server_side=True) as tls:
            buffer = bytearray(MEGABYTE)  # `recv` would make a new one for each record, and halve the speed
            while announced := tls.recv(8):
                size = 0
                while size < int.from_bytes(announced):
                    size += tls.recv_into(buffer)
                tls.sendall(size.to_bytes(8))


def _certificate(folder: Path) -> Path:
    """Make a key and a self-signed certificate."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = dt.datetime.now(dt.UTC)
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    made = builder.not_valid_before(now).not_valid_after(now + dt.timedelta(days=1)).sign(key, SHA256())
    path = folder / "both.pem"
    path.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        + made.public_bytes(serialization.Encoding.PEM)
    )
    return path


def main() -> None:
    pairs = _pairs(MEGABYTES)
    mine, other = median_times(pairs)
    ratio = median_ratio(pairs)
    table = Table(title=f"{MEGABYTES} MB through one stream, 1 MB at a time; medians of {len(pairs)} pairs")
    for column in ("", "MB/s", "lowest", "highest"):
        table.add_column(column, justify="right" if column else "left")
    for name, median, times in (
        ("libp2p stream (ours)", mine, [ours for ours, _ in pairs]),
        ("TLS 1.3 socket", other, [bare for _, bare in pairs]),
    ):
        speeds = [MEGABYTES / each for each in (median, max(times), min(times))]
        table.add_row(name, *(f"{each:.0f}" for each in speeds))
    Console().print(table)
    print(
        json.dumps(
            {
                "stream_over_tls": round(ratio, 3),
                "stream_mb_s": round(MEGABYTES / mine),
                "tls_mb_s": round(MEGABYTES / other),
            }
        )
    )


if __name__ == "__main__":
    main()
