"""Reachability of this node: public, private (reachable by relays) or unknown.

Asks peers to dial back, holds reservations at relays while the node is private, relays for others
while it is public, and decides which addresses are advertised.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final, Literal

import trio
from libp2p.identity.identify_push.identify_push import push_identify_to_peers
from libp2p.peer.id import ID
from multiaddr import Multiaddr

from echo_node.errors import PeerError
from echo_node.net.host import HardHost
from echo_node.net.reachability import multiaddrs
from echo_node.net.reachability.autonat import PROTOCOL as AUTONAT
from echo_node.net.reachability.autonat import AutoNat, Verdict
from echo_node.net.reachability.circuit import HOP
from echo_node.net.reachability.relay import Relay

State = Literal["unknown", "public", "private"]

PEERS_ASKED: Final = 3
RELAYS: Final = 2
"""Reservations that are held, so that one may be lost without losing reachability."""
AGAIN_SECONDS: Final = 300.0
DOUBT_SECONDS: Final = 20.0
"""Seconds until a result that contradicts the known state is checked a second time."""
FIRST_SECONDS, LAST_SECONDS = 2.0, 60.0
"""Seconds between rounds without any verdict: first and, doubling, last. A server answers three
rounds a minute."""
TICK_SECONDS: Final = 1.0
RENEW_SECONDS: Final = 120.0
"""Seconds. Far more often than a reservation needs: it keeps the NAT mapping alive, and detects a
relay that died silently."""
REFUSED_SECONDS: Final = 60.0
TRIES: Final = 2
"""Relays that are asked for a reservation in one tick."""
TELL_SECONDS: Final = 20.0
MOST: Final = 8
"""Most advertised addresses: as many as a dialler tries."""


class Reachability:
    """Reachability of this node; `run` keeps it up to date."""

    def __init__(
        self,
        host: HardHost,
        *,
        relay: bool = True,
        public: bool | None = None,
        announce: Sequence[Multiaddr] = (),
        relays: int = RELAYS,
    ) -> None:
        """Make it for a host.

        `relay`: serve as a relay while public. `public`: the state as configured, which is then
        not checked by AutoNAT; a bootstrap node is public from its start. `announce`: addresses
        that the user configured.
        """
        self._host = host
        self._may_relay = relay
        self._configured = public
        self._announce = [multiaddrs.bare(each) for each in announce]
        self._relays_wanted = relays
        self._confirmed: list[Multiaddr] = []
        self._in_doubt = False
        self._refused: dict[ID, float] = {}
        self._renewed: dict[ID, float] = {}
        self._last_advertised: frozenset[str] = frozenset()
        self._news = trio.Event()
        self.autonat = AutoNat(host)
        self.relay = Relay(host)
        self.state: State = "unknown" if public is None else "public" if public else "private"
        host.set_addrs_factory(self._choose_addresses)
        self._serve()

    async def run(self) -> None:
        """Keep asking, renew reservations and push changed addresses, until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._ask)
            nursery.start_soon(self._maintain)
            nursery.start_soon(self._push_addresses)

    def advertised(self) -> list[Multiaddr]:
        """Return the addresses by which others can reach this node, as far as known."""
        return self._host.get_addrs()

    def one_line(self) -> str:
        """Describe the state and its consequences, for the user."""
        if self.state == "unknown":
            return "It is not known yet whether other nodes can dial this machine: none has tried."
        if self.state == "public":
            guests = len(self.relay.slots)
            helped = f" It relays for {_count(guests, 'node')} that cannot be dialled." if guests else ""
            return "Other nodes can dial this machine." + helped
        ports = sorted({port for port in map(multiaddrs.port_of, self._host.get_transport_addrs()) if port})
        cause = "is behind NAT or a firewall" if ports else "listens on no port"
        direct = f"forward TCP port {ports[0]}" if ports else "let it listen on a TCP port"
        if slots := len(self._host.circuits.slots):
            found = f"others reach it through {_count(slots, 'relay')}"
            means = "Sampling works as it is; serving weights to others is slower"
        else:
            found = "others cannot reach it, and no relay has a slot for it yet"
            means = "Sampling works as it is, over the connections that it opens itself"
        return f"This machine {cause}: {found}. {means}. To be reachable directly, {direct}."

    async def _ask(self) -> None:
        pause = FIRST_SECONDS
        while self._configured is None:
            verdict = await self._round()
            if verdict is None:
                pause = min(pause * 2, LAST_SECONDS) if self._servers() else FIRST_SECONDS
                wait = pause
            else:
                wait = DOUBT_SECONDS if self._learn(verdict) else AGAIN_SECONDS
            await trio.sleep(wait * random.uniform(0.8, 1.2))  # noqa: S311 -- jitter

    async def _round(self) -> bool | None:
        """Ask some peers once; return whether most can dial us, None if undecided."""
        offered = self._listen_addresses()
        if not offered:
            return False  # it listens on nothing
        verdicts: list[Verdict] = []

        async def ask(peer: ID) -> None:
            verdicts.append(await self.autonat.ask(peer, offered))

        servers = self._servers()
        async with trio.open_nursery() as nursery:
            for peer in random.sample(servers, min(PEERS_ASKED, len(servers))):
                nursery.start_soon(ask, peer)
        yes = [each for each in verdicts if each.dialled]
        no = [each for each in verdicts if each.dialled is False]
        if len(yes) == len(no):
            return None
        if len(yes) > len(no):
            votes = Counter(str(each.address) for each in yes if each.address is not None)
            self._confirmed = [Multiaddr(text) for text, count in votes.items() if count * 2 > len(yes)]
        return len(yes) > len(no)

    def _servers(self) -> list[ID]:
        """Return the peers that serve AutoNAT; if any are public, only those."""
        able = [each for each in self._peers() if self._host.speaks(each, AUTONAT)]
        far = [
            each for each in able if any(multiaddrs.reaches(way) == "internet" for way in self._ways(each))
        ]
        return far or able

    def _peers(self) -> list[ID]:
        return [each for each in self._host.get_connected_peers() if self._host.direct(each)]

    def _ways(self, peer: ID) -> list[Multiaddr]:
        return [each for conn in self._host.direct(peer) for each in conn.get_transport_addresses()]

    def _learn(self, dialled: bool) -> bool:  # noqa: FBT001 -- it is the finding itself
        """Take in a result; return True if it needs confirmation.

        A result that contradicts the known state counts when it is found twice in a row.
        """
        found: State = "public" if dialled else "private"
        if self.state not in {"unknown", found} and not self._in_doubt:
            self._in_doubt = True
            return True
        self._in_doubt = False
        if found != self.state:
            self.state = found
            self._serve()
        return False

    def _serve(self) -> None:
        if self.state == "public" and self._may_relay:
            self.relay.start()
        else:
            self.relay.stop()

    async def _maintain(self) -> None:
        while True:
            await self._keep_slots()
            now = frozenset([*map(str, self.advertised()), HOP if self.relay.serving else ""])
            if now != self._last_advertised:
                self._last_advertised = now
                self._news.set()
            await trio.sleep(TICK_SECONDS)

    async def _keep_slots(self) -> None:
        slots, now = self._host.circuits.slots, trio.current_time()
        for relay in [each for each, slot in slots.items() if now > slot.until or not self._relays(each)]:
            del slots[relay]
        if self.state != "private":
            slots.clear()
            return
        due = [each for each in slots if now > self._renewed.get(each, 0) + RENEW_SECONDS]
        for relay in due:
            await self._reserve(relay)
        self._refused = {each: until for each, until in self._refused.items() if until > now}
        able = [each for each in self._peers() if self._relays(each) and each not in {*slots, *self._refused}]
        random.shuffle(able)
        for relay in able[:TRIES]:
            if len(slots) < self._relays_wanted:
                await self._reserve(relay)

    def _relays(self, peer: ID) -> bool:
        return bool(self._host.direct(peer)) and self._host.speaks(peer, HOP)

    async def _reserve(self, relay: ID) -> None:
        try:
            await self._host.circuits.reserve(relay)
        except PeerError:
            self._host.circuits.slots.pop(relay, None)
            self._refused[relay] = trio.current_time() + REFUSED_SECONDS
        self._renewed = {each: self._renewed.get(each, 0) for each in self._host.circuits.slots}
        if relay in self._renewed:
            self._renewed[relay] = trio.current_time()

    async def _push_addresses(self) -> None:
        """Push changed addresses to the connected peers at once, by identify push."""
        while True:
            await self._news.wait()
            self._news = trio.Event()
            with trio.move_on_after(TELL_SECONDS):
                await push_identify_to_peers(self._host)  # contains what goes wrong with each

    def _listen_addresses(self) -> list[Multiaddr]:
        return multiaddrs.expanded(self._host.get_transport_addrs())

    def _choose_addresses(self, listening: Iterable[Multiaddr]) -> list[Multiaddr]:
        """Choose the advertised addresses from those that the host listens on."""
        own = multiaddrs.expanded(listening)
        far = [each for each in own if multiaddrs.reaches(each) == "internet"]
        near = [each for each in own if multiaddrs.reaches(each) == "network"]
        circuits = [each for slot in self._host.circuits.slots.values() for each in slot.addresses]
        if self.state == "private":
            wanted = [*self._announce, *circuits, *near]  # nobody out there gets an answer from the others
        elif self.state == "public":
            wanted = [*self._announce, *self._confirmed, *far, *near]
        else:
            wanted = [*self._announce, *far, *near]
        unique = {str(each): each for each in wanted or own}  # a node of one machine alone has only loopback
        return list(unique.values())[:MOST]


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
