"""Follow the chain: take heads and grants from gossip and from asked peers.

Gossip can miss some, so peers are asked too. What the rules of the chain accept is kept in the
store, synced; what they refuse is refused by name, and counts against its sender if an honest node
would not have sent it.
"""

from __future__ import annotations

import itertools
import logging
import random
from collections.abc import Iterable, Sequence
from typing import Final

import trio

from echo_node.errors import PeerError
from echo_node.net.base import ACCEPT, IGNORE, Message, Network, Reject, Validation
from echo_node.net.subscription import Subscription
from echo_node.weights.chain_log import Head
from echo_node.weights.store import WeightsStore
from protocol import (
    ChainError,
    Envelope,
    Follower,
    GrantsAnswer,
    GrantsQuestion,
    HeadsAnswer,
    HeadsQuestion,
    ProtocolError,
    ShownGrant,
    TermGrant,
    WeightsHead,
    decode,
    encode,
    limits,
    open_sealed,
    peer_id,
    topics,
)

log = logging.getLogger(__name__)

ASK_SECONDS: Final = 20.0
PEERS_ASKED: Final = 4
"""Peers besides the leader that are asked in one go."""
ASK_PAUSES: Final = (0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
"""Seconds between questions: short while peers are still being met; the last value repeats."""
NO_FAULT: Final = frozenset(
    {"gap", "rollback", "old-term", "missing-grant", "revoked", "not-leader", "below-link"}
)
"""Rules that refuse a head or grant which an honest node may have relayed."""
MISSED: Final = frozenset({"gap", "missing-grant"})
"""Rules that say that something was missed."""


class ChainFollower:
    """Chain of one node, kept up to date from the network."""

    def __init__(self, network: Network, store: WeightsStore) -> None:
        self._network = network
        self._store = store
        self._news = trio.Event()
        self._asking = trio.Lock()
        self._luck = random.Random(network.public)  # noqa: S311 - spreads load, keeps no secret

    @property
    def tip(self) -> Head | None:
        """Return the newest head of the chain, whether or not its weights are here."""
        return self._store.follower.tip

    @property
    def leader(self) -> bytes:
        return self._store.follower.leader

    @property
    def holding(self) -> bool:
        """Return whether the leader equivocated: nothing follows until the next term."""
        return self._store.follower.holding

    @property
    def follower(self) -> Follower:
        """Return the chain as this node took it."""
        return self._store.follower

    def find(self, head_id: bytes) -> Head | None:
        return self._store.find(head_id)

    async def take_head(self, sealed: bytes) -> Head:
        """Take a head. What the rules of the chain refuse is raised, and changes nothing."""
        head = open_sealed(sealed, WeightsHead, self._store.follower.rules.run)
        if await trio.to_thread.run_sync(self._store.keep_head, head):
            self._notify()
            if self.holding:
                log.warning("the leader was caught in a lie: nothing is followed before a new term")
        return head

    async def take_grant(self, grant: TermGrant, branch: Sequence[Head] = ()) -> None:
        """Take a grant of a term. What the rules refuse is raised, and changes nothing."""
        await trio.to_thread.run_sync(self._store.keep_grant, grant, branch)
        self._notify()
        if self.holding:
            log.warning("term %d was granted to nobody who may lead it: nothing is followed", grant.vote.term)
        else:
            log.info("term %d: %s leads from now on", self.follower.term, peer_id(self.leader))

    def _notify(self) -> None:
        self._news.set()
        self._news = trio.Event()

    async def wait_for_change(self, since: Follower) -> Follower:
        """Wait for another chain than `before`, and return it."""
        while (now := self.follower) is since:
            await self._news.wait()
        return now

    async def wait_for(self, head_id: bytes) -> Head:
        """Wait for the head of that id, and return it. The caller sets the deadline."""
        while (found := self.find(head_id)) is None:
            await self._news.wait()
        return found

    async def wait_for_newer(self, than: bytes | None) -> Head:
        """Wait for another tip than `head`, and return it."""
        while (tip := self.tip) is None or tip.id == than:
            await self._news.wait()
        return tip

    # Gossip

    def judge(self, message: Message) -> Validation:
        """Validate a gossiped head: cheap checks, then the signature.

        A fault of the head is a fault of the peer that relayed it.
        """
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
            return ACCEPT if error.rule in MISSED else IGNORE
        return ACCEPT

    def judge_grant(self, message: Message) -> Validation:
        """Validate a gossiped grant; one that is known costs no signature check."""
        grant = decode(TermGrant, message.data)
        if any(held.vote == grant.vote for held in self.follower.grants):
            return IGNORE
        try:
            self.follower.grant(grant)
        except ChainError as error:
            if error.rule not in NO_FAULT:
                return Reject(error.rule)
            return ACCEPT if error.rule in MISSED else IGNORE
        return ACCEPT

    async def follow(self) -> None:
        """Take gossip, and ask peers now and then, until cancelled."""
        run = self._store.follower.rules.run
        async with (
            self._network.subscribe(topics.topic(run, topics.HEADS), self.judge) as heads,
            self._network.subscribe(topics.topic(run, topics.GRANTS), self.judge_grant) as grants,
            trio.open_nursery() as nursery,
        ):
            nursery.start_soon(self._ask_now_and_then)
            nursery.start_soon(self._follow_grants, grants)
            async for message in heads:
                try:
                    await self.take_head(message.data)
                except ChainError as error:
                    log.info("a head is not followed yet: %s", error)
                    if error.rule in MISSED:
                        await self.ask_around([message.sender])

    async def _follow_grants(self, grants: Subscription[Message]) -> None:
        async for message in grants:
            try:
                await self.take_grant(decode(TermGrant, message.data))
            except ChainError as error:
                log.info("a grant is not followed yet: %s", error)
                if error.rule in MISSED:
                    await self.ask_around([message.sender])

    async def _ask_now_and_then(self) -> None:
        for pause in itertools.chain(ASK_PAUSES, itertools.repeat(ASK_PAUSES[-1])):
            await self.ask_around()
            await trio.sleep(pause * self._luck.uniform(0.75, 1.25))

    # Questions

    async def ask_around(self, peers: Iterable[bytes] = ()) -> bool:
        """Ask these peers, the leader and some connected ones, until one has news."""
        others = sorted(self._network.peers() - {self.leader})
        self._luck.shuffle(others)
        named = dict.fromkeys((*peers, self.leader, *others[:PEERS_ASKED]))
        async with self._asking:
            before = self.follower
            for peer in named:
                if not peer or peer == self._network.public:
                    continue
                try:
                    await self.ask(peer)
                    if await self.ask_for_grants(peer):
                        await self.ask(peer)
                except (PeerError, ProtocolError) as error:
                    log.info("the chain cannot be caught up with there: %s", error)
                if self.follower is not before:
                    return True
        return False

    async def ask(self, peer: bytes) -> None:
        """Ask one peer for the heads after ours, until there are none.

        If they are of a later term, ask for its grant first.
        """
        while True:
            try:
                await self._ask_for_heads(peer)
            except ChainError as error:
                if error.rule != "missing-grant" or not await self.ask_for_grants(peer):
                    raise
            else:
                return

    async def ask_for_grants(self, peer: bytes) -> bool:
        """Ask one peer for grants of this and later terms; return whether some were new."""
        first = self.follower
        while True:
            before = self.follower
            held = HeadsQuestion.of([head.id for head in before.heads]).held
            answer = await self._network.request(
                peer,
                topics.GRANTS_STREAM,
                encode(GrantsQuestion(held, before.term)),
                deadline=ASK_SECONDS,
                most=limits.GRANTS_BYTES,
            )
            try:
                for shown in decode(GrantsAnswer, answer).grants:
                    await self._take_grant(shown)
            except ProtocolError as error:
                self._blame(peer, error)
                raise
            if self.follower.term == before.term:
                return self.follower is not first

    async def _take_grant(self, shown: ShownGrant) -> None:
        run = self.follower.rules.run
        branch = [open_sealed(sealed, WeightsHead, run) for sealed in shown.branch]
        try:
            await self.take_grant(shown.grant, branch)
        except ChainError as error:
            if error.rule != "old-term":  # it is held
                raise

    async def _ask_for_heads(self, peer: bytes) -> None:
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
            await self.take_head(sealed)
        except ChainError as error:
            # a link names where our chain begins; others have more of it
            if error.rule != "below-link":
                raise

    def _blame(self, peer: bytes, error: ProtocolError) -> None:
        reason = error.rule if isinstance(error, ChainError) else error.reason
        if reason not in NO_FAULT:
            self._network.score(peer, reason)
