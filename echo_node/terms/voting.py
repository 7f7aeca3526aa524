"""An elector: it votes once per term, and its vote is on disk, synced, before the ballot exists.

A process that ends in between finds the vote again, repeats it to whoever asks for the same, and gives no other. The rules
are those of `protocol.chain`; when the leader's lease is over, the lease says.
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

from echo_node.errors import StoreError, boundary
from echo_node.net.base import Network
from echo_node.terms.lease import Lease
from echo_node.weights import disk
from echo_node.weights.hearing import MISSED, Hearing
from echo_node.weights.journal import Head
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
"""In which an elector or a candidate asks others for what it has missed itself."""
_DIGITS: Final = 16
_ASKED: Final = ".asked"
"""How the name of a file ends that holds what this node asked of others, were it a candidate."""
_ADVICE: Final = "put the file back as it was: an elector that forgets a vote can make two leaders; without it, do not vote with this key"


class VoteBox:
    """The votes of one elector, in a folder: one file per term that never changes; and what it asked of others. Blocks."""

    def __init__(self, folder: Path, identity: Identity, run: bytes, *, durable: bool = True) -> None:
        self._folder = folder
        self._identity = identity
        self._run = run
        self._durable = durable
        self._turn = threading.Lock()
        with disk.touching(f"opening {folder}"):
            folder.mkdir(parents=True, exist_ok=True)
            names = sorted(path for path in folder.iterdir() if path.suffix not in {disk.BESIDE, _ASKED})
        votes = [_read(path) for path in names]
        self._elector = Elector({vote.term: encode(vote) for vote in votes})

    @property
    def public(self) -> bytes:
        return self._identity.public

    def voted(self, term: int) -> TermVote | None:
        """What it voted for in a term."""
        body = self._elector.voted.get(term)
        return None if body is None else decode(TermVote, body)

    def asked(self, term: int) -> TermVote | None:
        """What others may have been asked for, by this node as a candidate, before it ended."""
        path = self._path(term).with_suffix(_ASKED)
        return _read(path) if path.exists() else None

    def ask(self, vote: TermVote) -> None:
        """Write down what others will be asked for."""
        path = self._path(vote.term).with_suffix(_ASKED)
        disk.write_whole(path, encode(vote), durable=self._durable)
        disk.sync_folder(self._folder, durable=self._durable)

    def _path(self, term: int) -> Path:
        return self._folder / f"{term:0{_DIGITS}}"

    def vote(
        self, follower: Follower, vote: TermVote, branch: Sequence[Head] = (), *, lease_over: bool
    ) -> Ballot:
        """Agree to a candidate, on disk first; a `ChainError` says why not.

        What was given once is repeated, whatever was heard since: the candidate may have it already.
        """
        with self._turn:
            if not lease_over or self._elector.voted.get(vote.term) != encode(vote):
                after = self._elector.vote(follower, vote, branch, lease_over=lease_over)
                disk.write_whole(self._path(vote.term), encode(vote), durable=self._durable)
                disk.sync_folder(self._folder, durable=self._durable)
                self._elector = after
            return cast(vote, self._identity, self._run)


class VotingDesk:
    """Answers candidates. `held` is the newest head of the chain whose weights are here, if there is any."""

    def __init__(
        self,
        network: Network,
        hearing: Hearing,
        lease: Lease,
        box: VoteBox,
        *,
        held: Callable[[], Head | None] = lambda: None,
    ) -> None:
        self._network = network
        self._hearing = hearing
        self._lease = lease
        self._box = box
        self._held = held
        self.standing: int | None = None
        """The term for which this node stands itself."""

    @contextmanager
    def serve(self) -> Generator[None]:
        """Answer until the context is left. Who is no elector answers nobody."""
        if self._box.public not in self._hearing.follower.rules.electors:
            yield
            return
        with self._network.serve(topics.VOTE_STREAM, self._answer, most=limits.VOTE_BYTES):
            yield

    async def vote(self, vote: TermVote, branch: Sequence[Head] = ()) -> Ballot:
        """Vote, if the rules allow it. For itself, from whatever base others have been asked for."""
        is_own = vote.leader == self._box.public
        held = self._hearing.find(vote.base) if is_own else self._held()
        follower = as_elector(self._hearing.follower, vote.base, branch, held)
        lease_over = self._lease.is_over
        ballot = await trio.to_thread.run_sync(
            lambda: self._box.vote(follower, vote, branch, lease_over=lease_over)
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
        rules, vote = self._hearing.follower.rules, asked.vote
        if peer != vote.leader or peer not in rules.trainers:
            raise ChainError("not-candidate", "a vote that is asked for by another than its candidate")
        if self.standing == vote.term and not self._is_before(peer):
            raise ChainError("standing", "this node stands itself, and comes first among the trainers")
        branch = [open_sealed(sealed, WeightsHead, rules.run) for sealed in asked.branch]
        try:
            return await self.vote(vote, branch)
        except ChainError as error:
            if error.rule not in MISSED and vote.term <= self._hearing.follower.term + 1:
                raise
        with trio.move_on_after(CATCH_UP_SECONDS):  # the candidate knows more than this node does
            await self._hearing.ask_around([peer])
        return await self.vote(vote, branch)

    def _is_before(self, peer: bytes) -> bool:
        """Whether a trainer comes before this node in the manifest: of two that stand, the later one gives way."""
        trainers = self._hearing.follower.rules.trainers
        return peer in trainers and trainers.index(peer) < trainers.index(self._box.public)


def as_elector(follower: Follower, base: bytes, branch: Sequence[Head], held: Head | None) -> Follower:
    """The chain by which a base is judged: without heads after it whose weights are not here, for nobody might have them."""
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
        vote = decode(TermVote, disk.read_whole(path, limits.SMALL_BYTES))
        if path.stem != f"{vote.term:0{_DIGITS}}":
            raise StoreError(f"{path} holds a vote of term {vote.term}", advice=_ADVICE)
        return vote
