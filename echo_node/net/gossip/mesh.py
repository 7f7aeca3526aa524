"""Who gossips with whom: the mesh of GossipSub v1.1 as a state machine. No I/O, no clock but the one it is given.

Each topic that this node joined has a mesh of a few peers that get every message at once; the others are told now
and then which messages there are, and may ask. Everything is bounded by the number of peers and topics. It knows
peers by their keys and messages by their ids, and nothing of streams or of what is said.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from random import Random
from typing import Final

from echo_node.net.gossip.wire import Control, Published

DEGREE: Final = 6
DEGREE_LOW: Final = 4
DEGREE_HIGH: Final = 12
LAZY: Final = 6
"""Peers beside the mesh that hear of recent messages at each heartbeat, at least; a quarter of them if that is more."""
FLOOD: Final = 16
"""Peers that get a message from its author at once, mesh or not."""
PRUNE_SECONDS: Final = 60
LEAVE_SECONDS: Final = 10
SLACK_SECONDS: Final = 2
"""By which we graft later than we may."""
FANOUT_SECONDS: Final = 60
HISTORY: Final = 5
"""Heartbeats for which a message can be asked for."""
WINDOW: Final = 3
"""Heartbeats for which a message is offered."""
TOPICS_PER_PEER: Final = 128
OFFERED: Final = 1_000
"""Message ids of one topic that one peer is told of at once."""
ASK_AT_ONCE: Final = 15
"""Messages that fit into one frame at their largest: js-libp2p sends all that one frame asks for in one frame."""
ASK_PER_BEAT: Final = 10 * ASK_AT_ONCE
"""Message ids that one peer can make us ask for between two heartbeats; js-libp2p reads ten such frames."""
RESEND: Final = 3
"""Times that one peer gets one message again: because it asked, or subscribed anew."""
REMEMBERED: Final = 8_192
REMEMBERED_BYTES: Final = 64 * 1024 * 1024


@dataclass(slots=True)
class _Remembered:
    message: Published
    beat: int
    own: bool
    resent: Counter[bytes] = field(default_factory=Counter)


Out = dict[bytes, Control]
"""What to tell whom."""


class Mesh:
    """The state of one node."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._subscribed: dict[bytes, set[str]] = {}
        self._mesh: dict[str, set[bytes]] = {}
        self._fanout: dict[str, float] = {}
        self._no_graft_to: dict[tuple[bytes, str], float] = {}
        self._no_graft_from: dict[tuple[bytes, str], float] = {}
        self._messages: OrderedDict[bytes, _Remembered] = OrderedDict()
        self._bytes = 0
        self._beat = 0
        self._asked: Counter[bytes] = Counter()
        self._owed: dict[bytes, OrderedDict[bytes, str]] = {}

    @property
    def topics(self) -> Collection[str]:
        return self._mesh.keys()

    def mesh(self, topic: str) -> frozenset[bytes]:
        return frozenset(self._mesh.get(topic, ()))

    def subscribers(self, topic: str) -> set[bytes]:
        return {peer for peer, topics in self._subscribed.items() if topic in topics}

    # Peers

    def add(self, peer: bytes) -> None:
        self._subscribed.setdefault(peer, set())

    def remove(self, peer: bytes) -> None:
        self._subscribed.pop(peer, None)
        for members in self._mesh.values():
            members.discard(peer)
        for key in [key for key in self._no_graft_from if key[0] == peer]:
            del self._no_graft_from[key]  # it may have been restarted and know nothing of it
        for each in self._messages.values():
            each.resent.pop(peer, None)
        self._asked.pop(peer, None)
        self._owed.pop(peer, None)

    def hear_subscription(
        self, peer: bytes, topic: str, now: float, *, on: bool
    ) -> tuple[Out, list[Published]]:
        """What to answer, and which of our own recent messages the peer could not get before."""
        topics = self._subscribed.setdefault(peer, set())
        if not on:
            topics.discard(topic)
            if topic in self._mesh:
                self._mesh[topic].discard(peer)
            return {}, []
        if topic in topics or len(topics) >= TOPICS_PER_PEER:
            return {}, []
        topics.add(topic)
        missed = self._resend(
            peer, (each for each in self._messages.values() if each.own and each.message.topic == topic)
        )
        if (
            topic in self._mesh
            and len(self._mesh[topic]) < DEGREE_LOW
            and not self._backs_off(peer, topic, now)
        ):
            self._mesh[topic].add(peer)
            return {peer: Control(graft=[topic])}, missed
        return {}, missed

    # Topics

    def join(self, topic: str, now: float) -> Out:
        self._fanout.pop(topic, None)
        members = self._mesh.setdefault(topic, set())
        chosen = self._choose(topic, DEGREE - len(members), members, now)
        members |= chosen
        return {peer: Control(graft=[topic]) for peer in chosen}

    def leave(self, topic: str, now: float) -> Out:
        members = self._mesh.pop(topic, set())
        return {peer: self._prune(peer, topic, LEAVE_SECONDS, now) for peer in members}

    # Messages

    def recipients(self, topic: str, now: float, *, own: bool, but: Iterable[bytes] = ()) -> set[bytes]:
        """Who gets a message now."""
        chosen = set(self._mesh.get(topic, ()))
        if own:
            if topic not in self._mesh:
                self._fanout[topic] = now
            others = self.subscribers(topic) - chosen
            chosen |= set(self._random.sample(sorted(others), min(max(0, FLOOD - len(chosen)), len(others))))
        return chosen.difference(but)

    def remember(self, identifier: bytes, message: Published, *, own: bool) -> None:
        """Keep a message for those who ask for it."""
        if identifier in self._messages:
            return
        self._messages[identifier] = _Remembered(message, self._beat, own)
        self._bytes += len(message.data)
        while len(self._messages) > REMEMBERED or self._bytes > REMEMBERED_BYTES:
            self._forget_oldest()

    def owe(self, peer: bytes, identifier: bytes, topic: str) -> None:
        """A peer was to get a message and did not: it is offered it, in the mesh or not."""
        owed = self._owed.setdefault(peer, OrderedDict())
        owed[identifier] = topic
        if len(owed) > OFFERED:
            owed.popitem(last=False)

    # Control

    def hear_graft(self, peer: bytes, topic: str, now: float) -> tuple[Out, str]:
        """What to answer, and the fault in it, if there is one. A topic that is not ours gets none."""
        if topic not in self._mesh or peer in self._mesh[topic]:
            return {}, ""
        early = self._no_graft_from.get((peer, topic), now) > now
        full = len(self._mesh[topic]) >= DEGREE_HIGH or topic not in self._subscribed.get(peer, ())
        if early or full:
            return {peer: self._prune(peer, topic, PRUNE_SECONDS, now)}, "early-graft" if early else ""
        self._mesh[topic].add(peer)
        return {}, ""

    def hear_prune(self, peer: bytes, topic: str, seconds: int, now: float) -> None:
        if topic in self._mesh:
            self._mesh[topic].discard(peer)
            self._no_graft_to[peer, topic] = now + (seconds or PRUNE_SECONDS) + SLACK_SECONDS

    def hear_have(self, peer: bytes, topic: str, fresh: Iterable[bytes]) -> Out:
        """Ask for messages that are offered and were not here yet."""
        if topic not in self._mesh:
            return {}
        room = ASK_PER_BEAT - self._asked[peer]
        wanted = list(dict.fromkeys(fresh))[: max(0, room)]
        self._asked[peer] += len(wanted)
        return {peer: Control(want=wanted)} if wanted else {}

    def hear_want(self, peer: bytes, ids: Iterable[bytes]) -> list[Published]:
        """The messages that a peer asks for, each a few times at most."""
        return self._resend(
            peer, (self._messages[each] for each in dict.fromkeys(ids) if each in self._messages)
        )

    def heartbeat(self, now: float) -> Out:
        """Keep the meshes at their size, tell others of recent messages, and forget what is old."""
        out: Out = defaultdict(Control)
        self._no_graft_to = {key: until for key, until in self._no_graft_to.items() if until > now}
        self._no_graft_from = {key: until for key, until in self._no_graft_from.items() if until > now}
        self._fanout = {topic: at for topic, at in self._fanout.items() if at > now - FANOUT_SECONDS}
        self._asked.clear()
        for topic, members in self._mesh.items():
            members.intersection_update(self.subscribers(topic))
            if len(members) < DEGREE_LOW:
                for peer in self._choose(topic, DEGREE - len(members), members, now):
                    members.add(peer)
                    out[peer].graft.append(topic)
            elif len(members) > DEGREE_HIGH:
                for peer in self._random.sample(sorted(members), len(members) - DEGREE):
                    members.discard(peer)
                    out[peer].prune += self._prune(peer, topic, PRUNE_SECONDS, now).prune
        self._offer(out)
        self._beat += 1
        while self._messages and next(iter(self._messages.values())).beat <= self._beat - HISTORY:
            self._forget_oldest()
        return dict(out)

    def _offer(self, out: Out) -> None:
        recent: dict[str, list[bytes]] = defaultdict(list)
        for identifier, each in self._messages.items():
            if each.beat > self._beat - WINDOW:
                recent[each.message.topic].append(identifier)
        for topic, ids in recent.items():
            others = sorted(self.subscribers(topic) - self._mesh.get(topic, set()))
            count = min(len(others), max(LAZY, math.ceil(len(others) / 4)))
            for peer in self._random.sample(others, count):
                out[peer].have.append((topic, ids[-OFFERED:]))
        for peer, owed in tuple(self._owed.items()):
            still = OrderedDict((each, topic) for each, topic in owed.items() if each in self._messages)
            for topic in dict.fromkeys(still.values()):
                out[peer].have.append((topic, [each for each, its in still.items() if its == topic]))
            self._owed[peer] = still
            if not still:
                del self._owed[peer]

    def _choose(self, topic: str, count: int, members: set[bytes], now: float) -> set[bytes]:
        able = [
            peer
            for peer in sorted(self.subscribers(topic) - members)
            if not self._backs_off(peer, topic, now)
        ]
        return set(self._random.sample(able, max(0, min(count, len(able)))))

    def _backs_off(self, peer: bytes, topic: str, now: float) -> bool:
        return self._no_graft_to.get((peer, topic), now) > now

    def _prune(self, peer: bytes, topic: str, seconds: int, now: float) -> Control:
        """Neither grafts the other for a while. The peer counts from when this reaches it, so we wait a little more."""
        self._no_graft_from[peer, topic] = now + seconds
        self._no_graft_to[peer, topic] = now + seconds + SLACK_SECONDS
        return Control(prune=[(topic, seconds)])

    def _resend(self, peer: bytes, messages: Iterable[_Remembered]) -> list[Published]:
        found = [each for each in messages if each.resent[peer] < RESEND]
        for each in found:
            each.resent[peer] += 1
        return [each.message for each in found]

    def _forget_oldest(self) -> None:
        _, gone = self._messages.popitem(last=False)
        self._bytes -= len(gone.message.data)
