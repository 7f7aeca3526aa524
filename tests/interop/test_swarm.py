"""A peer of js-libp2p in a swarm of ours: discovery, gossip, requests and responses.

The swarm is real hosts on loopback, in this process; the peer is `swarm/peer.js`, in a process of
its own. It opens and seals with the code of this folder, which was written from SPEC.md alone.
"""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
from contextlib import asynccontextmanager
from hashlib import sha256
from pathlib import Path
from random import Random

import pytest
import trio
from libp2p.network.exceptions import SwarmException
from libp2p.peer.peerinfo import PeerInfo
from multiaddr import Multiaddr

from echo_node.net.base import ACCEPT
from echo_node.net.dht.kademlia import QUESTION_SECONDS
from echo_node.net.libp2p import join_swarm
from echo_node.net.swarm import id_of
from echo_node.net.swarm_settings import SwarmSettings
from protocol import Heartbeat, Identity, blob_id, open_sealed, peer_id, seal, topics
from tests.protocol.examples import HEARTBEAT, RUN, TRAINER

HERE = Path(__file__).parent / "swarm"
pytestmark = pytest.mark.skipif(
    not (shutil.which("node") and (HERE / "node_modules").is_dir()),
    reason="node or its packages are not there; `make setup` brings them",
)

SECONDS = 30.0
LARGE = 10_000_000
STREAM = "/echo/test/1"
KEY = topics.role_key(RUN, "trainer")
TOPIC = topics.topic(RUN, topics.HEADS)
JAVASCRIPT = Identity(b"j" * 32)
SEED, NEAR, FAR = sorted(  # each closer to the key than the one before: on no other way does js-libp2p go on
    (Identity(bytes([n]) * 32) for n in range(101, 104)),
    key=lambda each: -(id_of(each.public).xor_id ^ int.from_bytes(sha256(KEY).digest())),
)


class Peer:
    """The peer in JavaScript: commands go in, answers and events come out."""

    def __init__(self, process, nursery):
        self.public = JAVASCRIPT.public
        self.peer_id = JAVASCRIPT.peer_id
        self.addresses = []
        self.events = []
        self._process = process
        self._numbers = itertools.count()
        self._answers = {}
        self._news = trio.Condition()
        nursery.start_soon(self._read)

    async def do(self, name, **rest):
        number = next(self._numbers)
        line = json.dumps({"id": number, "do": name, **rest})
        await self._process.stdin.send_all(line.encode() + b"\n")
        answer = await self._until(lambda: self._answers.pop(number, None))
        assert "error" not in answer, answer["error"]
        return answer["ok"]

    async def hear(self, event, **members):
        """The first event of this name with these members."""
        wanted = {"event": event, **members}.items()
        return await self._until(lambda: next((each for each in self.events if wanted <= each.items()), None))

    async def _until(self, find):
        with trio.fail_after(SECONDS):
            async with self._news:
                while not (found := find()):
                    await self._news.wait()
                return found

    async def _read(self):
        buffer = b""
        async for chunk in self._process.stdout:
            *lines, buffer = (buffer + chunk).split(b"\n")
            async with self._news:
                for line in map(json.loads, lines):
                    if "event" in line:
                        # a dict of plain values, so that it can be compared member by member
                        self.events.append({k: v for k, v in line.items() if not isinstance(v, list)})
                        self.addresses = line.get("addresses", self.addresses)
                    else:
                        self._answers[line["id"]] = line
                self._news.notify_all()


