"""The bulk port: who is let in, for what, for how long; and what the asking side puts up with."""

from __future__ import annotations

import hashlib
import socket
import ssl
import time
from contextlib import asynccontextmanager, suppress

import pytest
import trio

from echo_node.errors import PeerError
from echo_node.net.blobs import bulk_client as room
from echo_node.net.blobs.blob_registry import BlobRegistry
from echo_node.net.blobs.bulk_client import NoBulkPortError, read_bulk
from echo_node.net.blobs.bulk_server import BulkLimits, BulkPort, open_port
from echo_node.net.blobs.bulk_tls import client_tls, server_tls
from echo_node.net.blobs.client import Want
from echo_node.net.blobs.server import BlobServer
from echo_node.net.memory import MemorySwarm
from echo_node.net.rate_limit import UploadLimit
from protocol import blob_id, encode, topics
from protocol.blob import BulkAsk, BulkOffer, Slice, bulk_pass
from tests.net.behaviour import IDENTITIES, SOON, refused, until
from tests.net.blob_nodes import BY_BULK_PORT, MIB, Silence, site, some_bytes

DATA = some_bytes(5 * MIB + 12_345)
BLOB = blob_id(DATA)
ASK = BulkAsk((Slice(BLOB, 1_000, 3 * MIB), Slice(BLOB, 0, 10)))
ASKED = DATA[1_000 : 1_000 + 3 * MIB] + DATA[:10]
REGISTRY = BlobRegistry()
REGISTRY.keep(b"all", {BLOB: DATA})
HASTY = BulkLimits(handshake=0.2, window=0.3)


@asynccontextmanager
async def serving_bulk(allowed=None, uplink=None, address="127.0.0.1"):
    """A node with a bulk port, and one that asks."""
    async with (
        MemorySwarm(address=address) as swarm,
        swarm.join(IDENTITIES[0]) as serving,
        swarm.join(IDENTITIES[1]) as asker,
        open_port(serving, ["127.0.0.1"], allowed=allowed) as port,
    ):
        serving.bulk = port
        with BlobServer(serving, REGISTRY, uplink).serve():
            yield port, serving, asker


def issue(port: BulkPort, peer: bytes, ask: BulkAsk) -> BulkOffer:
    """A token for ranges of the registry, without an upload limit."""
    return port.offer(peer, ask, REGISTRY, UploadLimit())


def knock(port: BulkPort, said: bytes, *, patience=SOON) -> bytes:
    """What a connection gets that says this."""
    got = b""
    with (
        socket.create_connection(("127.0.0.1", port.port), timeout=patience) as plain,
        client_tls().wrap_socket(plain) as connection,
    ):
        connection.sendall(said)
        while data := connection.recv(MIB):
            got += data
    return got


async def knocked(port: BulkPort, said: bytes) -> bytes:
    try:
        return await trio.to_thread.run_sync(knock, port, said)
    except OSError:
        return b""


async def read(asker, peer, ask=ASK, portions=None, pace=None) -> bytes:
    got = []
    portions = portions or [each.length for each in ask.slices]
    with trio.fail_after(20):
        await read_bulk(
            asker,
            peer,
            ask.slices,
            portions,
            lambda _, data: got.append(bytes(data)),
            pace=pace,
            threads=trio.CapacityLimiter(2),
        )
    return b"".join(got)


async def test_slices_come_in_their_order_and_cut_into_any_portions():
    async with serving_bulk() as (port, serving, asker):
        assert await read(asker, serving.public) == ASKED
        assert await read(asker, serving.public, portions=[1, MIB, 2 * MIB - 1, 4, 6]) == ASKED
        await until(lambda: port.counts == {"served": 2})


async def test_a_token_is_good_once_and_for_its_owner_and_its_slices():
    async with serving_bulk() as (port, serving, asker):
        other = BulkAsk((Slice(BLOB, 0, 3 * MIB), Slice(BLOB, 0, 10)))
        token = issue(port, asker.public, ASK).token
        for said in (
            token,
            bulk_pass(token, serving.public, ASK),
            bulk_pass(token, asker.public, other),
            bulk_pass(bytes(32), asker.public, ASK),
        ):
            assert await knocked(port, said) == b""
        assert await knocked(port, bulk_pass(token, asker.public, ASK)) == ASKED
        assert issue(port, asker.public, ASK).token != token
        assert await knocked(port, bulk_pass(token, asker.public, ASK)) == b"", "a replay"
        await until(lambda: port.counts == {"refused": 5, "served": 1})


