"""Groups that the leader took, served and fetched by id (`GROUPS_STREAM`).

Verifiers and standby trainers fetch what an inventory lists and gossip did not bring: groups that
were delivered by hand, and those too large for gossip. They ask the leader, and then others of the
manifest: verifiers serve what they have seen.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Final

from echo_node.errors import PeerError
from echo_node.net.base import Network
from echo_node.runs.run import Run
from protocol import (
    Envelope,
    GroupsQuestion,
    ProtocolError,
    decode,
    encode,
    limits,
    peer_id,
    read_batch,
    topics,
    write_batch,
)

log = logging.getLogger(__name__)

FETCH_SECONDS: Final = 60.0
"""Deadline in seconds of one question for groups, of which one may be of the longest."""
HELD: Final = 8_192
"""Most groups that a leader can still serve."""
HELD_BYTES: Final = 128 << 20
"""Most sealed bytes of them; the oldest are dropped first."""
HELD_BYTES_OF_OTHERS: Final = 32 << 20
"""The same for whoever does not lead."""
OTHERS: Final = 3
"""Most peers that are asked for what the leader did not give."""
_HEADER: Final = 5
"""Most bytes that an array adds to each of its items."""


class TakenGroups:
    """Sealed bytes of the newest groups that a leader took.

    They are served to the keys that the run names.
    """

    def __init__(self, run: Run, most_bytes: int = HELD_BYTES) -> None:
        self._run = run.id
        self._most_bytes = most_bytes
        self._named = frozenset((*run.manifest.trainers, *run.manifest.verifiers))
        self._held: OrderedDict[bytes, bytes] = OrderedDict()
        self._bytes = 0

    def add(self, group: bytes, sealed: bytes) -> None:
        """Serve a group from now on."""
        if group in self._held:
            return
        self._held[group] = sealed
        self._bytes += len(sealed)
        while len(self._held) > HELD or (self._bytes > self._most_bytes and len(self._held) > 1):
            _, dropped = self._held.popitem(last=False)
            self._bytes -= len(dropped)

    def discard(self, group: bytes) -> None:
        """Forget a group that was not taken after all."""
        self._bytes -= len(self._held.pop(group, b""))

    @contextmanager
    def serve(self, network: Network) -> Generator[None]:
        """Answer questions for groups until the context is left."""
        with network.serve(topics.GROUPS_STREAM, self._answer, most=limits.GROUPS_QUESTION_BYTES):
            yield

    async def _answer(self, peer: bytes, question: bytes) -> bytes:
        if peer not in self._named:
            raise PeerError("groups are shown to the run's verifiers and trainers only")
        asked = decode(GroupsQuestion, question)
        if asked.run != self._run:
            raise PeerError("no groups of that run are here")
        found: list[bytes] = []
        size = _HEADER
        for sealed in (self._held[group] for group in asked.ids() if group in self._held):
            size += len(sealed) + _HEADER
            if found and size > limits.GROUPS_ANSWER_BYTES:
                break
            found.append(sealed)
        if not found:
            raise PeerError("none of these groups is here")
        return write_batch(found, most=limits.GROUPS_ANSWER_BYTES)


async def fetch_listed(network: Network, run: Run, leader: bytes, ids: Sequence[bytes]) -> list[Envelope]:
    """Fetch groups of an inventory from the leader or others of the manifest.

    Return those that were found.
    """
    named = {*run.manifest.verifiers, *run.manifest.trainers} - {leader, network.public}
    found: dict[bytes, Envelope] = {}
    asked = [leader, *sorted(named & network.peers())[:OTHERS]]
    for peer in asked:
        if missing := [each for each in ids if each not in found]:
            found |= {each.id: each for each in await fetch_groups(network, run.id, peer, missing)}
    return [*found.values()]


async def fetch_groups(network: Network, run: bytes, peer: bytes, ids: Sequence[bytes]) -> list[Envelope]:
    """Fetch groups from a peer; return those served, signatures unchecked."""
    wanted = dict.fromkeys(ids)
    found: list[Envelope] = []
    while wanted:
        asked = [*wanted][: limits.ASKED_GROUPS]
        question = encode(GroupsQuestion(groups=b"".join(asked), run=run))
        try:
            answer = await network.request(
                peer, topics.GROUPS_STREAM, question, deadline=FETCH_SECONDS, most=limits.GROUPS_ANSWER_BYTES
            )
            got = [each for each in read_batch(answer, most=limits.GROUPS_ANSWER_BYTES) if each.id in asked]
        except (PeerError, ProtocolError) as error:
            log.info("%d groups were not fetched from %s: %s", len(asked), peer_id(peer), error)
            got = []
        # An answer is in the order of its question: what it leaves out before its end is not there.
        answered = max((asked.index(each.id) for each in got), default=len(asked) - 1)
        for group in asked[: answered + 1]:
            del wanted[group]
        found += {each.id: each for each in got}.values()
    return found
