"""Faults of py-libp2p, without and with our patches and subclasses: each test shows both."""

from __future__ import annotations

import importlib.util
import logging

import pytest
import trio
from libp2p.network.connection.swarm_connection import SwarmConn
from libp2p.network.swarm import Swarm
from libp2p.peer.peerstore import PeerStore, PeerStoreError
from libp2p.protocol_muxer.exceptions import MultiselectCommunicatorError
from libp2p.protocol_muxer.multiselect_communicator import MultiselectCommunicator
from libp2p.stream_muxer import muxer_multistream
from libp2p.tools.anyio_service import Service, background_trio_service
from libp2p.tools.anyio_service.trio_manager import TrioManager
from multiaddr import Multiaddr

from echo_node.errors import ConfigError
from echo_node.net import libp2p_patches
from echo_node.net.gossip.wire import write_length
from echo_node.net.host import build_host, running
from echo_node.net.peerstore import ADDRESSES, BoundedPeerStore
from echo_node.net.swarm import HardSwarm, id_of
from echo_node.net.swarm_settings import SwarmSettings
from echo_node.net.yamux.muxer import Yamux
from protocol import Identity
from tests.net.hostile import LISTEN, SOON, scene, until

libp2p_patches.harden()
both = pytest.mark.parametrize("stock", [False, True], ids=["hardened", "stock"])


def fresh(module):
    """A second copy of a module of the library, which nobody has patched."""
    spec = importlib.util.find_spec(module)
    copy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    return copy


class Endless:
    """A peer that announces a line of 2⁶⁰ bytes, and sends it."""

    def __init__(self):
        self._length = list(write_length(2**60))
        self.read_bytes = 0

    async def read(self, n):
        await trio.lowlevel.checkpoint()
        if self._length:
            return bytes([self._length.pop(0)])
        self.read_bytes += min(n, 65_536)
        return bytes(min(n, 65_536))


class Text:
    def __init__(self, data):
        self._data = data

    async def read(self, n):
        await trio.lowlevel.checkpoint()
        data, self._data = self._data[:n], self._data[n:]
        return data


@both
async def test_a_line_of_any_length_is_not_read_before_a_peer_has_shown_who_it_is(monkeypatch, stock):
    if stock:
        copy = fresh("libp2p.protocol_muxer.multiselect_communicator")
        monkeypatch.setattr(MultiselectCommunicator, "read", copy.MultiselectCommunicator.read)
    reader = Endless()
    with pytest.raises(MultiselectCommunicatorError):
        await MultiselectCommunicator(reader).read()
    assert (reader.read_bytes > 1_000_000) == stock


@both
async def test_a_line_that_is_no_text_ends_the_negotiation(monkeypatch, stock):
    if stock:
        copy = fresh("libp2p.protocol_muxer.multiselect_communicator")
        monkeypatch.setattr(MultiselectCommunicator, "read", copy.MultiselectCommunicator.read)
    with pytest.raises(UnicodeDecodeError if stock else MultiselectCommunicatorError):
        await MultiselectCommunicator(Text(b"\x03\xff\xfe\n")).read()
    assert await MultiselectCommunicator(Text(b"\x04/id\n")).read() == "/id"


@both
async def test_an_error_in_one_task_of_a_service_ends_that_task(monkeypatch, stock, caplog):
    if stock:
        copy = fresh("libp2p.tools.anyio_service.trio_manager")
        monkeypatch.setattr(TrioManager, "run_task", copy.TrioManager.run_task)
    caplog.set_level(logging.CRITICAL)

    class Waiting(Service):
        async def run(self):
            await self.manager.wait_finished()

    async def fail():
        await trio.lowlevel.checkpoint()
        raise ValueError("a bug")

    async def serve():
        service = Waiting()
        async with background_trio_service(service) as manager:
            manager.run_task(fail)
            with trio.move_on_after(0.3):
                await manager.wait_finished()
            assert manager.is_running != stock

    if stock:
        with pytest.raises(ExceptionGroup):
            await serve()
    else:
        await serve()


async def test_an_error_on_a_connection_ends_that_connection(monkeypatch, caplog):
    caplog.set_level(logging.CRITICAL)
    async with scene() as here:
        broken = here.victim.host.swarm.connections[here.ill.get_id()][0]

        async def fail(*_arguments):
            await trio.lowlevel.checkpoint()
            raise ValueError("a bug")

        monkeypatch.setattr(broken, "_handle_muxed_stream", fail)
        await here.ill.swarm.connections[id_of(here.victim.public)][0].muxed_conn.open_stream()
        await until(lambda: here.ill.get_id() not in here.victim.host.swarm.connections)
        assert isinstance(broken, SwarmConn)


