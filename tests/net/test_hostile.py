"""A hostile peer against a node: the node stays up, serves others, and blames the right peer."""

from __future__ import annotations

import ssl
from contextlib import suppress
from functools import partial

import pytest
import trio
from libp2p import new_host
from libp2p.crypto.rsa import create_new_key_pair as create_rsa
from libp2p.crypto.secp256k1 import create_new_key_pair as create_secp256k1
from libp2p.custom_types import TProtocol
from libp2p.host.exceptions import HostException
from libp2p.network.exceptions import SwarmException
from libp2p.network.stream.exceptions import StreamError
from libp2p.peer.peerinfo import PeerInfo
from libp2p.security.insecure.transport import PLAINTEXT_PROTOCOL_ID, InsecureTransport
from libp2p.security.tls.transport import PROTOCOL_ID as TLS
from libp2p.security.tls.transport import TLSTransport
from libp2p.stream_muxer.mplex.mplex import MPLEX_PROTOCOL_ID, Mplex
from multiaddr import Multiaddr

from echo_node.net import host, identify, peerstore, request_response
from echo_node.net import swarm as swarm_module
from echo_node.net.base import RequestError
from echo_node.net.discovery.address_door import USER
from echo_node.net.gossip import mesh
from echo_node.net.gossip.wire import PROTOCOL_ID as GOSSIP
from echo_node.net.gossip.wire import Control, Published, write_frame, write_length
from echo_node.net.host import build_host, running
from echo_node.net.libp2p import join_swarm
from echo_node.net.swarm import BROKEN, id_of
from echo_node.net.swarm_settings import SwarmSettings
from protocol import Identity, limits, topics
from tests.net.behaviour import STREAM, TOPIC
from tests.net.hostile import ILL, LISTEN, SOON, VICTIM, field, framed, scene, until, varint

PUT_VALUE, GET_VALUE, ADD_PROVIDER, GET_PROVIDERS, FIND_NODE = range(5)
ANOTHER = id_of(bytes(32)).to_bytes()
ADDRESS = Multiaddr("/ip4/127.0.0.1/tcp/1").to_bytes()


def kad(kind, key=b"", closer=(), providers=()):
    peers = [field(8, each) for each in closer] + [field(9, each) for each in providers]
    return varint(1, kind) + field(2, key) + b"".join(peers)


def somebody(peer, addresses=(ADDRESS,)):
    return field(1, peer) + b"".join(field(2, each) for each in addresses)


# Gossip


@pytest.mark.parametrize(
    "data",
    [
        framed(b"\xff" * 50),
        framed(field(2, b"\xff" * 50)),
        framed(field(2, field(2, b"x"))),
        framed(field(2, field(2, bytes(limits.GOSSIP_BYTES + 1)) + field(4, TOPIC.encode()))),
        framed(field(2, field(2, b"x") + field(4, b"\xff\xfe"))),
        b"\xff" * 64,
        write_length(2**60),
        write_frame(subscriptions=[(f"/t/{n}", True) for n in range(10_000)]),
        write_frame(control=Control(have=[(TOPIC, [b"%d" % n for n in range(100_000)])])),
        write_frame(control=Control(want=[b"%d" % n for n in range(100_000)])),
        write_frame(control=Control(graft=["/t"] * 10_000)),
    ],
    ids=[
        "garbage",
        "message",
        "no-topic",
        "large-message",
        "no-text",
        "endless-length",
        "huge",
        "subscriptions",
        "have",
        "want",
        "graft",
    ],
)
async def test_gossip_that_is_none_ends_its_stream_and_is_held_against_its_sender(data):
    async with scene() as here:
        await here.send(GOSSIP, data)
        await until(lambda: here.faults == {"malformed-gossip": 1})


@pytest.mark.parametrize(
    "protocol", ["/meshsub/1.0.0", "/floodsub/1.0.0", "/ipfs/kad/1.0.0", "/ipfs/bitswap/1.2.0"]
)
async def test_protocols_that_are_not_spoken_are_refused(protocol):
    async with scene() as here:
        with pytest.raises(HostException):
            await here.open(protocol)
        assert here.faults == {}


async def test_what_a_frame_says_of_author_number_key_and_signature_is_not_looked_at():
    async with scene() as here:
        said = field(2, b"said") + field(4, TOPIC.encode())
        rest = b"".join(field(number, b"\xff" * 40) for number in (1, 3, 5, 6))
        await here.send(GOSSIP, framed(field(2, said + rest)))
        with trio.fail_after(SOON):
            assert (await here.inbox.receive()).data == b"said"
        assert here.faults == {}


