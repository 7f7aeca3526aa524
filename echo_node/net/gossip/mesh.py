"""GossipSub v1.1 mesh as a state machine, without I/O or a clock.

Each joined topic has a mesh of a few peers that get every message at once; other subscribers get
IHAVE at heartbeats and may request. Everything is bounded by the number of peers and topics.
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
"""Least number of peers outside the mesh that get IHAVE at a heartbeat; or a quarter of them."""
FLOOD: Final = 16
"""Peers that get a message from its author at once, in the mesh or not."""
PRUNE_SECONDS: Final = 60
"""Backoff after a prune."""
LEAVE_SECONDS: Final = 10
"""Backoff after leaving a topic."""
SLACK_SECONDS: Final = 2
"""Seconds added to a backoff before grafting again."""
FANOUT_SECONDS: Final = 60
HISTORY: Final = 5
"""Heartbeats for which a message can be requested (IWANT)."""
WINDOW: Final = 3
"""Heartbeats for which a message is offered (IHAVE)."""
TOPICS_PER_PEER: Final = 128
OFFERED: Final = 1_000
"""Message ids of one topic in one IHAVE."""
ASK_AT_ONCE: Final = 15
"""Ids in one IWANT: js-libp2p answers it in one frame, which must hold the largest messages."""
ASK_PER_BEAT: Final = 10 * ASK_AT_ONCE
"""Ids requested of one peer between two heartbeats; js-libp2p reads ten such frames."""
RESEND: Final = 3
"""Times that one peer gets one message again, on request or on a new subscription."""
REMEMBERED: Final = 8_192
"""Messages in the cache."""
REMEMBERED_BYTES: Final = 64 * 1024 * 1024


@dataclass(slots=True)
class _Remembered:
    """A cached message."""

    message: Published
    beat: int
    own: bool
    resent: Counter[bytes] = field(default_factory=Counter)


Out = dict[bytes, Control]
"""Control messages by recipient."""


class Mesh:
    """The mesh state of one node."""

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
            del self._no_graft_from[key]  # it may have restarted without the backoff
        for each in self._messages.values():
            each.resent.pop(peer, None)
        self._asked.pop(peer, None)
        self._owed.pop(peer, None)

    def handle_subscription(
        self, peer: bytes, topic: str, now: float, *, on: bool
    ) -> tuple[Out, list[Published]]:
        """Handle a (un)subscription; return the reply and messages the peer missed."""
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
        """Return the peers that get a message now."""
        chosen = set(self._mesh.get(topic, ()))
        if own:
            if topic not in self._mesh:
                self._fanout[topic] = now
            others = self.subscribers(topic) - chosen
            chosen |= set(self._random.sample(sorted(others), min(FLOOD - len(chosen), len(others))))
        return chosen.difference(but)

    def remember(self, identifier: bytes, message: Published, *, own: bool) -> None:
        """Cache a message for requests."""
        if identifier in self._messages:
            return
        self._messages[identifier] = _Remembered(message, self._beat, own)
        self._bytes += len(message.data)
        while len(self._messages) > REMEMBERED or self._bytes > REMEMBERED_BYTES:
            self._forget_oldest()

    def owe(self, peer: bytes, identifier: bytes, topic: str) -> None:
        """Offer a message that could not be queued for a peer, in the mesh or not."""
        owed = self._owed.setdefault(peer, OrderedDict())
        owed[identifier] = topic
        if len(owed) > OFFERED:
            owed.popitem(last=False)

    # Control

    def handle_graft(self, peer: bytes, topic: str, now: float) -> tuple[Out, str]:
        """Handle GRAFT; return the reply (none for unknown topics) and the fault or ""."""
        if topic not in self._mesh or peer in self._mesh[topic]:
            return {}, ""
        early = self._no_graft_from.get((peer, topic), now) > now
        full = len(self._mesh[topic]) >= DEGREE_HIGH or topic not in self._subscribed.get(peer, ())
        if early or full:
            return {peer: self._prune(peer, topic, PRUNE_SECONDS, now)}, "early-graft" if early else ""
        self._mesh[topic].add(peer)
        return {}, ""

    def handle_prune(self, peer: bytes, topic: str, seconds: int, now: float) -> None:
        if topic in self._mesh:
            self._mesh[topic].discard(peer)
            self._no_graft_to[peer, topic] = now + (seconds or PRUNE_SECONDS) + SLACK_SECONDS

    def handle_ihave(self, peer: bytes, topic: str, fresh: Iterable[bytes]) -> Out:
        """Handle IHAVE: request messages that are new here."""
        if topic not in self._mesh:
            return {}
        room = ASK_PER_BEAT - self._asked[peer]
        wanted = list(dict.fromkeys(fresh))[: max(0, room)]
        self._asked[peer] += len(wanted)
        return {peer: Control(want=wanted)} if wanted else {}

    def handle_iwant(self, peer: bytes, ids: Iterable[bytes]) -> list[Published]:
        """Handle IWANT: return the cached messages, each at most RESEND times."""
        return self._resend(
            peer, (self._messages[each] for each in dict.fromkeys(ids) if each in self._messages)
        )

    def heartbeat(self, now: float) -> Out:
        """Resize the meshes, offer recent messages and expire old ones."""
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
        """Back off both ways; this side longer, as the peer counts from arrival."""
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
