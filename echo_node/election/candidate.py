"""Candidate: ask the electors for the next term once the leader's lease is over.

A candidate asks for one base, written to disk first, and rarely for another: a vote that was given
is spent, even if the answer was lost. The candidate's own vote comes last, and only where it makes
the majority: until then it can give way to a trainer that the manifest names first, so that two
candidates do not keep each other from winning.
"""

from __future__ import annotations

import itertools
import logging
import random
from collections.abc import Callable, Collection, Sequence
from typing import Final

import trio

from echo_node.election.elector import CATCH_UP_SECONDS, ElectorServer, VoteLog
from echo_node.election.lease import Lease
from echo_node.errors import ConfigError, PeerError
from echo_node.net.base import Failure, Network, RequestError
from echo_node.weights.chain_follower import ChainFollower
from echo_node.weights.chain_log import Head
from protocol import (
    Ballot,
    ChainError,
    ProtocolError,
    TermGrant,
    TermVote,
    VoteAnswer,
    VoteQuestion,
    decode,
    encode,
    limits,
    peer_id,
    topics,
)
from protocol.envelope import verify_body

log = logging.getLogger(__name__)
LEAST_ELECTORS: Final = 3
"""Fewest electors for an election without an operator: with fewer, a majority is all of them."""
VOTE_SECONDS: Final = 10.0
PAUSES: Final = (0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
"""Seconds between rounds of questions; the last value repeats."""
BRANCH: Final = 16
"""Heads sent with a question; an elector that needs more asks for them."""
STEADFAST: Final = 5
"""Rounds in which a candidate gives way, and keeps a base for which an answer is missing."""
NO_VOTE: Final[frozenset[Failure]] = frozenset({"unknown-peer", "no-handler", "busy", "too-large", "left"})
"""Request failures after which the elector cannot have voted."""
CAUGHT_UP: Final = frozenset({"behind", "old-term"})
"""Refusals by an elector that knows more of the chain than the candidate."""


class Candidate:
    """A trainer that may lead.

    `held` returns the newest head with weights on this node.
    """

    def __init__(
        self,
        network: Network,
        chain: ChainFollower,
        lease: Lease,
        votes: VoteLog,
        server: ElectorServer,
        *,
        held: Callable[[], Head | None],
        luck: random.Random | None = None,
    ) -> None:
        self._network = network
        self._chain = chain
        self._lease = lease
        self._votes = votes
        self._server = server
        self._held = held
        self._luck = luck or random.Random(network.public)  # noqa: S311 - spreads load, keeps no secret
        self._vote: TermVote | None = None
        self._ballots: dict[bytes, Ballot] = {}
        self._unsure: set[bytes] = set()
        """Electors that may have voted for this node, but whose answer is missing."""
        self._spent: set[bytes] = set()
        """Electors that voted for another candidate."""
        self._silent: set[bytes] = set()
        """Electors that did not answer the last question."""
        self._rounds = 0

    @property
    def leads(self) -> bool:
        follower = self._chain.follower
        return follower.leader == self._network.public and not follower.holding

    @property
    def may_stand_alone(self) -> bool:
        """Return whether the run has enough electors for an election without an operator."""
        return len(self._chain.follower.rules.electors) >= LEAST_ELECTORS

    async def stand(self, *, by_hand: bool = False) -> bool:
        """Ask for the next term until a leader is known; return whether this node leads.

        Return False when another node leads the term, or when the leader is heard again. With too
        few electors only an operator may start it (`by_hand`); the electors still decide.
        """
        if not self.may_stand_alone and not by_hand:
            raise ConfigError(
                f"this run has fewer than {LEAST_ELECTORS} electors, so nobody takes over by itself",
                advice="promote a trainer by hand",
            )
        term = self._chain.follower.term + 1
        if self._network.public not in self._chain.follower.rules.leaders_of(term):
            log.warning("term %d is not this trainer's to lead: it is the other's turn", term)
            return False
        self._rounds = 0
        try:
            for pause in itertools.chain(PAUSES, itertools.repeat(PAUSES[-1])):
                if self._chain.follower.term >= term or not self._lease.is_over:
                    break
                self._server.set_candidacy(term if self._can_win() else None)
                self._rounds += 1
                if await self._ask_everybody(term):
                    break
                await trio.sleep(pause * self._luck.uniform(0.5, 1.5))
        finally:
            self._server.set_candidacy(None)
        return self.leads and self._chain.follower.term == term

    # One round

    async def _ask_everybody(self, term: int) -> bool:
        """Ask trainers named earlier first, then the rest; return whether this node leads."""
        vote = await self._settle_vote(term)
        if vote is None:
            return False
        follower = self._chain.follower
        rules, me = follower.rules, self._network.public
        electors = [key for key in rules.electors_of(term) if key not in follower.revoked and key != me]
        before = rules.trainers[: rules.trainers.index(me)] if me in rules.trainers else ()
        first = [key for key in electors if key in before and key != follower.leader]
        if "standing" in await self._ask_all(first, vote) and self._rounds <= STEADFAST:
            return False
        await self._ask_all([key for key in electors if key not in first], vote)
        if self._chain.follower.term >= term:
            return False
        majority = rules.majority_of(term)
        await self._vote_for_itself(vote, majority)
        if len(self._ballots) < majority:
            log.info("%d of %d votes for term %d", len(self._ballots), majority, term)
            return False
        await self._enter(vote)
        return self.leads

    async def _settle_vote(self, term: int) -> TermVote | None:
        """Return the vote to ask for: one asked for before, or the newest head held here."""
        kept = self._vote if self._vote is not None and self._vote.term == term else None
        if kept is None and (before := self._own_vote(term) or self._votes.asked(term)) is not None:
            self._keep(before)
            self._unsure = set(self._chain.follower.rules.electors)
            return before
        waits = self._unsure and self._rounds <= STEADFAST
        if kept is not None and (self._ballots or waits or self._own_vote(term)):
            return kept
        await self._catch_up(self._chain.follower.rules.electors)
        base = self._held()
        if base is None:
            log.warning("nobody leads, and there are no weights here to go on from")
            return None
        if self._chain.follower.term >= term:
            return None
        vote = TermVote(base=base.id, leader=self._network.public, term=term)
        await trio.to_thread.run_sync(self._votes.ask, vote)
        self._keep(vote)
        return vote

    async def _catch_up(self, peers: Collection[bytes]) -> None:
        """Ask peers for missed heads and grants, briefly.

        A leader that hangs is asked too.
        """
        with trio.move_on_after(CATCH_UP_SECONDS):
            await self._chain.ask_around(peers)

    def _own_vote(self, term: int) -> TermVote | None:
        """Return this node's own vote of the term, if it was for itself."""
        vote = self._votes.voted(term)
        return vote if vote is not None and vote.leader == self._network.public else None

    def _keep(self, vote: TermVote) -> None:
        if vote != self._vote:
            self._vote, self._ballots, self._unsure, self._spent = vote, {}, set(), set()

    def _can_win(self) -> bool:
        """Return whether enough votes are left for a majority.

        After some rounds, electors that never answer do not count. A candidate that cannot win
        gives way to any other: its own vote may be the missing one.
        """
        rules, me = self._chain.follower.rules, self._network.public
        spent = self._spent | (self._silent if self._rounds > STEADFAST else set())
        if (
            self._vote is not None
            and (own := self._votes.voted(self._vote.term)) is not None
            and own.leader != me
        ):
            spent.add(me)
        term = self._chain.follower.term + 1
        electors = {*rules.electors_of(term)}
        return len(electors - spent) >= rules.majority_of(term)

    async def _ask_all(self, electors: Collection[bytes], vote: TermVote) -> set[str]:
        """Ask electors concurrently until the votes suffice; return the rules of refusals."""
        refusals = set[str]()
        own = self._votes.voted(vote.term)
        rules = self._chain.follower.rules
        is_own = self._network.public in rules.electors_of(vote.term) and (own is None or own == vote)
        enough = rules.majority_of(vote.term) - is_own

        async def ask(elector: bytes, scope: trio.CancelScope) -> None:
            try:
                if refusal := await self._ask(elector, vote):
                    refusals.add(refusal)
                self._unsure.discard(elector)
                self._silent.discard(elector)
            except (PeerError, ProtocolError) as error:
                self._silent.add(elector)
                if not isinstance(error, RequestError) or error.reason not in NO_VOTE:
                    self._unsure.add(elector)
                log.info("no vote of %s: %s", peer_id(elector), error)
            if len(self._ballots) >= enough:
                scope.cancel()

        async with trio.open_nursery() as nursery:
            for elector in electors:
                if elector not in self._ballots:
                    nursery.start_soon(ask, elector, nursery.cancel_scope)
        return refusals

    async def _ask(self, elector: bytes, vote: TermVote) -> str | None:
        """Ask one elector: keep its ballot, or return the rule by which it refuses."""
        branch = tuple(head.sealed for head in self._branch(vote.base))
        answer = await self._network.request(
            elector,
            topics.VOTE_STREAM,
            encode(VoteQuestion(branch, vote)),
            deadline=VOTE_SECONDS,
            most=limits.SMALL_BYTES,
        )
        try:
            reply = decode(VoteAnswer, answer)
            if reply.signature is None:
                log.info("%s refuses its vote for term %d: %s", peer_id(elector), vote.term, reply.refusal)
                if reply.refusal == "voted":
                    self._spent.add(elector)
                if reply.refusal in CAUGHT_UP:
                    await self._catch_up([elector])
                return reply.refusal
            run = self._chain.follower.rules.run
            verify_body(TermVote.KIND, encode(vote), elector, reply.signature, run)
        except ProtocolError as error:
            self._network.score(elector, error.reason)
            raise
        self._ballots[elector] = Ballot(elector, reply.signature)
        return None

    def _branch(self, base: bytes) -> Sequence[Head]:
        heads = self._chain.follower.heads
        at = next((place for place, head in enumerate(heads) if head.id == base), -1)
        return heads[max(0, at + 1 - BRANCH) : at + 1]

    async def _vote_for_itself(self, vote: TermVote, majority: int) -> None:
        me = self._network.public
        electors = self._chain.follower.rules.electors_of(vote.term)
        if me not in electors or len(self._ballots) < majority - 1:
            return
        try:
            self._ballots[me] = await self._server.vote(vote)
        except ChainError as error:
            log.info("this node's own vote of term %d is not its to give: %s", vote.term, error)

    async def _enter(self, vote: TermVote) -> None:
        """Write the grant to disk, then publish it."""
        grant = TermGrant(tuple(self._ballots[key] for key in sorted(self._ballots)), vote)
        try:
            await self._chain.take_grant(grant)
        except ChainError as error:
            log.warning("a grant that was won is not followed: %s", error)
            return
        topic = topics.topic(self._chain.follower.rules.run, topics.GRANTS)
        await self._network.publish(topic, encode(grant))