async def test_half_a_frame_and_then_silence_holds_up_nobody():
    async with scene() as here:
        for _ in range(2):
            await here.send(GOSSIP, write_length(1_000_000) + b"half")
        with pytest.raises(BROKEN), trio.fail_after(SOON):  # two are enough for anybody
            await (await here.send(GOSSIP, write_length(1_000_000) + b"half")).read(1)
        await here.check()
        assert here.faults == {}


async def test_subscriptions_and_offers_of_one_peer_are_bounded():
    async with scene() as here:
        stream = await here.send(GOSSIP, write_frame(subscriptions=[(TOPIC, True)]))
        for start in range(0, 10_000, 250):
            names = [(f"/t/{n}", True) for n in range(start, start + 250)]
            await stream.write(write_frame(subscriptions=names))
        for start in range(0, 100_000, 5_000):
            ids = [b"%d" % n for n in range(start, start + 5_000)]
            await stream.write(write_frame(control=Control(have=[(TOPIC, ids)])))
        await here.check()
        state = here.victim._gossip._mesh
        assert len(state._subscribed[ILL.public]) <= mesh.TOPICS_PER_PEER
        assert state._asked[ILL.public] <= mesh.ASK_PER_BEAT


async def test_grafting_again_before_its_time_is_held_against_a_peer():
    async with scene() as here:
        stream = await here.open(GOSSIP)
        for _ in range(6):  # the first is turned down: it does not listen to the topic
            await stream.write(write_frame(control=Control(graft=[TOPIC])))
        await until(lambda: here.faults == {"early-graft": 5})
        assert ILL.public not in here.victim._gossip.neighbours(TOPIC)


async def test_a_flood_of_bad_messages_mutes_its_sender_while_others_are_served():
    async with scene() as here, trio.open_nursery() as nursery:
        sent = 0

        async def flood():
            nonlocal sent
            stream = await here.open(GOSSIP)
            for n in range(0, 20_000, 50):
                bad = [Published(TOPIC, b"bad %d" % k) for k in range(n, n + 50)]
                await stream.write(write_frame(published=bad))
                sent += 50

        nursery.start_soon(flood)
        await until(lambda: ILL.public in here.victim.mutes())
        for _ in range(20):
            await here.check()
        assert here.victim.mutes()[ILL.public].reasons["malformed"] > 8
        with trio.fail_after(60):
            while sent < 20_000:  # noqa: ASYNC110 -- the flood is a task of its own
                await trio.sleep(0.1)
        await here.check()
        assert here.victim.mutes().keys() == {ILL.public}


# The DHT


@pytest.mark.parametrize(
    "data",
    [
        framed(b"\xff" * 20),
        framed(kad(PUT_VALUE, b"k") + field(3, b"record")),
        framed(kad(GET_VALUE, b"k")),
        framed(kad(77, b"k")),
        framed(kad(FIND_NODE)),
        framed(kad(FIND_NODE, bytes(81))),
        framed(kad(FIND_NODE, bytes(100_000))),
        framed(kad(ADD_PROVIDER, b"k", providers=[somebody(ANOTHER)])),
        framed(kad(ADD_PROVIDER, b"k")),
        framed(kad(GET_PROVIDERS, b"k", closer=[somebody(b"%d" % n, ()) for n in range(5_000)])),
        b"\xff" * 10,
        write_length(2**60),
    ],
    ids=(
        [
            "garbage",
            "put-value",
            "get-value",
            "unknown",
            "no-key",
            "long-key",
            "huge-key",
            "another",
            "no-provider",
            "peers",
            "endless",
            "huge",
        ]
    ),
)
async def test_a_question_that_the_dht_does_not_have_is_held_against_whoever_asks(data):
    async with scene() as here:
        await here.send(topics.KAD_PROTOCOL, data)
        await until(lambda: here.faults == {"malformed-dht": 1})
        assert len(here.victim._dht._providers) == 0


@pytest.mark.parametrize(
    "answer",
    [
        framed(b"\xff" * 20),
        write_length(2**60),
        framed(kad(FIND_NODE, b"k", closer=[somebody(b"%d" % n, ()) for n in range(5_000)])),
    ],
    ids=["garbage", "huge", "peers"],
)
async def test_an_answer_that_the_dht_does_not_have_is_held_against_whoever_gave_it(answer):
    async with scene() as here:
        await lie(here, answer)
        assert await here.victim.find(b"key", 3, deadline=SOON) == []
        assert here.faults["malformed-dht"] >= 1