@asynccontextmanager
async def javascript(**options):
    """The peer, listening and not connected to anybody."""
    words = json.dumps({"seed": JAVASCRIPT.seed.hex(), **options})
    async with trio.open_nursery() as nursery:
        process = await trio.lowlevel.open_process(
            ["node", "peer.js", words], cwd=HERE, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        try:
            peer = Peer(process, nursery)
            await peer.hear("here", peer=JAVASCRIPT.peer_id)
            yield peer
        finally:
            with trio.CancelScope(shield=True):
                await process.stdin.aclose()
                with trio.move_on_after(3):
                    await process.wait()
                if process.returncode is None:
                    process.kill()
                    await process.wait()
            nursery.cancel_scope.cancel()


@asynccontextmanager
async def ours(identity, *seeds):
    """One of ours, which dials the seeds that it is given and nobody else."""
    settings = SwarmSettings(
        listen=("/ip4/127.0.0.1/tcp/0",),
        seeds=tuple(each.addresses[0] for each in seeds),
        wanted=len(seeds),
    )
    async with join_swarm(identity, settings) as network:
        yield network


async def dial(network, peer):
    with trio.fail_after(SECONDS):
        await network.host.connect(PeerInfo(id_of(peer.public), [Multiaddr(each) for each in peer.addresses]))


def wall(one, other):
    """From now on neither gets through to the other, as with a firewall between them."""
    for here, there in ((one, other), (other, one)):

        async def dial_once(peer, to, *, beyond=there.public, dial=here.host.swarm._dial_once):
            if peer == id_of(beyond):
                raise SwarmException("there is a wall")
            return await dial(peer, to)

        here.host.swarm._dial_once = dial_once


async def until(condition):
    with trio.fail_after(SECONDS):
        while not condition():  # noqa: ASYNC110 -- what is waited for happens in another process
            await trio.sleep(0.01)


async def agrees(peer, command, wanted, **rest):
    """Wait until the peer answers a command with what is wanted."""
    with trio.fail_after(SECONDS):
        while not wanted(await peer.do(command, **rest)):  # noqa: ASYNC110 -- it has no event to wait for
            await trio.sleep(0.05)


def heartbeat(version, identity=TRAINER):
    return seal(
        Heartbeat(head=HEARTBEAT.head, term=1, time_ms=HEARTBEAT.time_ms, version=version), identity, RUN
    )


def validator(message):
    """Validate as a run does: what does not open is a `ProtocolError`, hence a refusal."""
    open_sealed(message.data, Heartbeat, RUN)
    return ACCEPT


async def receive(inbox):
    with trio.fail_after(SECONDS):
        return await inbox.receive()


async def echo(_peer, data):
    await trio.lowlevel.checkpoint()
    return data


async def subscribe(peer, *those):
    """Let the peer listen to the topic, and wait until it and those know it of each other."""
    await peer.do("subscribe", topic=TOPIC, kind="heartbeat", run=RUN.hex())
    names = {peer_id(each.public) for each in those}
    await agrees(peer, "subscribers", lambda said: names <= set(said), topic=TOPIC)
    await until(lambda: all(peer.public in each._gossip.subscribers(TOPIC) for each in those))


async def test_it_finds_a_provider_that_neither_it_nor_its_seed_is_connected_to_and_asks_it():
    async with javascript() as peer, ours(SEED) as seed, ours(NEAR) as near, ours(FAR) as far:
        wall(seed, far)
        for each in seed, far:
            await dial(each, near)
        await until(lambda: {seed.public, far.public} <= near.peers() and len(seed._dht) and len(far._dht))
        assert await far._dht.provide(KEY) == 1
        assert far.peers() == seed.peers() == {near.public}
        assert await peer.do("peers") == []

        with far.serve(STREAM, echo, most=100):
            await peer.do("dial", address=seed.addresses[0])
            found = await peer.do("find", key=KEY.hex())
            assert set(found) == {peer_id(far.public)}
            places = [each.partition("/p2p/")[0] for each in found[peer_id(far.public)]["addresses"]]
            assert places == [each.partition("/p2p/")[0] for each in far.addresses]
            assert found[peer_id(far.public)]["from"] != peer_id(seed.public)
            assert far.public not in seed.peers()

            said = await peer.do("ask", peer=peer_id(far.public), stream=STREAM, data=b"who?".hex())
            assert said == {"outcome": 0, "answer": b"who?".hex()}
            assert peer.public in far.peers()
        assert seed.scores() == near.scores() == far.scores() == {}


async def test_what_it_provides_is_found_by_ours_and_dialled():
    async with ours(SEED) as seed, ours(NEAR, seed) as near, javascript() as peer:
        await peer.do("serve", stream=STREAM)
        await peer.do("dial", address=seed.addresses[0])
        await until(lambda: peer.public in seed.peers())
        await agrees(peer, "provide", lambda told: peer_id(seed.public) in told, key=KEY.hex())
        with trio.fail_after(SECONDS):
            while await near.find(KEY, 1) != [peer.public]:  # noqa: ASYNC110 -- an announcement is not answered
                await trio.sleep(0.05)
        assert await near.request(peer.public, STREAM, b"?", deadline=SECONDS, most=1) == b"?"
        assert seed.scores() == near.scores() == {}


async def test_ours_announce_to_it_and_it_tells_others():
    """js-libp2p keeps SHA2-256 keys only, which ours are not: it refuses, and nobody is harmed."""
    key = bytes.fromhex("1220") + KEY[2:]
    async with javascript() as peer, ours(SEED) as seed:
        await dial(seed, peer)
        await until(lambda: seed.host.speaks(id_of(peer.public), topics.KAD_PROTOCOL))
        before = trio.current_time()
        assert await seed._dht.provide(key) == 1
        assert await seed._dht.provide(KEY) == 0
        assert trio.current_time() - before < QUESTION_SECONDS, (
            "it does not wait for an answer that never comes"
        )
        assert list(await peer.do("find", key=key.hex())) == [peer_id(seed.public)]
        async with ours(NEAR) as near:
            await dial(near, peer)
            for each in key, KEY:
                assert await near.find(each, 1) == [seed.public]
            assert near.scores() == seed.scores() == {}


async def test_it_verifies_what_it_hears_and_what_it_says_is_judged_by_ours():
    async with (
        javascript() as peer,
        ours(SEED) as seed,
        ours(NEAR, seed) as near,
        seed.subscribe(TOPIC, validator) as at_seed,
        near.subscribe(TOPIC, validator) as at_near,
    ):
        await peer.do("dial", address=seed.addresses[0])
        await subscribe(peer, seed)
        await until(lambda: peer.public in seed._gossip.neighbours(TOPIC))

        await near.publish(TOPIC, heartbeat(1))
        heard = await peer.hear("gossip", version=1)
        assert heard["signer"] == TRAINER.public.hex()
        assert bytes.fromhex(heard["message"]) == open_sealed(heartbeat(1), Heartbeat, RUN).id
        await receive(at_seed)

        sealed = await peer.do("say", topic=TOPIC, run=RUN.hex(), version=2)
        for inbox in at_seed, at_near:
            said = open_sealed((await receive(inbox)).data, Heartbeat, RUN, signer=peer.public)
            assert (said.message.version, said.sealed.hex()) == (2, sealed)

        await peer.do("say", topic=TOPIC, run=RUN.hex(), version=3, forge=True)
        await until(seed.scores)
        assert seed.scores() == {peer.public: {"bad-signature": 1}}
        await peer.do("say", topic=TOPIC, run=RUN.hex(), version=4)
        assert open_sealed((await receive(at_near)).data, Heartbeat, RUN).message.version == 4
        assert seed.public not in near.scores(), "what was refused went no further"
        assert seed.mutes() == {}, "one slip mutes nobody"


async def test_ours_pass_its_gossip_on_to_others_of_ours_and_theirs_to_it():
    """A row of three, in which the ends do not know of each other."""
    async with (
        javascript(inDht=False) as peer,
        ours(SEED) as seed,
        seed.subscribe(TOPIC, validator) as at_seed,
    ):
        await peer.do("dial", address=seed.addresses[0])
        await subscribe(peer, seed)
        async with ours(NEAR, seed) as near, near.subscribe(TOPIC, validator) as at_near:
            for each in peer.public, near.public:
                await until(lambda each=each: each in seed._gossip.neighbours(TOPIC))
            sealed = await peer.do("say", topic=TOPIC, run=RUN.hex(), version=1)
            passed_on = await receive(at_near)
            assert (passed_on.data.hex(), passed_on.sender) == (sealed, seed.public)
            assert (await receive(at_seed)).sender == peer.public

            await near.publish(TOPIC, heartbeat(2))
            assert (await peer.hear("gossip", version=2))["via"] == peer_id(seed.public)
            assert peer.public not in near.peers()


async def test_it_refuses_a_forgery_of_ours():
    async with javascript() as peer, ours(SEED) as seed, seed.subscribe(TOPIC, validator):
        await peer.do("dial", address=seed.addresses[0])
        await subscribe(peer, seed)
        forged = bytearray(heartbeat(1))
        forged[-1] ^= 1
        await seed.publish(TOPIC, bytes(forged))
        assert (await peer.hear("refused"))["reason"] == "bad-signature"
        await seed.publish(TOPIC, heartbeat(2))
        await peer.hear("gossip", version=2)


async def test_what_was_said_before_it_came_is_offered_asked_for_and_recovered_both_ways(monkeypatch):
    """The peer is in no mesh and knows only the seed: IHAVE and IWANT are the only way."""
    monkeypatch.setattr("echo_node.net.gossip.mesh.WINDOW", 30)  # for as long as `peer.js`, on a busy machine
    monkeypatch.setattr("echo_node.net.gossip.mesh.HISTORY", 40)
    async with (
        javascript(inMesh=False, inDht=False) as peer,
        ours(SEED) as seed,
        ours(NEAR, seed) as near,
        seed.subscribe(TOPIC, validator) as at_seed,
    ):
        await peer.do("subscribe", topic=TOPIC, kind="heartbeat", run=RUN.hex())
        await until(lambda: seed.public in near._gossip.subscribers(TOPIC))
        assert await peer.do("peers") == []
        await peer.do("say", topic=TOPIC, run=RUN.hex(), version=1)
        await near.publish(TOPIC, heartbeat(2))
        await receive(at_seed)

        await dial(seed, peer)
        assert (await peer.hear("gossip", version=2))["via"] == peer_id(seed.public)
        recovered = await receive(at_seed)
        assert recovered.sender == peer.public
        assert open_sealed(recovered.data, Heartbeat, RUN).message.version == 1
        assert await peer.do("neighbours", topic=TOPIC) == []
        assert peer.public not in seed._gossip.neighbours(TOPIC)
        assert seed.scores() == {}


@pytest.mark.parametrize("half_close", [True, False])
async def test_questions_go_both_ways_and_failures_have_their_outcome(half_close):
    async with ours(SEED) as seed, javascript() as peer:
        await peer.do("dial", address=seed.addresses[0])
        await peer.do("serve", stream=STREAM)
        assert await seed.request(peer.public, STREAM, b"", deadline=SECONDS, most=0) == b""
        assert await seed.request(peer.public, STREAM, b"abc", deadline=SECONDS, most=3) == b"abc"

        async def handler(asker, data):
            await trio.sleep(0.2)  # long enough for the end of the question to arrive
            if data == b"no":
                open_sealed(data, Heartbeat, RUN)
            return asker + data

        async def ask(data):
            return await peer.do(
                "ask", peer=peer_id(seed.public), stream=STREAM, data=data.hex(), halfClose=half_close
            )

        with seed.serve(STREAM, handler, most=3):
            assert await ask(b"abc") == {"outcome": 0, "answer": (peer.public + b"abc").hex()}
            assert (await ask(b"no"))["outcome"] == 4
            assert (await ask(b"long"))["outcome"] == 3


async def test_ten_megabytes_go_each_way_at_once():
    async with ours(SEED) as seed, javascript() as peer:
        await peer.do("dial", address=seed.addresses[0])
        await peer.do("serve", stream=STREAM)
        data = Random(1).randbytes(LARGE)

        async def ask():
            answer = await seed.request(peer.public, STREAM, data, deadline=SECONDS, most=len(data))
            assert blob_id(answer) == blob_id(data)

        with seed.serve(STREAM, echo, most=LARGE):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ask)
                said = await peer.do("askLarge", peer=peer_id(seed.public), stream=STREAM, size=LARGE)
            assert said["outcome"] == 0
            assert said["asked"] == said["answered"]