async def test_a_token_is_worth_nothing_after_its_time():
    async with serving_bulk() as (port, _, asker):
        now = 0.0
        port._clock = lambda: now
        early, late = issue(port, asker.public, ASK), issue(port, asker.public, ASK)
        assert early.seconds == 30
        now = 29.9
        assert await knocked(port, bulk_pass(early.token, asker.public, ASK)) == ASKED
        fresh = issue(port, asker.public, ASK)
        now = 30.0
        assert await knocked(port, bulk_pass(late.token, asker.public, ASK)) == b""
        assert await knocked(port, bulk_pass(fresh.token, asker.public, ASK)) == ASKED
        assert issue(port, asker.public, ASK)
        assert len(port._tickets) == 1, "what is late is forgotten"


async def test_a_pass_from_another_address_is_refused():
    async with serving_bulk() as (port, serving, asker):
        serving._swarm.address = "192.0.2.7"
        abroad = issue(port, asker.public, ASK)
        serving._swarm.address = "127.0.0.1"
        issue(port, asker.public, ASK)
        assert await knocked(port, bulk_pass(abroad.token, asker.public, ASK)) == b""
        await until(lambda: port.counts == {"refused": 1})


async def test_strangers_are_turned_away_before_the_handshake():
    async with serving_bulk() as (port, _, _asker):
        assert await knocked(port, bytes(32)) == b""
        assert port.counts == {"stranger": 1}


async def test_nothing_is_offered_that_is_not_held_nor_to_whom_there_is_no_direct_way():
    async with serving_bulk() as (port, serving, asker):
        for asked in (Slice(bytes(32), 0, 1), Slice(BLOB, len(DATA), 1)):
            question = encode(BulkAsk((asked,)))
            error = await refused(
                asker.request(serving.public, topics.BULK_STREAM, question, deadline=SOON, most=4096)
            )
            assert error.reason == "refused"
        serving._swarm.address = None
        with pytest.raises(PeerError, match="no direct connection"):
            issue(port, asker.public, ASK)
        with pytest.raises(NoBulkPortError, match="no direct connection"):
            await read(asker, serving.public)


async def test_tokens_that_are_out_are_bounded_for_each_and_for_all():
    async with serving_bulk(BulkLimits(tokens=5, tokens_each=3)) as (port, serving, asker):
        for _ in range(3):
            issue(port, asker.public, ASK)
        with pytest.raises(PeerError, match="too many tokens"):
            issue(port, asker.public, ASK)
        async with serving._swarm.join(IDENTITIES[2]) as third:
            for _ in range(2):
                issue(port, third.public, ASK)
            with pytest.raises(PeerError, match="too many tokens"):
                issue(port, third.public, ASK)


async def test_an_older_tls_is_not_spoken():
    async with serving_bulk() as (port, _, asker):
        issue(port, asker.public, ASK)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.maximum_version = ssl.TLSVersion.TLSv1_2

        def shake_hands():
            with socket.create_connection(("127.0.0.1", port.port), timeout=SOON) as plain:
                context.wrap_socket(plain)

        with pytest.raises(ssl.SSLError):
            await trio.to_thread.run_sync(shake_hands)
        await until(lambda: port.counts == {"broken": 1})


async def test_who_says_nothing_is_shown_out_and_the_rest_wait_no_longer():
    async with serving_bulk(BulkLimits(handshake=0.2, pending=4, pending_each=3)) as (port, _, asker):
        offer = issue(port, asker.public, ASK)
        mute = [socket.create_connection(("127.0.0.1", port.port)) for _ in range(3)]
        await until(lambda: port.pending == 3)
        assert await knocked(port, bulk_pass(offer.token, asker.public, ASK)) == b""
        assert port.counts["crowded"] == 1
        await until(lambda: port.pending == 0)
        assert await knocked(port, bulk_pass(offer.token, asker.public, ASK)) == ASKED
        for each in mute:
            each.close()


def slow_reader(port, offer, peer, ask, source):
    """A connection that redeems a token and takes next to nothing."""
    plain = socket.create_connection(("127.0.0.1", port.port), source_address=(source, 0))
    plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
    connection = client_tls().wrap_socket(plain)
    connection.sendall(bulk_pass(offer.token, peer, ask))
    connection.recv(1)
    return connection


MUCH = BulkAsk((Slice(BLOB, 0, len(DATA)),) * 8)


