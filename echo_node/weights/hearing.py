"""The chain as one node hears it: heads from gossip, and from peers that are asked, since gossip can miss some.

What the rules of the chain take is kept in the store, synced; what they refuse is refused by its name and held against
whoever sent it, if an honest node would not have. It fetches no weights, and knows no engine.
"""

from __future__ import annotations

import itertools
import logging
import random
from collections.abc import Iterable
from typing import Final

import trio

from echo_node.errors import PeerError
from echo_node.net.base import ACCEPT, IGNORE, Message, Network, Reject, Validation
from echo_node.weights.journal import Head
from echo_node.weights.store import WeightsStore
from protocol import (
    ChainError,
    Envelope,
    HeadsAnswer,
    HeadsQuestion,
    ProtocolError,
    WeightsHead,
    decode,
    encode,
    limits,
    open_sealed,
    topics,
)

log = logging.getLogger(__name__)

ASK_SECONDS: Final = 20.0
PEERS_ASKED: Final = 4
"""Others than the leader that are asked in one go."""
ASK_PAUSES: Final = (0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
"""Between questions at first, while peers are still being met; the last one goes on, although gossip is heard."""
NO_FAULT: Final = frozenset(
    {"gap", "rollback", "old-term", "missing-grant", "revoked", "not-leader", "below-link"}
)
"""Rules by which a head is refused that an honest node may have passed on: it knows more, or less, than we do."""


class Hearing:
    """One node's ears."""

    def __init__(self, network: Network, store: WeightsStore) -> None:
        self._network = network
        self._store = store
        self._news = trio.Event()
        self._asking = trio.Lock()
        self._luck = random.Random(network.public)  # noqa: S311 - spreads load, keeps no secret

    @property
    def tip(self) -> Head | None:
        """The newest head of the chain, whether or not its weights are here."""
        return self._store.follower.tip

    @property
    def leader(self) -> bytes:
        return self._store.follower.leader

    @property
    def holding(self) -> bool:
        """Whether a lie of the leader was heard, so that nothing can follow before a grant."""
        return self._store.follower.holding

    def find(self, head_id: bytes) -> Head | None:
        return self._store.find(head_id)

    async def hear(self, sealed: bytes) -> Head:
        """Take a head that somebody sent. What the rules of the chain refuse is raised, and changes nothing."""
        head = open_sealed(sealed, WeightsHead, self._store.follower.rules.run)
        if await trio.to_thread.run_sync(self._store.keep_head, head):
            self._news.set()
            self._news = trio.Event()
            if self.holding:
                log.warning("the leader was caught in a lie: nothing is followed before a new term")
        return head

    async def wait_for(self, head_id: bytes) -> Head:
        """The head of that id, once it has been heard. The caller sets the deadline."""
        while (found := self.find(head_id)) is None:
            await self._news.wait()
        return found

    async def wait_for_newer(self, than: bytes | None) -> Head:
        """The tip, once it is another one."""
        while (tip := self.tip) is None or tip.id == than:
            await self._news.wait()
        return tip

    # Gossip

    def judge(self, message: Message) -> Validation:
        """What gossip brings: cheap checks, and the signature. A fault of the head is one of whoever passed it on."""
        follower = self._store.follower
        envelope = Envelope.parse(message.data)
        if envelope.signer not in follower.rules.trainers:
            return Reject("not-trainer")
        head = envelope.open(WeightsHead, follower.rules.run)
        try:
            follower.accept(head)
        except ChainError as error:
            if error.rule not in NO_FAULT:
                return Reject(error.rule)
            return ACCEPT if error.rule in {"gap", "missing-grant"} else IGNORE
        return ACCEPT

    async def follow(self) -> None:
        """Hear what is gossiped, and ask now and then, until cancelled."""
        topic = topics.topic(self._store.follower.rules.run, topics.HEADS)
        async with (
            self._network.subscribe(topic, self.judge) as heads,
            trio.open_nursery() as nursery,
        ):
            nursery.start_soon(self._ask_now_and_then)
            async for message in heads:
                try:
                    await self.hear(message.data)
                except ChainError as error:
                    log.info("a head is not followed yet: %s", error)
                    if error.rule == "gap":
                        await self.ask_around([message.sender])

    async def _ask_now_and_then(self) -> None:
        for pause in itertools.chain(ASK_PAUSES, itertools.repeat(ASK_PAUSES[-1])):
            await self.ask_around()
            await trio.sleep(pause * self._luck.uniform(0.75, 1.25))

    # Questions

    async def ask_around(self, peers: Iterable[bytes] = ()) -> bool:
        """Ask the leader, these peers and some others that are connected, until one has something new."""
        others = sorted(self._network.peers() - {self.leader})
        self._luck.shuffle(others)
        named = dict.fromkeys((self.leader, *peers, *others[:PEERS_ASKED]))
        async with self._asking:
            before = self.tip
            for peer in named:
                if not peer or peer == self._network.public:
                    continue
                try:
                    await self.ask(peer)
                except (PeerError, ProtocolError) as error:
                    log.info("the chain cannot be caught up with there: %s", error)
                if self.tip is not before:
                    return True
        return False

    async def ask(self, peer: bytes) -> None:
        """Ask one peer for the heads that follow ours, until there are none."""
        for _ in itertools.count():
            held = [head.id for head in self._store.follower.heads]
            answer = await self._network.request(
                peer,
                topics.CHAIN_STREAM,
                encode(HeadsQuestion.of(held)),
                deadline=ASK_SECONDS,
                most=limits.HEADS_BYTES,
            )
            try:
                heads = decode(HeadsAnswer, answer).heads
                for sealed in heads:
                    await self._take(sealed)
            except ProtocolError as error:
                self._blame(peer, error)
                raise
            now = self._store.follower.heads
            if not heads or (now and held and now[-1].id == held[-1]) or not now:
                return

    async def _take(self, sealed: bytes) -> None:
        try:
            await self.hear(sealed)
        except ChainError as error:
            if error.rule != "below-link":  # a link says where our chain begins; others have more of it
                raise

    def _blame(self, peer: bytes, error: ProtocolError) -> None:
        reason = error.rule if isinstance(error, ChainError) else error.reason
        if reason not in NO_FAULT:
            self._network.score(peer, reason)
