"""A node finds and keeps peers: cold, with dead seeds, after a partition, among bad peers."""

from __future__ import annotations

import logging
import math
from dataclasses import replace

import pytest
import trio
from libp2p.network.exceptions import SwarmException

from echo_node.net.discovery import dialer as discovery_module
from echo_node.net.discovery.address_book import AddressBook
from echo_node.net.discovery.address_door import UNKNOWN, USER
from echo_node.net.discovery.address_scope import Scope
from echo_node.net.discovery.dial_queue import Source
from echo_node.net.discovery.dialer import BRIEF_SECONDS, DIALS, MOST, WANTED
from echo_node.net.discovery.seeds import parse_seed
from echo_node.net.host import build_host, running
from echo_node.net.swarm import id_of
from protocol import Identity
from protocol.topics import PEERS_STREAM
from tests.net.discovery_nodes import LOOPBACK, crowd, dead_seed, part, searching, until


async def swarm(add, count: int):
    """Nodes that know the first one, and soon each other."""
    first, _ = await add()
    return [first, *[(await add(seeds=[first.seed]))[0] for _ in range(count - 1)]]


async def cold_start(count: int, seconds: float) -> None:
    async with crowd() as add:
        nodes = await swarm(add, count)
        await until(lambda: all(len(node.peers()) >= WANTED for node in nodes), 60)
        cold, _ = await add(seeds=[dead_seed(), nodes[0].seed, dead_seed()])
        await until(lambda: len(cold.peers()) >= WANTED, seconds)
        assert len(cold.discovery.known()) >= WANTED
        dials = cold.discovery.counts["dialled"]
        assert dials <= MOST + DIALS + 4, f"{dials} dials for {len(cold.peers())} peers"


async def test_a_cold_node_soon_has_its_peers():
    await cold_start(
        10, seconds=40
    )  # of a machine that has other things to do, and eleven nodes in one thread


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_cold_node_in_a_swarm_of_thirty_has_its_peers_within_ten_seconds():
    await cold_start(30, seconds=10)


async def test_with_every_seed_dead_a_node_that_was_here_comes_back_through_its_book(tmp_path):
    identity = Identity.generate()
    async with crowd() as add:
        nodes = await swarm(add, 4)
        book = AddressBook(tmp_path / "peers")
        async with searching(identity, seeds=[nodes[0].seed], book=book) as node:
            await until(lambda: len(node.peers()) == 4 and len(book) == 4)
        book.close()
        again = AddressBook(tmp_path / "peers")
        async with searching(identity, seeds=[dead_seed(), dead_seed()], book=again) as node:
            took = await until(lambda: len(node.peers()) == 4)
            assert took < 5
        again.close()


async def test_a_seed_that_dies_is_not_missed_and_one_that_returns_is_found():
    identity = Identity.generate()
    async with crowd() as add:
        seed, end = await add(identity=identity)
        one, _ = await add(seeds=[seed.seed])
        two, _ = await add(seeds=[seed.seed])
        await until(lambda: {two.public, seed.public} <= one.peers())
        where = seed.address
        await end()
        await until(lambda: one.peers() == {two.public} and two.peers() == {one.public})
        again, _ = await add(identity=identity, listen=where)
        await until(lambda: {one.public, two.public} <= again.peers(), 20)


async def test_halves_that_were_apart_grow_together_by_themselves(monkeypatch):
    async with crowd() as add:
        nodes = await swarm(add, 6)
        await until(lambda: all(len(node.peers()) == 5 for node in nodes), 20)
        left = {node.public for node in nodes[:3]}
        cut = True

        def cut_off(node):
            dial = node.host.swarm.dial_peer

            async def dial_peer(peer):
                if cut and (peer.to_bytes()[-32:] in left) != (node.public in left):
                    await trio.lowlevel.checkpoint()
                    raise SwarmException("no way there")
                return await dial(peer)

            monkeypatch.setattr(node.host.swarm, "dial_peer", dial_peer)

        for node in nodes:
            cut_off(node)
        for one in nodes[:3]:
            for two in nodes[3:]:
                await part(one, two)
        await until(lambda: all(len(node.peers()) == 2 for node in nodes))
        await until(
            lambda: sum(node.discovery.counts["failed"] for node in nodes) > 40, 60
        )  # so pauses have grown
        assert all(len(node.peers()) == 2 for node in nodes), "within a half nothing was dropped"
        sources = {
            each.source for node in nodes for each in node.discovery._queue if each.public not in node.peers()
        }
        assert sources == {Source.LOST}, "who was there is looked for before all others"
        cut = False
        took = await until(lambda: all(len(node.peers()) == 5 for node in nodes), 20)
        assert took < 15


