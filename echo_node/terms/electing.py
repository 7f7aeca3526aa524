"""A candidate: when the leader's lease is over, it asks the electors for the next term, until it leads or somebody else does.

It asks for one base, written down first, and does not lightly ask for another: a vote that was given is spent, even if the
answer was lost. Its own vote comes last, and only where it makes the majority: until then it can still give way to a trainer
that the manifest names before it, so that two that stand at once do not keep each other from winning. It knows no training.
"""

from __future__ import annotations

import itertools
import logging
import random
from collections.abc import Callable, Collection, Sequence
from typing import Final

import trio

from echo_node.errors import ConfigError, PeerError
from echo_node.net.base import Failure, Network, RequestError
from echo_node.terms.lease import Lease
from echo_node.terms.voting import CATCH_UP_SECONDS, VoteBox, VotingDesk
from echo_node.weights.hearing import Hearing
from echo_node.weights.journal import Head
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
"""With fewer there is no majority without every one of two: nobody stands by itself."""
VOTE_SECONDS: Final = 10.0
PAUSES: Final = (0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
"""Between rounds of questions; the last one goes on."""
BRANCH: Final = 16
"""Heads that are shown with a question; an elector that needs more asks for them."""
STEADFAST: Final = 5
"""Rounds in which a candidate gives way, and stays with a base that somebody may have voted for though no answer came."""
NO_VOTE: Final[frozenset[Failure]] = frozenset({"unknown-peer", "no-handler", "busy", "too-large", "left"})
"""Failures of a question by which nobody can have voted."""
CAUGHT_UP: Final = frozenset({"behind", "old-term"})
"""Refusals by an elector that knows more than the candidate."""


class Candidate:
    """One trainer that may stand. `held` is the newest head of the chain whose weights are here."""

    def __init__(
        self,
        network: Network,
        hearing: Hearing,
        lease: Lease,
        box: VoteBox,
        desk: VotingDesk,
        *,
        held: Callable[[], Head | None],
        luck: random.Random | None = None,
    ) -> None:
        self._network = network
        self._hearing = hearing
        self._lease = lease
        self._box = box
        self._desk = desk
        self._held = held
        self._luck = luck or random.Random(network.public)  # noqa: S311 - spreads load, keeps no secret
        self._vote: TermVote | None = None
        self._ballots: dict[bytes, Ballot] = {}
        self._unsure: set[bytes] = set()
        """Electors that may have voted for it, and whose answer did not come."""
        self._spent: set[bytes] = set()
        """Electors that have voted for another."""
        self._silent: set[bytes] = set()
        """Electors that did not answer when they were asked last."""
        self._rounds = 0

    @property
    def leads(self) -> bool:
        follower = self._hearing.follower
        return follower.leader == self._network.public and not follower.holding

    @property
    def may_stand_alone(self) -> bool:
        """Whether the run has enough electors for a change of leaders that nobody orders."""
        return len(self._hearing.follower.rules.electors) >= LEAST_ELECTORS

    async def stand(self, *, by_hand: bool = False) -> bool:
        """Ask for the next term until this node leads it, or until another does or the leader is heard again: then False.

        Without enough electors only an operator may have it ask, `by_hand`; the electors decide all the same.
        """
        if not self.may_stand_alone and not by_hand:
            raise ConfigError(
                f"this run has fewer than {LEAST_ELECTORS} electors, so nobody takes over by itself",
                advice="promote a trainer by hand",
            )
        term = self._hearing.follower.term + 1
        if self._network.public not in self._hearing.follower.rules.leaders_of(term):
            log.warning("term %d is not this trainer's to lead: it is the other's turn", term)
            return False
        self._rounds = 0
        try:
            for pause in itertools.chain(PAUSES, itertools.repeat(PAUSES[-1])):
                if self._hearing.follower.term >= term or not self._lease.is_over:
                    break
                self._desk.standing = term if self._can_win() else None
                self._rounds += 1
                if await self._ask_everybody(term):
                    break
                await trio.sleep(pause * self._luck.uniform(0.5, 1.5))
        finally:
            self._desk.standing = None
        return self.leads and self._hearing.follower.term == term

    # One round

    async def _ask_everybody(self, term: int) -> bool:
        """Ask those first that would not give way, then all; whether this node leads now."""
        vote = await self._settle_vote(term)
        if vote is None:
            return False
        follower = self._hearing.follower
        rules, me = follower.rules, self._network.public
        electors = [key for key in rules.electors_of(term) if key not in follower.revoked and key != me]
        before = rules.trainers[: rules.trainers.index(me)] if me in rules.trainers else ()
        first = [key for key in electors if key in before and key != follower.leader]
        if "standing" in await self._ask_all(first, vote) and self._rounds <= STEADFAST:
            return False
        await self._ask_all([key for key in electors if key not in first], vote)
        if self._hearing.follower.term >= term:
            return False
        majority = rules.majority_of(term)
        await self._vote_for_itself(vote, majority)
        if len(self._ballots) < majority:
            log.info("%d of %d votes for term %d", len(self._ballots), majority, term)
            return False
        await self._enter(vote)
        return self.leads

    async def _settle_vote(self, term: int) -> TermVote | None:
        """What to ask for: what somebody may have voted for already, or the newest head whose weights are here."""
        kept = self._vote if self._vote is not None and self._vote.term == term else None
        if kept is None and (before := self._own_vote(term) or self._box.asked(term)) is not None:
            self._keep(before)
            self._unsure = set(self._hearing.follower.rules.electors)
            return before
        waits = self._unsure and self._rounds <= STEADFAST
        if kept is not None and (self._ballots or waits or self._own_vote(term)):
            return kept
        await self._catch_up(self._hearing.follower.rules.electors)
        base = self._held()
        if base is None:
            log.warning("nobody leads, and there are no weights here to go on from")
            return None
        if self._hearing.follower.term >= term:
            return None
        vote = TermVote(base=base.id, leader=self._network.public, term=term)
        await trio.to_thread.run_sync(self._box.ask, vote)
        self._keep(vote)
        return vote

    async def _catch_up(self, peers: Collection[bytes]) -> None:
        """Hear what others know. Briefly: a leader that hangs is asked as well."""
        with trio.move_on_after(CATCH_UP_SECONDS):
            await self._hearing.ask_around(peers)

    def _own_vote(self, term: int) -> TermVote | None:
        """This node's own vote, if it was for itself."""
        vote = self._box.voted(term)
        return vote if vote is not None and vote.leader == self._network.public else None

    def _keep(self, vote: TermVote) -> None:
        if vote != self._vote:
            self._vote, self._ballots, self._unsure, self._spent = vote, {}, set(), set()

    def _can_win(self) -> bool:
        """Whether enough votes are left, in the end without those who never answer. Else it gives way to anybody: its own
        vote may be the one that another lacks.
        """
        rules, me = self._hearing.follower.rules, self._network.public
        spent = self._spent | (self._silent if self._rounds > STEADFAST else set())
        if (
            self._vote is not None
            and (own := self._box.voted(self._vote.term)) is not None
            and own.leader != me
        ):
            spent.add(me)
        term = self._hearing.follower.term + 1
        electors = {*rules.electors_of(term)}
        return len(electors - spent) >= rules.majority_of(term)

    async def _ask_all(self, electors: Collection[bytes], vote: TermVote) -> set[str]:
        """Ask electors at once, until there are enough votes with one's own. The rules by which some refused."""
        refusals = set[str]()
        own = self._box.voted(vote.term)
        rules = self._hearing.follower.rules
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
        """One elector's ballot, or the rule by which it refuses."""
        branch = tuple(head.sealed for head in self._branch(vote.base))
        answer = await self._network.request(
            elector,
            topics.VOTE_STREAM,
            encode(VoteQuestion(branch, vote)),
            deadline=VOTE_SECONDS,
            most=limits.SMALL_BYTES,
        )
        try:
            said = decode(VoteAnswer, answer)
            if said.signature is None:
                log.info("%s refuses its vote for term %d: %s", peer_id(elector), vote.term, said.refusal)
                if said.refusal == "voted":
                    self._spent.add(elector)
                if said.refusal in CAUGHT_UP:
                    await self._catch_up([elector])
                return said.refusal
            run = self._hearing.follower.rules.run
            verify_body(TermVote.KIND, encode(vote), elector, said.signature, run)
        except ProtocolError as error:
            self._network.score(elector, error.reason)
            raise
        self._ballots[elector] = Ballot(elector, said.signature)
        return None

    def _branch(self, base: bytes) -> Sequence[Head]:
        heads = self._hearing.follower.heads
        at = next((place for place, head in enumerate(heads) if head.id == base), -1)
        return heads[max(0, at + 1 - BRANCH) : at + 1]

    async def _vote_for_itself(self, vote: TermVote, majority: int) -> None:
        me = self._network.public
        electors = self._hearing.follower.rules.electors_of(vote.term)
        if me not in electors or len(self._ballots) < majority - 1:
            return
        try:
            self._ballots[me] = await self._desk.vote(vote)
        except ChainError as error:
            log.info("this node's own vote of term %d is not its to give: %s", vote.term, error)

    async def _enter(self, vote: TermVote) -> None:
        """Have the grant on disk first, then tell everybody."""
        grant = TermGrant(tuple(self._ballots[key] for key in sorted(self._ballots)), vote)
        try:
            await self._hearing.hear_grant(grant)
        except ChainError as error:
            log.warning("a grant that was won is not followed: %s", error)
            return
        topic = topics.topic(self._hearing.follower.rules.run, topics.GRANTS)
        await self._network.publish(topic, encode(grant))