async def test_peers_that_do_not_exist_neither_fill_the_memory_nor_drive_out_who_is_there():
    async with scene() as here:
        served = 0

        def invent():
            nonlocal served
            served += 1
            invented = [id_of(served.to_bytes(4) + bytes([n]) * 28).to_bytes() for n in range(20)]
            addresses = [Multiaddr(f"/ip4/127.0.0.1/tcp/{1 + n}").to_bytes() for n in range(limits.ADDRESSES)]
            me = [id_of(VICTIM.public).to_bytes(), here.honest.host.get_id().to_bytes()]
            return framed(
                kad(FIND_NODE, b"k", closer=[somebody(each, addresses) for each in (*me, *invented)])
            )

        await lie(here, invent)
        store = here.victim.host.get_peerstore()
        store.max_peers = 50
        for n in range(5):
            await here.victim.find(b"key %d" % n, 3, deadline=1.0)
        assert served
        assert len(store.peer_data_map) <= 50
        assert all(len(store.addrs(each)) <= peerstore.ADDRESSES for each in store.peer_data_map)
        assert store.privkey(here.victim.host.get_id()) is not None


async def lie(here, answer):
    """The ill peer answers every question of the DHT with this."""

    async def serve(stream):
        await stream.read(100)
        await stream.write(answer() if callable(answer) else answer)

    here.ill.set_stream_handler(TProtocol(topics.KAD_PROTOCOL), serve)
    await here.victim._dht.add(id_of(ILL.public), here.ill.get_addrs())


# Introductions and pings


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        (framed(b"\xff" * 50), 1),
        (b"\xff" * 100_000, 1),
        (write_length(2**60), 1),
        (framed(bytes(1_000_000)), 1),
        (framed(b"".join(field(2, ADDRESS) for _ in range(4_000))), 0),
        (
            framed(
                b"".join(field(2, Multiaddr(f"/ip4/1.2.3.4/tcp/{n}").to_bytes()) for n in range(1, 5_000))
            ),
            0,
        ),
        (framed(b"".join(field(3, b"/p/%d" % n) for n in range(5_000))), 0),
        (
            framed(
                field(3, b"/p" * 15_000) + field(8, b"\xff" * 20_000) + field(1, b"\xff") + field(2, b"\xff")
            ),
            0,
        ),
    ],
    ids=["garbage", "no-length", "huge", "long", "same-addresses", "addresses", "protocols", "junk"],
)
@pytest.mark.parametrize("way", ["asked", "pushed"])
async def test_an_introduction_is_bounded(way, data, fault):
    async with scene() as here:
        me = here.ill.get_id()
        store = here.victim.host.get_peerstore()
        if way == "asked":

            async def introduce(stream):
                await stream.write(data)
                await trio.sleep(SOON)

            here.ill.set_stream_handler(identify.IDENTIFY, introduce)
            await here.victim.host._identify_peer(me, reason="again")
        else:
            with suppress(*BROKEN):
                await here.send(identify.PUSH, data)
            await here.check()
        await until(lambda: here.faults.get("malformed-identify", 0) == fault)
        assert len(store.addrs(me)) <= peerstore.ADDRESSES
        assert len(store.get_protocols(me)) <= identify.PROTOCOLS


async def test_a_peer_that_never_says_who_it_is_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(identify, "SECONDS", 0.3)
    async with scene() as here:

        async def drip(stream):
            while True:
                await stream.write(b"\x80")
                await trio.sleep(0.1)

        here.ill.set_stream_handler(identify.IDENTIFY, drip)
        with trio.fail_after(SOON):
            await here.victim.host._identify_peer(here.ill.get_id(), reason="again")


@pytest.mark.parametrize("data", [b"", b"short", bytes(33), bytes(100_000)])
async def test_pings_that_are_none_harm_nobody(data):
    async with scene() as here:
        stream = await here.send(identify.PING, data)
        await here.check()
        await stream.close()
        assert here.faults == {}


