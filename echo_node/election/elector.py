"""Elector: one vote per term, synced to disk before the ballot exists.

A restarted process finds the vote again, repeats it to whoever asks for the same, and gives no
other. The rules are those of `protocol.chain`; `Lease` says when the leader's lease is over.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import trio

from echo_node.election.lease import Lease
from echo_node.errors import StoreError, boundary
from echo_node.net.base import Network
from echo_node.storage import files
from echo_node.weights.chain_follower import MISSED, ChainFollower
from echo_node.weights.chain_log import Head
from protocol import (
    Ballot,
    ChainError,
    Elector,
    Follower,
    Identity,
    TermVote,
    VoteAnswer,
    VoteQuestion,
    WeightsHead,
    cast,
    decode,
    encode,
    limits,
    open_sealed,
    peer_id,
    topics,
)

log = logging.getLogger(__name__)
CATCH_UP_SECONDS: Final = 5.0
"""Seconds in which an elector or a candidate asks others for heads and grants that it missed."""
_DIGITS: Final = 16
_ASKED: Final = ".asked"
"""Suffix of files with the votes that this node asked others for, as a candidate."""
_ADVICE: Final = "put the file back as it was: an elector that forgets a vote can make two leaders; without it, do not vote with this key"


class VoteLog:
    """Votes of one elector in a folder: one immutable file per term. Blocks.

    The folder also holds what this node asked of others as a candidate.
    """

    def __init__(self, folder: Path, identity: Identity, run: bytes, *, durable: bool = True) -> None:
        self._folder = folder
        self._identity = identity
        self._run = run
        self._durable = durable
        self._turn = threading.Lock()
        with files.disk_errors(f"opening {folder}"):
            folder.mkdir(parents=True, exist_ok=True)
            names = sorted(path for path in folder.iterdir() if path.suffix not in {files.BESIDE, _ASKED})
        votes = [_read(path) for path in names]
        self._elector = Elector({vote.term: encode(vote) for vote in votes})

    @property
    def public(self) -> bytes:
        return self._identity.public

    def voted(self, term: int) -> TermVote | None:
        """Return the vote given in a term, if any."""
        body = self._elector.voted.get(term)
        return None if body is None else decode(TermVote, body)

    def asked(self, term: int) -> TermVote | None:
        """Return the vote that this node asked others for in a term, before it ended."""
        path = self._path(term).with_suffix(_ASKED)
        return _read(path) if path.exists() else None

    def ask(self, vote: TermVote) -> None:
        """Write the vote that others will be asked for to disk."""
        path = self._path(vote.term).with_suffix(_ASKED)
        files.write_whole(path, encode(vote), durable=self._durable)
        files.sync_folder(self._folder, durable=self._durable)

    def _path(self, term: int) -> Path:
        return self._folder / f"{term:0{_DIGITS}}"

    def vote(
        self, follower: Follower, vote: TermVote, branch: Sequence[Head] = (), *, lease_over: bool
    ) -> Ballot:
        """Return a ballot, synced to disk first; raise `ChainError` if refused.

        A vote given once is repeated, whatever came since: the candidate may have it already.
        """
        with self._turn:
            if not lease_over or self._elector.voted.get(vote.term) != encode(vote):
                after = self._elector.vote(follower, vote, branch, lease_over=lease_over)
                files.write_whole(self._path(vote.term), encode(vote), durable=self._durable)
                files.sync_folder(self._folder, durable=self._durable)
                self._elector = after
            return cast(vote, self._identity, self._run)


class ElectorServer:
    """Answer candidates. `held` returns the newest head with weights on this node."""

    def __init__(
        self,
        network: Network,
        chain: ChainFollower,
        lease: Lease,
        votes: VoteLog,
        *,
        held: Callable[[], Head | None] = lambda: None,
    ) -> None:
        self._network = network
        self._chain = chain
        self._lease = lease
        self._votes = votes
        self._held = held
        self._candidacy: int | None = None
        """Term for which this node itself is a candidate."""

    def set_candidacy(self, term: int | None) -> None:
        """Refuse later trainers while this node stands for a term; None ends that."""
        self._candidacy = term

    @contextmanager
    def serve(self) -> Generator[None]:
        """Answer until the context is left. A node that is no elector does not serve."""
        if self._votes.public not in self._chain.follower.rules.electors:
            yield
            return
        with self._network.serve(topics.VOTE_STREAM, self._answer, most=limits.VOTE_BYTES):
            yield

    async def vote(self, vote: TermVote, branch: Sequence[Head] = ()) -> Ballot:
        """Vote if the rules allow it.

        For itself it votes from any base that others were asked for.
        """
        is_own = vote.leader == self._votes.public
        held = self._chain.find(vote.base) if is_own else self._held()
        follower = as_elector(self._chain.follower, vote.base, branch, held)
        lease_over = self._lease.is_over
        ballot = await trio.to_thread.run_sync(
            lambda: self._votes.vote(follower, vote, branch, lease_over=lease_over)
        )
        log.info("this elector is for %s in term %d", peer_id(vote.leader), vote.term)
        return ballot

    async def _answer(self, peer: bytes, question: bytes) -> bytes:
        asked = decode(VoteQuestion, question)
        try:
            ballot = await self._vote_for(peer, asked)
        except ChainError as error:
            log.info("no vote for %s: %s", peer_id(peer), error)
            return encode(VoteAnswer(refusal=error.rule, signature=None))
        return encode(VoteAnswer(refusal=None, signature=ballot.signature))

    async def _vote_for(self, peer: bytes, asked: VoteQuestion) -> Ballot:
        rules, vote = self._chain.follower.rules, asked.vote
        if peer != vote.leader or peer not in rules.trainers:
            raise ChainError("not-candidate", "a vote that is asked for by another than its candidate")
        if self._candidacy == vote.term and not self._is_before(peer):
            raise ChainError("standing", "this node stands itself, and comes first among the trainers")
        branch = [open_sealed(sealed, WeightsHead, rules.run) for sealed in asked.branch]
        try:
            return await self.vote(vote, branch)
        except ChainError as error:
            if error.rule not in MISSED and vote.term <= self._chain.follower.term + 1:
                raise
        with trio.move_on_after(CATCH_UP_SECONDS):  # the candidate knows more than this node does
            await self._chain.ask_around([peer])
        return await self.vote(vote, branch)

    def _is_before(self, peer: bytes) -> bool:
        """Return whether a trainer is named before this node in the manifest.

        The later candidate gives way.
        """
        trainers = self._chain.follower.rules.trainers
        return peer in trainers and trainers.index(peer) < trainers.index(self._votes.public)


def as_elector(follower: Follower, base: bytes, branch: Sequence[Head], held: Head | None) -> Follower:
    """Return the chain to judge a base by, without heads that lack weights here.

    Nobody might have the weights of those.
    """
    places = {head.id: place for place, head in enumerate(follower.heads)}
    if held is None or held.id not in places:
        return follower
    root = branch[0].message.previous if branch else base
    if base not in places and root not in places:
        return follower
    last = max(places[held.id], places.get(base, places.get(root, 0)))
    return dataclasses.replace(follower, heads=follower.heads[: last + 1])


def _read(path: Path) -> TermVote:
    with boundary(StoreError, f"reading the vote in {path}", advice=_ADVICE):
        vote = decode(TermVote, files.read_whole(path, limits.SMALL_BYTES))
        if path.stem != f"{vote.term:0{_DIGITS}}":
            raise StoreError(f"{path} holds a vote of term {vote.term}", advice=_ADVICE)
        return vote
