"""Our Noise against the library's own: the same wire, read and written in bulk."""

from __future__ import annotations

from contextlib import asynccontextmanager

import pytest
import trio
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.x25519 import create_new_key_pair as create_noise_key_pair
from libp2p.io.exceptions import ConnectionClosedError, DecryptionFailedException
from libp2p.peer.id import ID
from libp2p.security.noise.io import MAX_PLAINTEXT_LENGTH
from libp2p.security.noise.transport import Transport as StockTransport
from trio.testing import memory_stream_pair

from echo_node.net.noise import NoiseMessages, NoiseTransport
from tests.net.yamux_peers import BLOB, Pipe


@asynccontextmanager
async def sessions(dialler=NoiseTransport, listener=NoiseTransport):
    """Both ends of a connection after the handshake, and the bare ends below them."""
    left, right = memory_stream_pair()
    keys = create_new_key_pair(), create_new_key_pair()
    one, two = (
        kind(pair, noise_privkey=create_noise_key_pair().private_key)
        for kind, pair in zip((dialler, listener), keys, strict=True)
    )
    made = {}

    async def dial():
        made["dialled"] = await one.secure_outbound(
            Pipe(left, is_initiator=True), ID.from_pubkey(keys[1].public_key)
        )

    async with trio.open_nursery() as nursery:
        nursery.start_soon(dial)
        accepted = await two.secure_inbound(Pipe(right, is_initiator=False))
    yield made["dialled"], accepted, left


@pytest.mark.parametrize(
    ("dialler", "listener"),
    [(NoiseTransport, NoiseTransport), (NoiseTransport, StockTransport), (StockTransport, NoiseTransport)],
)
async def test_ours_and_the_librarys_understand_each_other(dialler, listener):
    async with sessions(dialler, listener) as (one, two, _):
        for here, there in ((one, two), (two, one)):
            for size in (1, MAX_PLAINTEXT_LENGTH, MAX_PLAINTEXT_LENGTH + 1, 500_000):
                await here.write(BLOB[:size])
                assert await there.read(size) == BLOB[:size]


async def test_a_message_is_given_whole_however_it_arrives():
    async with sessions() as (one, two, below):
        assert isinstance(two.conn, NoiseMessages)
        wire = bytearray()
        send = below.send_all

        async def hold(data):
            wire.extend(data)

        below.send_all = hold
        await one.write(BLOB[:100_000])
        for at in range(0, len(wire), 999):
            with trio.move_on_after(0.0):
                await two.read()
            await send(wire[at : at + 999])
        got = await two.read() + await two.read()
        assert got == BLOB[:100_000]


async def test_a_message_that_was_tampered_with_is_refused():
    async with sessions() as (_, two, below):
        await below.send_all((40).to_bytes(2) + bytes(40))
        with pytest.raises(DecryptionFailedException):
            await two.read()


@pytest.mark.parametrize("tail", [b"", b"\0", b"\0\x20half"])
async def test_a_peer_that_hangs_up_anywhere_is_noticed(tail):
    async with sessions() as (_, two, below):
        if tail:
            await below.send_all(tail)
        await below.send_eof()
        with pytest.raises(ConnectionClosedError):
            await two.read()
