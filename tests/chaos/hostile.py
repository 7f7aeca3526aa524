"""A hostile peer on the real network.

`python -m tests.chaos.hostile KIND --state DIR --seed ADDR --run FOLDER --listen ADDR`

It joins the swarm and the run like anybody and then does one thing as hard as it can until SIGTERM:
makes up groups, floods, forges, replays, sends halves of messages and waits, opens streams and
connections by the thousand and keeps them, crowds nodes with idle keys, or names false addresses.
Each second it prints a line of JSON with what it has done. It gives way to other processes, since
on a real network it would have a machine of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import trio
from libp2p.abc import INetStream
from libp2p.custom_types import TProtocol
from libp2p.host.exceptions import HostException
from multiaddr import Multiaddr

from echo_node.errors import EchoError, PeerError
from echo_node.models import embedded
from echo_node.net.base import ACCEPT, Message, Validation
from echo_node.net.gossip.wire import PROTOCOL_ID as GOSSIP
from echo_node.net.gossip.wire import Published, write_frame, write_length
from echo_node.net.libp2p import Libp2pNetwork, join_swarm
from echo_node.net.outbox.direct_delivery import deliver
from echo_node.net.reachability import autonat, circuit
from echo_node.net.swarm import BROKEN, id_of
from echo_node.net.swarm_settings import SwarmSettings
from echo_node.runs.run import Run
from echo_node.runs.spec import read_manifest
from echo_node.runtime import exit_codes
from echo_node.storage import state_dir
from protocol import Delivery, encode, limits, topics
from tests.chaos import crowds
from tests.chaos.lies import FEW, Heard, Liar

GIVES_WAY: Final = 10
OPEN_SECONDS: Final = 5.0
PAUSE: Final = 0.5
"""Before something is tried again that the other side has ended."""
JOIN_SECONDS: Final = 5.0
"""After which it begins without being let in: nobody may lead just then."""
WAIT_SECONDS: Final = 300.0
FRAME: Final = 16
"""Messages in one frame of gossip."""
IN_HAND: Final = 8
"""Questions to one peer at once."""
HALVES: Final = 400
MOST_STREAMS: Final = 10_000
MOST_CONNECTIONS: Final = 1_000
OPENERS: Final = 16
"""Who open streams at once."""
NEIGHBOUR_SECONDS: Final = 3.0
SPOKEN: Final = (
    *(*topics.STREAMS, GOSSIP, topics.KAD_PROTOCOL),
    *(str(circuit.HOP), str(circuit.STOP), str(autonat.PROTOCOL)),
)
ENDED: Final = (*BROKEN, HostException, EchoError)
Act = Callable[[bytes], Awaitable[None]]


class Hostile:
    """One such peer."""

    def __init__(
        self, network: Libp2pNetwork, run: Run, liar: Liar, heard: Heard, luck: random.Random
    ) -> None:
        self._network = network
        self._run = run.id
        self._trainers = run.manifest.trainers
        self._liar = liar
        self._heard = heard
        self._luck = luck
        self._kept = 0
        self.did: Counter[str] = Counter()

    async def join(self, seconds: float = JOIN_SECONDS) -> None:
        """Join as every sampler does, so that the next head's roster has this key."""
        async with trio.open_nursery() as nursery:
            nursery.cancel_scope.deadline = trio.current_time() + seconds
            for trainer in self._trainers:
                nursery.start_soon(self._enter, trainer, nursery.cancel_scope)

    async def _enter(self, trainer: bytes, scope: trio.CancelScope) -> None:
        """Until one of them has taken it."""
        topic, sealed = topics.topic(self._run, topics.JOINS), self._liar.join()
        while not scope.cancel_called:
            try:
                await deliver(self._network, trainer, topic, sealed, deadline=JOIN_SECONDS, most=0)
                self.did["joins taken"] += 1
                scope.cancel()
            except PeerError:
                await trio.sleep(PAUSE)

    # What it does

    async def make_up(self) -> None:
        """Groups of its own under every head, as a member sends them, that nobody drew."""
        async with trio.open_nursery() as nursery:
            if not self.did[
                "joins taken"
            ]:  # nobody led just then; of who is no member, nobody looks at a group
                nursery.start_soon(self.join, WAIT_SECONDS)
            while True:
                if (made := self._liar.made_up()) is not None:
                    cargo, data = made
                    await self._network.publish(topics.topic(self._run, cargo), data)
                    self.did["groups made up"] += FEW
                await trio.sleep(PAUSE)

    async def flood(self) -> None:
        """Garbage and groups of its own, by gossip and by hand."""
        await self._with_each(
            (
                partial(self._gossip, make=self._flood_lie),
                *[partial(self._deliver, make=self._flood_lie)] * IN_HAND,
            )
        )

    async def forge(self) -> None:
        """Send groups, heads, verdicts, grants, receipts, heartbeats, joins in others' names.

        It also asks for votes.
        """
        await self._with_each(
            (
                partial(self._gossip, make=self._liar.forgery),
                *[partial(self._deliver, make=self._liar.forgery)] * IN_HAND,
                self._ask_for_votes,
            )
        )

    async def replay(self) -> None:
        """Replay messages again and again, the oldest too, and old heads as if they were new."""
        await self._with_each(
            (partial(self._gossip, make=self._again), *[partial(self._deliver, make=self._again)] * IN_HAND)
        )

    async def half_message(self) -> None:
        """The beginning of a message on every protocol, and then nothing."""
        await self._with_each([partial(self._half, protocol=each) for each in SPOKEN] * 4)

    async def many_streams(self) -> None:
        """Streams and bare connections, as many as are given, kept open."""
        await self._with_each((*[self._keep_streams] * OPENERS, *[self._keep_connections] * 2))

    async def crowd(self) -> None:
        """Take the inbound places of every node with idle keys."""
        await crowds.crowd(self._network, self.did)

    async def misdirect(self) -> None:
        """Name addresses where nobody is, to have them dialled."""
        await crowds.misdirect(self._network, self.did)

    # Lies

    def _flood_lie(self) -> tuple[str, bytes]:
        return self._liar.garbage() if self._luck.random() < 0.5 else self._liar.own_groups()

    def _again(self) -> tuple[str, bytes]:
        all_ = self._heard.everything()
        return self._luck.choice(all_) if all_ else self._liar.garbage()

    # With one peer

    async def _with_each(self, acts: Sequence[Act]) -> None:
        """Attack every peer that can be reached, again and again."""
        busy: set[bytes] = set()

        async def bother(peer: bytes) -> None:
            try:
                async with trio.open_nursery() as nursery:
                    for act in acts:
                        nursery.start_soon(self._on_and_on, act, peer)
                    while peer in self._network.peers():  # noqa: ASYNC110 - a hint of how long is enough
                        await trio.sleep(PAUSE)
                    nursery.cancel_scope.cancel()
            finally:
                busy.discard(peer)

        async with trio.open_nursery() as nursery:
            while True:
                for peer in self._network.peers() - busy:
                    busy.add(peer)
                    nursery.start_soon(bother, peer)
                await trio.sleep(PAUSE)

    async def _on_and_on(self, act: Act, peer: bytes) -> None:
        while True:
            try:
                await act(peer)
            except* ENDED as group:
                for error in group.exceptions:
                    self.did[f"ended: {type(error).__name__}"] += 1
            await trio.sleep(PAUSE * self._luck.random())

    async def _open(self, peer: bytes, protocol: str) -> INetStream:
        with trio.fail_after(OPEN_SECONDS):
            stream = await self._network.host.new_stream(id_of(peer), [TProtocol(protocol)])
        self.did["streams opened"] += 1
        return stream

    async def _gossip(self, peer: bytes, *, make: Callable[[], tuple[str, bytes]]) -> None:
        """Frames of lies, as fast as they are taken."""
        stream = await self._open(peer, GOSSIP)
        while True:
            told = [make() for _ in range(FRAME)]
            frame = write_frame(
                published=[Published(topics.topic(self._run, cargo), data) for cargo, data in told]
            )
            with trio.fail_after(WAIT_SECONDS):
                await stream.write(frame)
            self.did["gossip sent"] += len(told)
            self.did["bytes sent"] += len(frame)

    async def _deliver(self, peer: bytes, *, make: Callable[[], tuple[str, bytes]]) -> None:
        while True:
            cargo, data = make()
            question = encode(Delivery(cargo=cargo, data=data[: limits.GOSSIP_BYTES], run=self._run))
            await self._ask(peer, topics.DELIVER_STREAM, question)

    async def _ask_for_votes(self, peer: bytes) -> None:
        while True:
            await self._ask(peer, topics.VOTE_STREAM, self._liar.vote_question())
            await trio.sleep(PAUSE)

    async def _ask(self, peer: bytes, stream: str, question: bytes) -> None:
        self.did["questions asked"] += 1
        self.did["bytes sent"] += len(question)
        try:
            await self._network.request(
                peer, stream, question, deadline=OPEN_SECONDS, most=limits.ANSWER_BYTES
            )
            self.did["questions answered"] += 1
        except PeerError as error:
            self.did[f"questions: {getattr(error, 'reason', 'failed')}"] += 1
            await trio.sleep(0.01)

    async def _half(self, peer: bytes, *, protocol: str) -> None:
        if self._kept >= HALVES:
            await trio.sleep(1)
            return
        stream = await self._open(peer, protocol)
        self._kept += 1
        try:
            asking = protocol in topics.STREAMS
            begun = (1_000).to_bytes(4) if asking else write_length(1_000)
            await stream.write(begun + self._luck.randbytes(500))
            self.did["halves sent"] += 1
            with trio.move_on_after(WAIT_SECONDS):
                await stream.read(1)
            self.did["halves answered"] += 1
        finally:
            self._kept -= 1

    async def _keep_streams(self, peer: bytes) -> None:
        """One after the other, until there are enough or the peer gives no more."""
        while self._kept < MOST_STREAMS:
            await self._open(peer, self._luck.choice(SPOKEN))
            self._kept += 1
            self.did["streams never closed"] += 1
        await trio.sleep(WAIT_SECONDS)

    async def _keep_connections(self, peer: bytes) -> None:
        """Connections that never say who they are."""
        places = [Multiaddr(each) for each in self._network.known().get(peer, ())]
        plain = [each for each in places if "p2p-circuit" not in str(each) and "tcp" in str(each)]
        if not plain:
            await trio.sleep(1)
            return
        host, port = (plain[0].value_for_protocol(each) for each in ("ip4", "tcp"))
        kept = []
        try:
            while self.did["connections opened"] < MOST_CONNECTIONS:
                with trio.fail_after(OPEN_SECONDS):
                    kept.append(await trio.open_tcp_stream(host, int(port)))
                self.did["connections opened"] += 1
                await trio.sleep(0.005)
            await trio.sleep(WAIT_SECONDS)
        finally:
            for each in kept:
                await trio.aclose_forcefully(each)

    # Beside it

    async def listen(self) -> None:
        """Hear all that is gossiped, as everybody may."""
        async with trio.open_nursery() as nursery:
            for cargo in topics.CARGOES:
                nursery.start_soon(self._hear, cargo)

    async def _hear(self, cargo: str) -> None:
        def look(_message: Message) -> Validation:
            return ACCEPT

        async with self._network.subscribe(topics.topic(self._run, cargo), look) as inbox:
            async for message in inbox:
                self._heard.hear(cargo, message.data)
                self.did["heard"] += 1
                if cargo == topics.VERDICTS and (found := self._liar.condemned(message.data)):
                    self.did["condemned"] += found

    async def seek(self) -> None:
        """Know everybody of the run."""
        while True:
            for role in topics.ROLES:
                await self._network.find(topics.role_key(self._run, role), 16, deadline=NEIGHBOUR_SECONDS)
            await trio.sleep(NEIGHBOUR_SECONDS)

    async def tell(self, kind: str) -> None:
        while True:
            await trio.sleep(1)
            tell("did", kind=kind, peers=len(self._network.peers()), **dict(sorted(self.did.items())))