async def test_names_are_seeds_too_and_one_that_leads_nowhere_stops_nobody(caplog):
    async with searching() as seed:
        port = seed.address.rpartition("/")[2]
        named = parse_seed(f"/dns4/localhost/tcp/{port}/p2p/{seed.identity.peer_id}")
        nowhere = parse_seed(f"/dns4/no-such-name.invalid/tcp/4001/p2p/{seed.identity.peer_id}")
        with caplog.at_level(logging.WARNING):
            async with searching(seeds=[nowhere, named]) as node:
                await until(lambda: seed.public in node.peers())
                await until(lambda: "no-such-name.invalid" in caplog.text)


async def test_a_name_that_starts_to_lead_somewhere_is_followed(monkeypatch):
    monkeypatch.setattr(discovery_module, "SEED_PAUSE", (0.05, 0.1))
    resolve, asked = discovery_module.resolve, []

    async def late(seed):
        asked.append(seed)
        if len(asked) < 4:
            await trio.lowlevel.checkpoint()
            raise discovery_module.SeedError("the name is not there yet")
        return await resolve(seed)

    monkeypatch.setattr(discovery_module, "resolve", late)
    async with searching() as seed, searching(seeds=[seed.seed]) as node:
        await until(lambda: seed.public in node.peers())
        assert len(asked) == 4


async def test_a_node_never_dials_itself():
    identity = Identity.generate()
    async with searching(identity) as node:
        node.discovery.suggest(identity.public, [node.address], "a test")
        node.discovery._on_mdns(identity.public, [node.address])
        assert not node.discovery._queue.add(identity.public, [node.address], Source.SEED)
        assert identity.public not in node.discovery.known()


async def test_a_peer_that_the_dht_finds_is_tried():
    async with searching() as other, searching() as node:
        ways = node.host.door.admit(
            other.public,
            [f"{other.address}/p2p/{other.identity.peer_id}"],
            replace(UNKNOWN, met=Scope.LOOPBACK),
        )
        node.discovery.suggest(other.public, ways, "the DHT")
        await until(lambda: other.public in node.peers())
        assert node.discovery.counts["suggested by the DHT"] == 1
        await until(lambda: node.discovery.known()[other.public] == (other.address,))


async def test_a_peer_that_hangs_up_at_once_is_not_dialled_without_end(monkeypatch):
    monkeypatch.setattr(
        discovery_module, "interfaces", tuple
    )  # other tests make networks meanwhile, which is news
    async with searching() as rude, searching(seeds=[rude.seed]) as node:
        ended = 0
        with trio.move_on_after(BRIEF_SECONDS - 1):
            while True:
                await until(lambda: rude.public in node.peers(), 30)
                await part(rude, node)
                await until(lambda: rude.public not in node.peers())
                ended += 1
        assert 1 <= node.discovery.counts["dialled"] <= 5
        assert ended