# Strangers at the port


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        bytes(100_000),
        b"\xff" * 100_000,
        write_length(2**60) + bytes(1_000_000),
        framed(b"/multistream/1.0.0\n") + framed(b"/plaintext/2.0.0\n") * 1_000,
        framed(b"/multistream/1.0.0\n") + framed(b"\xff\xfe\n"),
        framed(b"/multistream/1.0.0\n") + framed(b"ls\n") * 10_000,
        framed(b"/multistream/1.0.0\n") + framed(b"/noise\n") + b"\xff" * 70_000,
        framed(b"/multistream/1.0.0\n") + framed(b"/noise\n") + b"\x00\x20" + bytes(32),
    ],
    ids=["http", "zeros", "ones", "huge", "plaintext", "no-text", "ls", "noise", "half-a-handshake"],
)
async def test_bytes_of_a_stranger_at_the_port_harm_nobody(data):
    async with scene() as here:
        for _ in range(3):
            stream = await trio.open_tcp_stream("127.0.0.1", here.port)
            with trio.move_on_after(0.3):
                try:
                    await stream.send_all(data)
                    await stream.receive_some(100)
                except trio.BrokenResourceError:
                    pass
            await here.check()
            await stream.aclose()
        await until(lambda: not here.victim.host.swarm._handshakes)


async def test_a_tls_client_is_refused():
    async with scene() as here:
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        raw = await trio.open_tcp_stream("127.0.0.1", here.port)
        with pytest.raises(trio.BrokenResourceError), trio.fail_after(15):
            await trio.SSLStream(raw, context).do_handshake()


def insecure(keys):
    return {PLAINTEXT_PROTOCOL_ID: InsecureTransport(keys)}


def tls(keys):
    return {TLS: TLSTransport(keys)}


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # the library's dialler leaks its socket
@pytest.mark.parametrize("security", [insecure, tls])
async def test_a_dialler_without_noise_is_refused(security):
    from libp2p.crypto.ed25519 import create_new_key_pair

    keys = create_new_key_pair()
    async with scene() as here:
        await refused_at_the_door(here, new_host(key_pair=keys, sec_opt=security(keys)))


async def test_a_dialler_without_yamux_is_refused():
    async with scene() as here:
        await refused_at_the_door(here, new_host(muxer_opt={MPLEX_PROTOCOL_ID: Mplex}))


@pytest.mark.parametrize("create", [create_rsa, create_secp256k1])
async def test_a_peer_with_another_kind_of_key_is_not_kept(create):
    async with scene() as here:
        stranger = new_host(key_pair=create())
        await refused_at_the_door(here, stranger)


async def refused_at_the_door(here, stranger):
    connected = here.victim.peers()
    async with stranger.run([]):
        with trio.move_on_after(SOON):
            try:
                await stranger.connect(PeerInfo(id_of(VICTIM.public), [Multiaddr(here.victim.addresses[0])]))
                stream = await stranger.new_stream(id_of(VICTIM.public), [TProtocol(STREAM)])
                await stream.write(bytes(5))
                pytest.fail(f"it was let in: {await stream.read(1)}")
            except (HostException, SwarmException, StreamError):
                pass
        await until(lambda: stranger.get_id() not in here.victim.host.swarm.connections)
        assert here.victim.peers() == connected
        await here.check()
        await stranger.close()


async def test_connections_that_say_nothing_are_few_and_end_while_others_come_in():
    async with scene() as here:
        swarm = here.victim.host.swarm
        swarm.connection_config.inbound_upgrade_timeout = 2.0
        silent = [await trio.open_tcp_stream("127.0.0.1", here.port) for _ in range(400)]
        await until(lambda: len(swarm._handshakes) == swarm_module.PENDING_HANDSHAKES)
        near = SwarmSettings(listen=LISTEN, seeds=(here.victim.addresses[0],))
        async with join_swarm(Identity(b"n" * 32), near) as newcomer:
            await until(lambda: VICTIM.public in newcomer.peers())
            assert await newcomer.request(VICTIM.public, STREAM, b"x", deadline=SOON, most=1) == b"x"
        await until(lambda: not swarm._handshakes)
        for stream in silent:
            with trio.fail_after(SOON), suppress(trio.BrokenResourceError):
                while await stream.receive_some(100):
                    pass
            await stream.aclose()


async def test_connections_that_come_and_go_leave_their_place():
    async with scene(settings=SwarmSettings(listen=LISTEN, connections=12)) as here:
        for n in range(30):
            guest = build_host(Identity(bytes([100 + n]) * 32))
            async with running(guest, []):
                await here.connect(guest)
        await until(lambda: here.victim.host.swarm._inbound_limiter.borrowed_tokens == 2)


