"""Messages of a hostile peer: garbage, made-up groups, forgeries. Seeded and pure.

Lies are made of what was heard, so that they differ from the truth in as little as possible.
"""

from __future__ import annotations

import dataclasses
import functools
import random
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from echo_node.runs.run import Run
from protocol import (
    ZERO,
    Ballot,
    Completion,
    Envelope,
    Figures,
    Heartbeat,
    Identity,
    Inventory,
    Join,
    Opened,
    ProtocolError,
    Receipt,
    Stretch,
    TermGrant,
    TermVote,
    TrajectoryGroup,
    Verdict,
    VoteQuestion,
    WeightsHead,
    canonical,
    encode,
    limits,
    read_batch,
    seal,
    topics,
    write_batch,
)
from protocol.envelope import sign_body

REMEMBERED: Final = 512
"""Messages of each cargo that are remembered, the newest ones and the first few."""
FIRST: Final = 64
TOGETHER: Final = 32
FEW: Final = 4
"""Groups at once of somebody who wants to be taken for honest."""
KINDS: Final = ("group", "head", "verdict", "receipt", "heartbeat", "join")
FAR_FUTURE_MS: Final = 10**15


class Heard:
    """What went by, by cargo. Old messages are as good as new ones to somebody who repeats them."""

    def __init__(self) -> None:
        self.first: dict[str, list[bytes]] = {cargo: [] for cargo in topics.CARGOES}
        self.newest: dict[str, deque[bytes]] = {cargo: deque(maxlen=REMEMBERED) for cargo in topics.CARGOES}

    def hear(self, cargo: str, data: bytes) -> None:
        if len(self.first[cargo]) < FIRST:
            self.first[cargo].append(data)
        self.newest[cargo].append(data)

    def any_of(self, cargo: str, luck: random.Random) -> bytes | None:
        all_ = [*self.first[cargo], *self.newest[cargo]]
        return luck.choice(all_) if all_ else None

    def everything(self) -> list[tuple[str, bytes]]:
        return [
            (cargo, data)
            for cargo in topics.CARGOES
            for data in dict.fromkeys((*self.first[cargo], *self.newest[cargo]))
        ]


