"""Yamux in any order of acts on both sides, against the library's own, and in two whole hosts."""

from __future__ import annotations

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from libp2p.network.connection.swarm_connection import SwarmConn
from libp2p.peer.peerinfo import PeerInfo
from libp2p.stream_muxer.exceptions import MuxedStreamEOF, MuxedStreamReset
from libp2p.stream_muxer.yamux.yamux import Yamux as StockYamux
from trio.testing import wait_all_tasks_blocked

from echo_node.net import host as host_module
from echo_node.net.host import build_host, running
from echo_node.net.swarm import id_of
from echo_node.net.yamux.muxer import PROTOCOL_ID, Yamux
from protocol import Identity
from tests.net.yamux_peers import BLOB, read_all, two

STREAMS = 4
SCRIPT = st.lists(
    st.tuples(
        st.tuples(st.integers(0, STREAMS - 1), st.booleans()),
        st.sampled_from(["write", "write", "write", "close", "reset", "pause"]),
        st.one_of(st.integers(0, 40), st.integers(60_000, 140_000), st.just(400_000)),
    ),
    max_size=25,
)


class Play:
    """Some streams, both sides of which do what a script says while both read all the time."""

    def __init__(self, ends, size):
        self.ends = ends
        self.size = size
        self.sent = dict.fromkeys(ends, b"")
        self.closed = set()
        self.dead = set()
        self.read = {}

    async def receive(self, key):
        found = b""
        try:
            while True:
                found += await self.ends[key].read(self.size)
        except MuxedStreamEOF:
            self.read[key] = found, "end"
        except MuxedStreamReset:
            self.read[key] = found, "reset"

    async def act(self, key, what, length):
        if what == "pause":
            await wait_all_tasks_blocked()
        elif key[0] not in self.dead and key not in self.closed:
            await getattr(self, what)(key, length)

    async def write(self, key, length):
        data = bytes([len(self.sent[key]) % 251]) * length
        await self.ends[key].write(data)
        self.sent[key] += data

    async def close(self, key, _length):
        await self.ends[key].close()
        self.closed.add(key)

    async def reset(self, key, _length):
        await self.ends[key].reset()
        self.dead.add(key[0])

    def check(self):
        for (index, side), (found, how) in self.read.items():
            sent = self.sent[index, not side]
            if index in self.dead:
                assert sent.startswith(found)
            else:
                assert (found, how) == (sent, "end")


@settings(max_examples=60)
@given(script=SCRIPT, size=st.one_of(st.none(), st.integers(1, 100_000)))
def test_any_order_of_writes_closes_and_resets_delivers_exact_bytes(script, size):
    trio.run(_play, script, size)


async def _play(script, size):
    async with two() as (one, other):
        ends = {}
        for index in range(STREAMS):
            opener, accepter = (one, other) if index % 2 else (other, one)
            ends[index, True] = await opener.open_stream()
            ends[index, False] = await accepter.accept_stream()
        play = Play(ends, size)
        async with trio.open_nursery() as nursery:
            for key in ends:
                nursery.start_soon(play.receive, key)
            for step in script:
                await play.act(*step)
            for key in ends:
                await play.act(key, "close", 0)
        play.check()
        assert one.open_streams == other.open_streams == 0
        assert (one.why, other.why) == ("", "")


@pytest.mark.parametrize("ours_opens", [True, False])
async def test_the_librarys_own_yamux_understands_ours_and_ours_understands_it(ours_opens):
    async with two(other=StockYamux) as (one, stock):
        opener, accepter = (one, stock) if ours_opens else (stock, one)
        for _ in range(3):
            a = await opener.open_stream()
            b = await accepter.accept_stream()
            async with trio.open_nursery() as nursery:
                for here, there in ((a, b), (b, a)):

                    async def send(here=here):
                        await here.write(BLOB[:1_500_000])
                        await here.close()

                    async def receive(there=there):
                        assert await read_all(there, 65_536) == BLOB[:1_500_000]

                    nursery.start_soon(send)
                    nursery.start_soon(receive)
        c = await opener.open_stream()
        d = await accepter.accept_stream()
        await c.reset()
        with pytest.raises(MuxedStreamReset):
            await d.read()
        await wait_all_tasks_blocked(0.01)
        assert one.open_streams == 0
        assert not one.violation


async def test_two_hosts_carry_two_hundred_streams_at_once(monkeypatch):
    monkeypatch.setattr(host_module, "STREAMS_PER_PEER", 256)
    here, there = Identity.generate(), Identity.generate()
    one, other = build_host(here), build_host(there)
    name = "/echo/test/1.0.0"

    async def echo(stream):
        data = b""
        while len(data) < 20_000:
            data += await stream.read(65_536)
        await stream.write(data)
        await stream.close()

    other.set_stream_handler(name, echo)
    listen = ["/ip4/127.0.0.1/tcp/0"]
    async with running(one, listen), running(other, listen):
        await one.connect(PeerInfo(id_of(there.public), other.get_addrs()))
        done = []

        async def ask(index):
            stream = await one.new_stream(id_of(there.public), [name])
            data = index.to_bytes(2) * 10_000
            await stream.write(data)
            back = b""
            while len(back) < len(data):
                back += await stream.read(65_536)
            assert back == data
            await stream.close()
            done.append(index)

        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                for index in range(200):
                    nursery.start_soon(ask, index)
        assert sorted(done) == list(range(200))
        (conn,) = one.get_network().get_connections()
        assert isinstance(conn, SwarmConn)
        assert isinstance(conn.muxed_conn, Yamux), "the library hands in its own unless it is patched"
        assert conn.get_negotiated_muxer_protocol() == PROTOCOL_ID
