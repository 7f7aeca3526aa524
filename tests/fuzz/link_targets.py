"""Targets below streams: first bytes, handshake, frames of a connection, the bulk port."""

from __future__ import annotations

import functools
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, Final

import trio
import trio.testing
from libp2p.crypto.ecc import create_new_key_pair as create_ecc
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.rsa import create_new_key_pair as create_rsa
from libp2p.crypto.secp256k1 import create_new_key_pair as create_secp256k1
from libp2p.crypto.x25519 import create_new_key_pair as create_noise_key_pair
from libp2p.io.exceptions import IOException
from libp2p.peer.id import ID
from libp2p.security.noise.exceptions import NoiseFailure
from libp2p.security.noise.pb.noise_pb2 import NoiseHandshakePayload
from libp2p.security.noise.transport import Transport as StockTransport
from libp2p.stream_muxer.exceptions import MuxedConnError, MuxedStreamError
from multiaddr import Multiaddr

from echo_node.net.blobs.bulk_server import BulkLimits, BulkPort, _Visit
from echo_node.net.noise import NoiseTransport
from echo_node.net.swarm import id_of
from echo_node.net.yamux import frames
from echo_node.net.yamux.frames import pack
from echo_node.net.yamux.muxer import Yamux
from tests.fuzz.loops import bare, looped
from tests.fuzz.net_targets import MULTISTREAM, host, starts
from tests.fuzz.target import Target
from tests.fuzz.wires import PEER, RawWire
from tests.net.yamux_peers import Pipe


async def _upgrade(data: bytes) -> None:
    """A stranger's first bytes: negotiation, the handshake of Noise."""
    await host().swarm._handle_inbound_connection(RawWire(data), Multiaddr("/ip4/192.0.2.1/tcp/4001"))


async def _payload(data: bytes) -> None:
    """A handshake that is right but for what the stranger says of itself in it."""
    left, right = trio.testing.memory_stream_pair()
    mine, its = create_new_key_pair(), create_new_key_pair()
    listener = NoiseTransport(mine, noise_privkey=create_noise_key_pair().private_key)
    dialler = StockTransport(its, noise_privkey=create_noise_key_pair().private_key)
    pattern = dialler.get_pattern()
    pattern.make_handshake_payload = lambda *_, **__: SimpleNamespace(serialize=lambda: data)  # type: ignore[method-assign]
    dialler.get_pattern = lambda: pattern  # type: ignore[method-assign]

    async def dial() -> None:
        with suppress(NoiseFailure, IOException, trio.BrokenResourceError, trio.ClosedResourceError):
            await dialler.secure_outbound(Pipe(left, is_initiator=True), ID.from_pubkey(mine.public_key))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(dial)
        try:
            await listener.secure_inbound(Pipe(right, is_initiator=False))
        finally:
            await left.aclose()
            await right.aclose()


def _payloads() -> list[bytes]:
    """Of each kind of key that the library knows."""
    pairs = [
        create_new_key_pair(b"k" * 32),
        create_rsa(2048),
        create_secp256k1(b"k" * 32),
        create_ecc("P-256"),
    ]
    keys = [pair.public_key.serialize() for pair in pairs]
    return [
        NoiseHandshakePayload(identity_key=key, identity_sig=bytes(64)).SerializeToString() for key in keys
    ]


async def _yamux(data: bytes) -> None:
    """A connection that only speaks frames, and a reader of every stream that it opens."""
    connection = Yamux(RawWire(data), id_of(PEER.public))
    async with trio.open_nursery() as nursery:

        async def accept() -> None:
            try:
                while True:
                    nursery.start_soon(read, await connection.accept_stream())
            except MuxedConnError:
                pass

        async def read(stream: Any) -> None:
            try:
                while await stream.read(4096):
                    await stream.write(b"answer")
            except MuxedStreamError:
                pass

        nursery.start_soon(accept)
        await connection.start()
        nursery.cancel_scope.cancel()


def _frames() -> list[bytes]:
    data, window, ping, away = frames.DATA, frames.WINDOW, frames.PING, frames.GO_AWAY
    syn, ack, fin, rst = frames.SYN, frames.ACK, frames.FIN, frames.RST
    opened = pack(data, syn, 1, 5) + b"hello"
    return [
        opened,
        opened + pack(window, 0, 1, 65_536) + pack(data, fin, 1, 0),
        pack(window, syn, 1, 0) + pack(window, rst, 1, 0),
        pack(ping, syn, 0, 7) + pack(ping, ack, 0, 7) + pack(away, 0, 0, 0),
        pack(data, ack, 2, 3) + b"abc" + pack(data, syn, 3, 0) + pack(data, 0, 3, 2) + b"xy",
    ]


async def _bulk_pass(data: bytes) -> None:
    """Redeem arbitrary bytes at the bulk port after the TLS handshake: no token is out."""
    listener = trio.socket.socket()
    try:
        await listener.bind(("127.0.0.1", 0))
        port = BulkPort(_NO_NETWORK, [listener], BulkLimits())
        port._redeem(data[1:33], _Visit("192.0.2.1"))
    finally:
        listener.close()


_NO_NETWORK: Any = None


TARGETS: Final = [
    Target(
        name="handshake",
        entry="echo_node.net.swarm.HardSwarm.upgrade_inbound_raw_conn",
        opener=functools.partial(looped, bare(_upgrade)),
        seeds=lambda: starts(MULTISTREAM + b"\x07/noise\n" + b"\0\x20" + bytes(32), MULTISTREAM, bytes(40)),
        prefix=1,
    ),
    Target(
        name="noise-payload",
        entry="echo_node.net.noise.NoiseTransport.secure_inbound",
        opener=functools.partial(looped, bare(_payload)),
        seeds=_payloads,
        takes=False,  # its signature is over a key that is new each time
        also=(
            Exception,
        ),  # whoever takes a connection in contains all that an upgrade raises; panics it cannot
    ),
    Target(
        name="yamux",
        entry="echo_node.net.yamux.muxer.Yamux.start",
        opener=functools.partial(looped, bare(_yamux)),
        seeds=lambda: starts(*_frames()),
        prefix=1,
    ),
    Target(
        name="bulk-pass",
        entry="echo_node.net.blobs.bulk_server.BulkPort._redeem",
        opener=functools.partial(looped, bare(_bulk_pass)),
        seeds=lambda: starts(bytes(32), b"\xff" * 32),
        takes=False,  # nobody has a pass
        most=64,
        prefix=1,
    ),
]