class Liar:
    """One hostile peer's imagination. Each lie is a cargo and the bytes for its topic."""

    def __init__(self, run: Run, identity: Identity, heard: Heard, luck: random.Random) -> None:
        self._asks = run
        self._run = run.id
        self._told = run.manifest
        self._identity = identity
        self._heard = heard
        self._luck = luck
        self._engine = self._told.engines[0].engine
        self._slot = 0
        self._under, self._filled = b"", 0
        """The head under which it last made groups up, and how many."""
        self._made: set[bytes] = set()

    # As a member

    def join(self) -> bytes:
        """Its entry into the run, by its own key: the only thing that it says truly."""
        return seal(Join("hostile", self._engine, ZERO, ""), self._identity, self._run)

    def made_up(self) -> tuple[str, bytes] | None:
        """Make its next slots under the newest head, right in everything but the drawing."""
        if (head := self._head()) is None:
            return None
        if head.id != self._under:
            self._under, self._filled = head.id, 0
        sealed = []
        for _ in range(FEW):
            key = self._asks.slot_key(head.id, self._identity.public, self._filled)
            group = self._undrawn(head.id, self._asks.prompt(key)[1], self._filled)
            sealed.append(seal(group, self._identity, self._run))
            self._filled += 1
        self._made |= {Envelope.parse(each).id for each in sealed}
        return topics.GROUPS, write_batch(sealed)

    def condemned(self, verdicts: bytes) -> int:
        """How many of what it made up a verifier has found out, by this gossip."""
        try:
            told = [each.open(Verdict, self._run).message for each in read_batch(verdicts)]
        except ProtocolError:
            return 0  # there are others who lie
        return sum(each.result == "dishonest" and each.group in self._made for each in told)

    def _undrawn(self, under: bytes, prompt: NDArray[np.int64], slot: int) -> TrajectoryGroup:
        """Some tokens that nobody drew; rewards that differ, where the run has claims."""
        model = self._told.model
        ids = self._luck.choices(
            [each for each in range(model.vocab_size) if each not in model.end_tokens], k=4
        )
        row = np.array([*ids, model.end_tokens[0]], dtype=np.int64)
        drawn = [
            Completion(
                row,
                np.full(len(row), -0.5),
                "end",
                float(number % 2) if self._told.contract.pure else None,
                (Stretch(0, len(row), 0),),
            )
            for number in range(self._told.sampling.group_size)
        ]
        return TrajectoryGroup.of(
            prompt=prompt,
            completions=drawn,
            engine=self._engine,
            heads=(under,),
            slot=slot,
            vocabulary=model.vocab_size,
        )

    # Floods

    def garbage(self) -> tuple[str, bytes]:
        """Make bytes that do not parse, or a signed message of a proper form with a random body."""
        cargo = self._luck.choice(topics.CARGOES)
        body = self._luck.randbytes(self._luck.randrange(1, 2_000))
        if self._luck.random() < 0.5:
            return cargo, body
        kind = self._luck.choice(KINDS)
        signature = sign_body(kind, body, self._identity, self._run)
        sealed = canonical.pack([limits.MAJOR, kind, self._run, self._identity.public, body, signature])
        return cargo, write_batch([sealed]) if cargo in {topics.GROUPS, topics.VERDICTS} else sealed

    def own_groups(self) -> tuple[str, bytes]:
        """Groups under the newest head, properly signed, that answer no prompt of anybody's."""
        head = self._head()
        group = self._undrawn(head.id if head else self._luck.randbytes(32), np.arange(4), 0)
        sealed = []
        for _ in range(TOGETHER):
            self._slot += 1
            sealed.append(seal(dataclasses.replace(group, slot=self._slot), self._identity, self._run))
        return topics.GROUPS, write_batch(sealed)

    # Forgeries

    def forgery(self) -> tuple[str, bytes]:
        """Something in somebody else's name, as soon as enough was heard to make one up."""
        ways: list[Callable[[], tuple[str, bytes] | None]] = [
            *(
                self._group,
                self._forged_head,
                self._verdict,
                self._grant,
                self._receipt,
                self._heartbeat,
                self._inventory,
                self._join,
            )
        ]
        while ways:
            way = self._luck.choice(ways)
            if (made := way()) is not None:
                return made
            ways.remove(way)
        return self.garbage()

    def vote_question(self) -> bytes:
        """It asks to lead, though it is no trainer."""
        head = self._head()
        vote = TermVote(base=head.id if head else ZERO, leader=self._identity.public, term=self._term() + 1)
        return encode(VoteQuestion((), vote))

    def _as(self, signer: bytes, message: Any) -> bytes:
        """A message under a name that is not its writer's, signed by its writer or by nobody."""
        body = encode(message)
        mine = sign_body(message.KIND, body, self._identity, self._run)
        signature = mine if self._luck.random() < 0.5 else self._luck.randbytes(64)
        return canonical.pack([limits.MAJOR, message.KIND, self._run, signer, body, signature])

    def _head(self) -> Opened[WeightsHead] | None:
        """The newest head that went by."""
        found = [each for data in self._heard.newest[topics.HEADS] if (each := _opened(data, self._run))]
        return max(found, key=lambda head: (head.message.term, head.message.version), default=None)

    def _term(self) -> int:
        head = self._head()
        return head.message.term if head else 1

    def _leader(self) -> bytes:
        head = self._head()
        return head.signer if head else self._told.trainers[0]

    def _some_group(self) -> Envelope | None:
        data = self._heard.any_of(topics.GROUPS, self._luck)
        return self._luck.choice(read_batch(data)) if data else None

    def _group(self) -> tuple[str, bytes] | None:
        """Somebody's group, with another slot or other rewards."""
        true = self._some_group()
        if true is None or true.kind != TrajectoryGroup.KIND:
            return None
        told = true.claim(TrajectoryGroup, self._run)
        other = dataclasses.replace(
            told,
            slot=told.slot + self._luck.randrange(1, 8),
            rewards=told.rewards and (1.0,) * len(told.rewards),
        )
        return topics.GROUPS, write_batch([self._as(true.signer, other)])

    def _forged_head(self) -> tuple[str, bytes] | None:
        """Make the next version with weights that nobody has, or a fork of the newest."""
        head = self._head()
        if head is None:
            return None
        told = head.message
        if self._luck.random() < 0.5:
            changed = dataclasses.replace(told, root=self._luck.randbytes(32))
        else:
            changed = dataclasses.replace(
                told, previous=head.id, version=told.version + 1, root=self._luck.randbytes(32)
            )
        return topics.HEADS, self._as(self._luck.choice(self._told.trainers), changed)

    def _verdict(self) -> tuple[str, bytes] | None:
        group = self._some_group()
        if group is None or not self._told.verifiers:
            return None
        figures = Figures(
            contrast=0.0,
            d_mean=1.0,
            d_most=1.0,
            logprob_gap=9.0,
            reward=None,
            tokens=8,
            z_mean=9.0,
            z_most=9.0,
        )
        verdict = Verdict(self._luck.randbytes(64), figures, group.id, "made up", "own-luck", "dishonest")
        return topics.VERDICTS, write_batch([self._as(self._luck.choice(self._told.verifiers), verdict)])

    def _grant(self) -> tuple[str, bytes]:
        head = self._head()
        leader = self._luck.choice((*self._told.trainers, self._identity.public))
        vote = TermVote(base=head.id if head else ZERO, leader=leader, term=self._term() + 1)
        ballots = tuple(Ballot(each, self._luck.randbytes(64)) for each in sorted(self._told.terms.electors))
        return topics.GRANTS, encode(TermGrant(ballots, vote))

    def _receipt(self) -> tuple[str, bytes] | None:
        """It says of somebody's group that it was taken, so that it is sent no more."""
        group, head = self._some_group(), self._head()
        if group is None or head is None:
            return None
        told = head.message
        receipt = Receipt(group.id, head.id, 0.0, (), told.term, told.version)
        return topics.RECEIPTS, self._as(self._leader(), receipt)

    def _heartbeat(self) -> tuple[str, bytes] | None:
        head = self._head()
        if head is None:
            return None
        now = self._luck.choice((FAR_FUTURE_MS, time.time_ns() // 1_000_000))
        beat = Heartbeat(head.id, head.message.term + self._luck.randrange(2), now, head.message.version + 7)
        return topics.HEARTBEATS, self._as(self._leader(), beat)

    def _inventory(self) -> tuple[str, bytes] | None:
        """It lists groups that the leader never took, so that verifiers fetch or vouch for them."""
        head = self._head()
        if head is None:
            return None
        listed = Inventory(self._luck.randbytes(64), head.id, self._luck.randrange(1, 99), head.message.term)
        return topics.INVENTORIES, self._as(self._leader(), listed)

    def _join(self) -> tuple[str, bytes] | None:
        group = self._some_group()
        if group is None:
            return None
        join = Join("hostile", self._luck.choice(self._told.engines).engine, ZERO, "")
        return topics.JOINS, self._as(group.signer, join)


@functools.lru_cache(2 * REMEMBERED)  # every lie looks for the newest of them all
def _opened(data: bytes, run: bytes) -> Opened[WeightsHead] | None:
    try:
        return Envelope.parse(data).open(WeightsHead, run)
    except ProtocolError:
        return None