async def test_whoever_comes_only_to_hang_up_waits_longer_each_time_and_the_others_do_not():
    """Its coming is news of a network that is back, for everybody but itself."""
    async with searching() as rude, searching(seeds=[dead_seed()]) as node:
        candidates, other = node.discovery._queue, Identity.generate().public
        candidates.add(rude.public, [rude.address], Source.LOST)
        candidates.add(other, ["/ip4/127.0.0.1/tcp/1"], Source.LOST)
        candidates._all[rude.public].not_before = candidates._all[other].not_before = math.inf
        pauses = []
        for _ in range(6):
            candidates._all[other].failures = 20
            node.discovery._on_connected(rude.public, outbound=True)
            assert candidates._all[other].failures == 0
            node.discovery._on_disconnected(rude.public, [rude.address], 0.0)
            pauses.append(candidates._all[rude.public].not_before - trio.current_time())
        assert candidates._all[rude.public].failures == 6
        assert pauses[0] <= 1.0
        assert pauses[5] >= 4.9


async def test_a_dial_that_hangs_holds_nothing_up(monkeypatch):
    monkeypatch.setattr(discovery_module, "DIAL_SECONDS", 0.5)
    with trio.socket.socket() as hole:  # it takes connections and says nothing
        await hole.bind(("127.0.0.1", 0))
        hole.listen(100)
        way = f"/ip4/127.0.0.1/tcp/{hole.getsockname()[1]}"
        holes = [parse_seed(f"{way}/p2p/{Identity.generate().peer_id}") for _ in range(2 * DIALS)]
        async with searching() as seed, searching(seeds=[*holes, seed.seed]) as node:
            took = await until(lambda: seed.public in node.peers(), 10)
            assert took < 5
            assert len(node.discovery._dialling) <= DIALS


async def test_strangers_of_other_languages_are_neither_written_down_nor_told(tmp_path):
    stranger = build_host(Identity(b"x" * 32))
    book = AddressBook(tmp_path / "peers")
    async with (
        running(stranger, [LOOPBACK]),
        searching(book=book) as node,
        searching(seeds=[node.seed]) as friend,
    ):
        stranger.keep_addresses(id_of(node.public), [node.address], USER, seconds=60)
        await stranger.get_network().dial_peer(id_of(node.public))
        await until(lambda: len(node.peers()) == 2)
        await until(lambda: friend.public in {entry.public for entry in book})
        await until(lambda: node.host.speaks(stranger.get_id(), "/ipfs/id/1.0.0"))
        assert set(node.discovery._peers.dialable()) == {friend.public}
        assert {entry.public for entry in book} == {friend.public}
        assert Identity(b"x" * 32).public in node.peers(), "nobody is sent away"
    book.close()


async def test_who_is_not_welcome_is_not_dialled():
    async with searching() as other, searching() as node:
        while not node.host.scores.is_muted(other.public):
            node.host.scores.fault(other.public, "a test")
        node.discovery.suggest(other.public, [other.address], "a test")
        await until(lambda: not node.discovery._changed.is_set())
        assert node.discovery.counts["dialled"] == 0


async def test_when_it_ends_it_leaves_nothing_behind():
    async with searching() as other:
        host = build_host(Identity.generate())
        async with running(host, [LOOPBACK]):
            before = list(host.swarm.notifees)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(discovery_module.Dialer(host, seeds=[other.seed]).run)
                await until(lambda: id_of(other.public) in host.get_connected_peers())
                nursery.cancel_scope.cancel()
            assert host.swarm.notifees == before
            assert PEERS_STREAM not in host.get_mux().handlers
            assert id_of(other.public) in host.get_connected_peers(), "what works is left as it is"


@pytest.mark.parametrize("have", [WANTED, MOST, 2 * MOST])
async def test_a_node_with_enough_peers_is_quiet(have):
    async with searching() as node:
        room = node.discovery._room
        node.discovery._visit_at = trio.current_time() + 100
        assert room(have) is {WANTED: Source.REFERRED, MOST: Source.LOST, 2 * MOST: None}[have]
        node.discovery._dialling.add(b"somebody")
        assert room(have) is None, "one at a time"
        assert room(WANTED - 1) is Source.REFERRED
        node.discovery._dialling.clear()
        node.discovery._visit_at = 0.0
        assert have != MOST or (room(have), room(have)) == (Source.SEED, Source.LOST), (
            "now and then to the seeds"
        )