async def test_silent_connections_of_one_address_make_room_for_another():
    async with serving_bulk(BulkLimits(pending=4, pending_each=4)) as (port, serving, asker):
        serving._swarm.address = "127.0.0.2"
        issue(port, asker.public, ASK)
        mute = [
            socket.create_connection(("127.0.0.1", port.port), source_address=("127.0.0.2", 0))
            for _ in range(4)
        ]
        await until(lambda: port.pending == 4)
        serving._swarm.address = "127.0.0.1"
        offer = issue(port, asker.public, ASK)
        assert await knocked(port, bulk_pass(offer.token, asker.public, ASK)) == ASKED
        assert port.counts["shed"] == 1
        for each in mute:
            each.close()


async def test_slow_readers_of_one_address_make_room_for_another_and_not_for_their_own():
    async with serving_bulk(BulkLimits(serving=3)) as (port, serving, asker):
        serving._swarm.address = "127.0.0.2"
        slow = [
            await trio.to_thread.run_sync(
                slow_reader, port, issue(port, asker.public, MUCH), asker.public, MUCH, "127.0.0.2"
            )
            for _ in range(3)
        ]
        assert port.serving == 3
        offer = issue(port, asker.public, ASK)
        with suppress(OSError):  # it is closed, at whichever moment
            slow.append(
                await trio.to_thread.run_sync(slow_reader, port, offer, asker.public, ASK, "127.0.0.2")
            )
        await until(lambda: port.counts["refused"] == 1)
        assert port.serving == 3
        serving._swarm.address = "127.0.0.1"
        offer = issue(port, asker.public, ASK)
        assert await knocked(port, bulk_pass(offer.token, asker.public, ASK)) == ASKED
        assert port.counts["shed"] == 1
        for each in slow:
            each.close()


async def test_one_peer_and_one_address_hold_a_share_of_tokens_and_connections():
    allowed = BulkLimits(serving_each=2, tokens_address=3)
    async with serving_bulk(allowed) as (port, serving, asker):
        slow = [
            await trio.to_thread.run_sync(
                slow_reader, port, issue(port, asker.public, MUCH), asker.public, MUCH, "127.0.0.1"
            )
            for _ in range(2)
        ]
        offer = issue(port, asker.public, ASK)
        assert await knocked(port, bulk_pass(offer.token, asker.public, ASK)) == b""
        assert port.counts["refused"] == 1
        async with serving._swarm.join(IDENTITIES[2]) as third:
            for peer in (asker, asker, third):
                issue(port, peer.public, ASK)
            with pytest.raises(PeerError, match="too many tokens"):
                issue(port, third.public, ASK)
            serving._swarm.address = "127.0.0.3"
            issue(port, third.public, ASK)
        for each in slow:
            each.close()


async def test_half_a_pass_is_none():
    async with serving_bulk(HASTY) as (port, _, asker):
        issue(port, asker.public, ASK)
        assert await knocked(port, bytes(31)) == b""
        assert port.counts == {"broken": 1}


async def test_who_does_not_take_what_it_asked_for_is_cut_off():
    async with serving_bulk(HASTY) as (port, _, asker):
        offer = issue(port, asker.public, BulkAsk((Slice(BLOB, 0, len(DATA)),) * 8))
        said = bulk_pass(offer.token, asker.public, BulkAsk((Slice(BLOB, 0, len(DATA)),) * 8))

        def take_a_little():
            with socket.create_connection(("127.0.0.1", port.port)) as plain:
                connection = client_tls().wrap_socket(plain)
                connection.sendall(said)
                return connection, connection.recv(10)

        connection, first = await trio.to_thread.run_sync(take_a_little)
        assert first
        await until(lambda: port.counts == {"broken": 1})
        assert port.serving == 0
        connection.close()


async def test_another_certificate_than_the_announced_one_ends_it_before_the_pass_is_shown():
    async with serving_bulk() as (port, serving, asker):
        offers = []
        honest = port.offer

        def lie(*asked):
            offer = honest(*asked)
            offers.append(offer)
            return BulkOffer(
                pin=hashlib.sha256(b"another").digest(), port=offer.port, seconds=30, token=offer.token
            )

        port.offer = lie
        with pytest.raises(NoBulkPortError, match="another certificate"):
            await read(asker, serving.public)
        assert await knocked(port, bulk_pass(offers[0].token, asker.public, ASK)) == ASKED, (
            "the pass is unused"
        )


async def test_the_asker_dials_the_address_of_its_connection_and_no_other(monkeypatch):
    dialled = []
    true_dial = room._dial

    async def dial(address, port, peer):
        dialled.append(address)
        return await true_dial(address, port, peer)

    monkeypatch.setattr(room, "_dial", dial)
    async with serving_bulk() as (_, serving, asker):
        assert await read(asker, serving.public) == ASKED
    assert dialled == ["127.0.0.1"]