KINDS: Final[dict[str, Callable[[Hostile], Awaitable[None]]]] = {
    "flood": Hostile.flood,
    "forge": Hostile.forge,
    "make_up": Hostile.make_up,
    "replay": Hostile.replay,
    "half_message": Hostile.half_message,
    "many_streams": Hostile.many_streams,
    "crowd": Hostile.crowd,
    "misdirect": Hostile.misdirect,
}


def tell(event: str, **more: Any) -> None:
    sys.stdout.write(json.dumps({"event": event, "at": round(time.time(), 3), **more}) + "\n")
    sys.stdout.flush()


def main(words: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.hostile", description=__doc__)
    parser.add_argument("kind", choices=sorted(KINDS))
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--seed", required=True, help="a node to meet others at")
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--listen", required=True)
    parser.add_argument(
        "--luck", type=int, default=1, help="with the same luck it tells the same lies of what it hears"
    )
    wish = parser.parse_args(words)
    exit_codes.run(partial(_be, wish), "hostile")


def _be(wish: argparse.Namespace) -> None:
    os.nice(GIVES_WAY)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    trio.run(_work, wish)


async def _work(wish: argparse.Namespace) -> None:
    identity = state_dir.prepared(wish.state).identity()
    run = Run.open(read_manifest(wish.run).sealed, embedded.folder(), jailed=False)
    luck, heard = random.Random(f"{wish.kind} {identity.peer_id} {wish.luck}"), Heard()
    tell("started", role="hostile", kind=wish.kind, peer_id=identity.peer_id)
    settings = SwarmSettings(listen=(wish.listen,), seeds=(wish.seed,), relay=False, wanted=32)
    async with exit_codes.until_stop_signal(), join_swarm(identity, settings) as network:
        hostile = Hostile(network, run, Liar(run, identity, heard, luck), heard, luck)
        async with trio.open_nursery() as nursery:
            for task in (hostile.listen, hostile.seek, partial(hostile.tell, wish.kind)):
                nursery.start_soon(task)
            await hostile.join()
            tell("began", **hostile.did)
            await KINDS[wish.kind](hostile)
    tell("stopped", finished=False, **dict(sorted(hostile.did.items())))


if __name__ == "__main__":
    main(sys.argv[1:])