@both
async def test_connections_are_carried_by_our_yamux(monkeypatch, stock):
    if stock:
        copy = fresh("libp2p.stream_muxer.muxer_multistream")
        monkeypatch.setattr(muxer_multistream, "Yamux", copy.Yamux)
    hosts = [build_host(Identity(bytes([n]) * 32)) for n in (11, 12)]
    async with running(hosts[0], LISTEN), running(hosts[1], []):
        from libp2p.peer.peerinfo import PeerInfo

        await hosts[1].connect(PeerInfo(hosts[0].get_id(), hosts[0].get_addrs()))
        (connection,) = hosts[1].swarm.get_connections(hosts[0].get_id())
        assert isinstance(connection.muxed_conn, Yamux) != stock


@both
async def test_an_inbound_connection_gives_its_place_back_when_it_ends(monkeypatch, stock):
    if stock:
        monkeypatch.setattr(HardSwarm, "upgrade_inbound_raw_conn", Swarm.upgrade_inbound_raw_conn)
    async with scene(settings=SwarmSettings(listen=LISTEN, connections=60)) as here:
        for n in range(5):
            guest = build_host(Identity(bytes([100 + n]) * 32))
            async with running(guest, []):
                await here.connect(guest)
        limiter = here.victim.host.swarm._inbound_limiter
        with trio.move_on_after(1):
            while limiter.borrowed_tokens > 2:  # noqa: ASYNC110 -- the end of a connection is nobody's event
                await trio.sleep(0.01)
        assert (limiter.borrowed_tokens > 2) == stock


# The store of peers


def filled(store, count):
    me = id_of(bytes(32))
    private = Identity(bytes(32))
    from echo_node.net.host import _key_pair

    me = id_of(private.public)
    store.add_key_pair(me, _key_pair(private))
    store.max_peers = count
    return me


@both
def test_a_store_that_is_full_keeps_its_owners_keys(stock):
    pinned = set()
    store = PeerStore() if stock else BoundedPeerStore(pinned=lambda peer: peer in pinned)
    me = filled(store, 10)
    pinned.add(me)
    for n in range(20):
        store.add_addrs(id_of(bytes([n]) * 32), [Multiaddr("/ip4/1.2.3.4/tcp/1")], 60)
    assert len(store.peer_data_map) <= 10
    assert (me in store.peer_data_map) != stock


@both
def test_addresses_of_one_peer_are_bounded(stock):
    store, peer = PeerStore() if stock else BoundedPeerStore(), id_of(bytes(32))
    for n in range(1, 1_000):
        store.add_addrs(peer, [Multiaddr(f"/ip4/1.2.3.4/tcp/{n}")], 60)
    assert (len(store.addrs(peer)) > ADDRESSES) == stock


@both
def test_addresses_that_are_old_are_none_and_no_error(stock):
    store, peer = PeerStore() if stock else BoundedPeerStore(), id_of(bytes(32))
    store.add_addrs(peer, [Multiaddr("/ip4/1.2.3.4/tcp/1")], 60)
    store.peer_data_map[peer].last_identified -= 61
    if stock:
        with pytest.raises(PeerStoreError):
            store.addrs(peer)
    else:
        assert store.addrs(peer) == []


async def test_a_node_goes_on_when_what_it_knows_of_a_connected_peer_is_old():
    async with scene() as here:
        for data in here.victim.host.get_peerstore().peer_data_map.values():
            data.last_identified -= 10_000_000
        with trio.fail_after(SOON):
            await here.victim._dht.closest(b"key")
        here.victim.host.get_peerstore()._cleanup_expired_records()
        assert here.victim.host.speaks(here.honest.host.get_id(), "/meshsub/1.1.0")


def test_the_library_is_silent_and_of_the_version_that_the_patches_are_made_for(monkeypatch):
    for name in ("libp2p", "libp2p.network.swarm", "libp2p.network.auto_connector"):
        assert logging.getLogger(name).getEffectiveLevel() == logging.CRITICAL
    monkeypatch.setattr(libp2p_patches, "_done", [])
    monkeypatch.setattr(libp2p_patches, "VERSION", "0.0.0")
    with pytest.raises(ConfigError, match=r"0\.0\.0"):
        libp2p_patches.harden()