class Impostor:
    """A bulk port that a test writes: a thread that speaks TLS and then does what it is told."""

    def __init__(self, serving, behave) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._serving = serving
        self._behave = behave

    async def offer(self, _peer, _question):
        port = self._listener.getsockname()[1]
        return encode(BulkOffer(pin=server_tls().pin, port=port, seconds=30, token=bytes(32)))

    def _serve(self):
        plain, _ = self._listener.accept()
        with server_tls().context.wrap_socket(plain, server_side=True) as connection:
            connection.recv(32)
            self._behave(connection)

    @asynccontextmanager
    async def open(self):
        with self._serving.serve(topics.BULK_STREAM, self.offer, most=1 << 16):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(trio.to_thread.run_sync, self._serve)
                yield
        self._listener.close()


@asynccontextmanager
async def impostor(behave):
    async with (
        MemorySwarm(address="127.0.0.1") as swarm,
        swarm.join(IDENTITIES[0]) as serving,
        swarm.join(IDENTITIES[1]) as asker,
        Impostor(serving, behave).open(),
    ):
        yield serving, asker


async def test_a_short_answer_ends_with_what_is_missing():
    async with impostor(lambda connection: connection.sendall(DATA[: 2 * MIB])) as (serving, asker):
        with pytest.raises(PeerError, match="1048576 bytes before the end"):
            await read(asker, serving.public)


async def test_one_byte_at_a_time_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(room, "PORTION_SECONDS", 0.3)

    def drip(connection):
        try:
            while True:
                connection.sendall(b"x")
                time.sleep(0.02)  # in another thread: what it plays is a peer that is slow
        except OSError:
            return

    async with impostor(drip) as (serving, asker):
        with pytest.raises(PeerError, match="too slow"):
            await read(asker, serving.public)


async def test_a_bulk_port_that_never_speaks_is_none(monkeypatch):
    monkeypatch.setattr(room, "PORTION_SECONDS", 0.2)

    def mute(connection):
        try:
            connection.recv(1)
        except OSError:
            return

    async with impostor(mute) as (serving, asker):
        with pytest.raises(NoBulkPortError):
            await read(asker, serving.public)


async def test_cancelling_ends_the_connection_at_once_on_both_sides():
    async with serving_bulk(uplink=Silence(after=MIB)) as (port, serving, asker):
        with trio.move_on_after(60) as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(read, asker, serving.public)
                await until(lambda: port.serving == 1)
                start = trio.current_time()
                nursery.cancel_scope.cancel()
        assert not scope.cancelled_caught
        assert trio.current_time() - start < SOON


async def test_closing_the_bulk_port_ends_what_is_under_way():
    broken = trio.Event()

    async def read_until_it_breaks(asker, peer):
        with pytest.raises(PeerError, match=r"connection ended|reset|EOF"):
            await read(asker, peer, portions=[MIB, MIB, MIB, 10])
        broken.set()

    with trio.fail_after(SOON):
        async with trio.open_nursery() as nursery:
            async with serving_bulk(uplink=Silence(after=MIB)) as (port, serving, asker):
                nursery.start_soon(read_until_it_breaks, asker, serving.public)
                await until(lambda: port.serving == 1)
            await broken.wait()


@pytest.mark.parametrize("how", ["closed", "no-port", "relayed"])
async def test_where_the_bulk_port_cannot_be_reached_a_stream_does_and_it_is_remembered(how):
    data = some_bytes(6 * MIB)
    async with site(address=None if how == "relayed" else "127.0.0.1") as here:
        source = await here.source([data], bulk=how != "no-port")
        if how == "closed":
            with socket.create_server(("127.0.0.1", 0)) as gone:
                source.port.port = gone.getsockname()[1]
        blobs = here.blobs(BY_BULK_PORT)
        want = [Want(blob_id(data), len(data))]
        assert await blobs.fetch(want) == {blob_id(data): data}
        assert not blobs.sources.may_have_port(source.public)
        assert blobs.sources.faults() == {}, "nobody is to blame"
        asked = source.network.counts()["answered"]
        assert await blobs.fetch(want) == {blob_id(data): data}
        assert source.network.counts()["answered"] - asked <= 1 + 6, "no more questions about bulk ports"


async def test_the_uplink_is_shared_by_streams_and_the_bulk_port():
    async with serving_bulk(uplink=UploadLimit(each=20 * MIB)) as (_, serving, asker):
        start = trio.current_time()
        for _ in range(3):
            await read(asker, serving.public)
        spent = trio.current_time() - start
        assert spent > 0.8 * (9 / 20 - 0.25)