# Streams


async def test_a_thousand_streams_at_once_are_bounded_and_others_are_served():
    async with scene() as here:
        (connection,) = here.ill.swarm.get_connections(id_of(VICTIM.public))
        connection.muxed_conn._core.slots = trio.Semaphore(10_000)
        for _ in range(1_000):
            await connection.muxed_conn.open_stream()
        await here.check()
        assert here.victim.host._open[here.ill.get_id()] <= host.STREAMS_PER_PEER
        await here.check()


async def test_a_handler_of_a_stream_that_fails_ends_that_stream():
    async def fail(_stream):
        await trio.lowlevel.checkpoint()
        raise ValueError("a bug")

    async with scene() as here:
        here.victim.host.set_stream_handler(TProtocol("/broken"), fail)
        for _ in range(3):
            stream = await here.open("/broken")
            with pytest.raises(BROKEN), trio.fail_after(SOON):
                await stream.read(1)
        assert here.victim.counts()["contained"] == 3


async def test_questions_that_never_end_are_not_waited_for(monkeypatch):
    monkeypatch.setattr(request_response, "REQUEST_SECONDS", 0.5)
    async with scene() as here:
        streams = [await here.send(STREAM, (100).to_bytes(4) + b"half") for _ in range(40)]
        await here.check()
        for stream in streams:
            with pytest.raises(BROKEN), trio.fail_after(SOON):
                await stream.read(1)
        await until(lambda: not here.victim.host._open[here.ill.get_id()])


async def test_an_answer_that_nobody_reads_is_given_up(monkeypatch):
    monkeypatch.setattr(request_response, "WRITE_SECONDS", 0.5)

    async def much(_peer, _data):
        await trio.lowlevel.checkpoint()
        return bytes(32 * 1024 * 1024)

    async with scene() as here:
        with here.victim.serve("/much", much, most=10):
            for _ in range(4):
                await here.send("/much", bytes(4))
            await until(lambda: here.victim.counts()["answered"] >= 4)
            await here.check()
            await until(lambda: not here.victim.host._open[here.ill.get_id()])


async def test_one_who_names_providers_that_are_not_there_does_not_hide_one_who_is():
    async with scene() as here:
        key = b"\x1e\x20" + bytes(32)
        await here.honest.provide(key)
        fakes = [somebody(id_of(bytes([n]) * 32).to_bytes()) for n in range(100, 160)]
        await lie(here, framed(kad(GET_PROVIDERS, key, providers=fakes)))
        assert await here.victim.find(key, 1, deadline=SOON) == [here.honest.public]


# Those who are dialled

HELLO, NOISE = framed(b"/multistream/1.0.0\n"), framed(b"/noise\n")


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"\xff" * 1_000,
        HELLO,
        HELLO + framed(b"na\n"),
        HELLO + framed(b"\xff\xfe\n"),
        HELLO + NOISE,
        HELLO + NOISE + b"\x00",
        HELLO + NOISE + b"\x00\x00",
        HELLO + NOISE + b"\x00\x60" + b"\xff" * 96,
        HELLO + NOISE + b"\xff\xff" + bytes(65_535),
    ],
    ids=["", "ones", "hello", "na", "no-text", "noise", "half-length", "no-handshake", "bad-key", "zeros"],
)
async def test_who_breaks_the_handshake_when_it_is_dialled_is_not_there_and_no_more(answer):
    async def serve(stream):
        with suppress(trio.BrokenResourceError):
            await stream.send_all(answer)
            with trio.move_on_after(0.2):  # with nothing left unread, it hangs up like a friend
                while await stream.receive_some():
                    pass
        await stream.aclose()

    async with scene() as here, trio.open_nursery() as nursery:
        (listener,) = await nursery.start(partial(trio.serve_tcp, serve, 0, host="127.0.0.1"))
        port = listener.socket.getsockname()[1]
        nobody = Identity(b"x" * 32).public
        here.victim.host.keep_addresses(id_of(nobody), [f"/ip4/127.0.0.1/tcp/{port}"], USER, seconds=60)
        with pytest.raises(RequestError) as caught:
            await here.victim.request(nobody, STREAM, b"", deadline=SOON, most=1)
        assert caught.value.reason == "unreachable"
        assert await here.victim._dht._ask(id_of(nobody), kad(FIND_NODE, b"key")) is None
        nursery.cancel_scope.cancel()
