"""A whole network in one process, for demonstrations and for tests, yours too:

    async with MemorySwarm(seed=1, loss=0.1) as swarm, swarm.join(identity) as network: ...

It holds to the limits of the wire, loses, delays, doubles and reorders gossip on request, and can be cut apart
and healed. Everybody is connected to everybody. It knows nothing of what the bytes mean.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, Generator, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

import trio

from echo_node.errors import ConfigError, DefectError
from echo_node.net.base import Message, Network, RequestError
from echo_node.net.memory_node import MemoryNetwork
from echo_node.net.weather import Courier, Link, Weather
from protocol import Identity, peer_id

UNDER_WAY: Final = 65_536
"""Messages that may be on the way at once; more are lost, and counted as `overflow`."""
_EVERYBODY_ELSE: Final = -1


@dataclass(frozen=True, slots=True)
class _Parcel:
    """One copy of a message on its way. `again`: a copy that the receiver will not recognise as one."""

    id: bytes
    message: Message
    to: MemoryNetwork
    again: bool


class MemorySwarm:
    """Nodes that reach each other. With the same seed, weather and order of calls, the same happens."""

    def __init__(
        self,
        seed: int = 0,
        *,
        loss: float = 0.0,
        delay: tuple[float, float] = (0.0, 0.0),
        duplicate: float = 0.0,
        reorder: float = 0.0,
        address: str | None = None,
    ) -> None:
        self.weather = Weather(loss=loss, delay=delay, duplicate=duplicate, reorder=reorder)
        """What happens on the way; give it another `Weather` at any moment."""
        self.address = address
        """Where every node says that every other is; `127.0.0.1` lets them meet outside of this swarm as well."""
        self._seed = seed
        self._nodes: dict[bytes, MemoryNetwork] = {}
        self._links: dict[tuple[bytes, bytes], Link] = {}
        self._sides: dict[bytes, int] = {}
        self._counts: Counter[str] = Counter()
        self._courier: Courier[_Parcel] = Courier(self._hand_over, UNDER_WAY)
        self._open = AsyncExitStack()
        self.nursery: trio.Nursery | None = None

    async def __aenter__(self) -> Self:
        self.nursery = await self._open.enter_async_context(trio.open_nursery())
        self.nursery.start_soon(self._courier.run)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        for node in tuple(self._nodes.values()):
            self._leave(node)
        if self.nursery is not None:
            self.nursery.cancel_scope.cancel()
        self.nursery = None
        try:
            return bool(await self._open.__aexit__(kind, error, trace))
        except BaseExceptionGroup as group:
            if group.exceptions == (error,):
                return False  # the block's own error leaves as it was raised, without the nursery's wrapping
            raise

    @asynccontextmanager
    async def join(self, identity: Identity) -> AsyncGenerator[Network]:
        """A node of this key, for as long as the context lasts."""
        if self.nursery is None:
            raise DefectError(
                "joining a swarm that is not open", advice="use `async with MemorySwarm() as swarm`"
            )
        if identity.public in self._nodes:
            raise ConfigError(
                f"{identity.peer_id} is in this swarm already", advice="give each node its own key"
            )
        node = MemoryNetwork(self, identity.public)
        with self._comings_and_goings():
            self._nodes[identity.public] = node
        await trio.lowlevel.checkpoint()
        try:
            yield node
        finally:
            self._leave(node)

    def partition(self, *groups: Iterable[bytes]) -> None:
        """Cut the swarm into groups of public keys that reach each other only within; who is named in none is in
        one more group. What is on its way across a cut is lost, and pending requests break.
        """
        sides: dict[bytes, int] = {}
        for side, group in enumerate(groups):
            for public in group:
                if sides.setdefault(public, side) != side:
                    raise ConfigError(f"{peer_id(public)} cannot be on two sides of a partition")
        with self._comings_and_goings():
            self._sides = sides

    def heal(self) -> None:
        """Undo the partition."""
        with self._comings_and_goings():
            self._sides = {}

    @property
    def gossip_bytes(self) -> int:
        """Bytes of gossip that were sent, each copy counted."""
        return self._counts["gossip_bytes"]

    def counts(self) -> Mapping[str, int]:
        """What went over the wire: `sent`, `gossip_bytes`, `lost`, `doubled`, `reordered`, `cut`, `overflow`."""
        return dict(self._counts)

    # What follows is for the nodes.

    def reachable(self, public: bytes) -> dict[bytes, MemoryNetwork]:
        """The other nodes on this side of any partition, in the order in which they came."""
        if public not in self._nodes:
            return {}
        side = self._side(public)
        return {
            other: node
            for other, node in self._nodes.items()
            if other != public and self._side(other) == side
        }

    def reach(self, asker: bytes, peer: bytes) -> MemoryNetwork:
        """The node of that key, or the error that says why it cannot be reached."""
        if peer == asker or peer not in self._nodes:
            who = "this node itself" if peer == asker else f"nobody here has the key of {peer_id(peer)}"
            raise RequestError("unknown-peer", f"unknown peer: {who}")
        if self._side(peer) != self._side(asker):
            raise RequestError("unreachable", f"no way to {peer_id(peer)}: it is across a partition")
        return self._nodes[peer]

    def gossip(self, identifier: bytes, message: Message) -> None:
        """Send a message on its way to every subscriber."""
        sender = message.sender
        for public, node in self._nodes.items():
            if public == sender or not node.listens(message.topic):
                continue
            if self._side(public) != self._side(sender):
                self._counts["cut"] += 1
                continue
            fate = self._link(sender, public).fate(self.weather, trio.current_time())
            self._counts["lost"] += not fate.due
            self._counts["doubled"] += len(fate.due) > 1
            self._counts["reordered"] += fate.reordered
            self._counts["sent"] += 1
            self._counts["gossip_bytes"] += len(message.data) * max(1, len(fate.due))
            for copy, due in enumerate(fate.due):
                if not self._courier.send(due, _Parcel(identifier, message, node, again=copy > 0)):
                    self._counts["overflow"] += 1

    def pause(self, sender: bytes, receiver: bytes) -> float:
        """How long a question or an answer takes from one to the other."""
        return self._link(sender, receiver).pause(self.weather)

    def _hand_over(self, parcel: _Parcel) -> None:
        sender, receiver = parcel.message.sender, parcel.to.public
        if self._nodes.get(receiver) is not parcel.to or self._side(sender) != self._side(receiver):
            self._counts["cut"] += 1
            return
        parcel.to.arrive(parcel.id, parcel.message, again=parcel.again)

    def _side(self, public: bytes) -> int:
        return self._sides.get(public, _EVERYBODY_ELSE)

    def _link(self, sender: bytes, receiver: bytes) -> Link:
        if (sender, receiver) not in self._links:
            self._links[sender, receiver] = Link(self._seed, sender, receiver)
        return self._links[sender, receiver]

    def _leave(self, node: MemoryNetwork) -> None:
        if self._nodes.get(node.public) is not node:
            return
        with self._comings_and_goings():
            del self._nodes[node.public]
            node.end()

    @contextmanager
    def _comings_and_goings(self) -> Generator[None]:
        """Tell every node how the block changed what it can reach."""
        before = {public: self.reachable(public) for public in self._nodes}
        yield
        for public, node in self._nodes.items():
            node.notice(before.get(public, {}), self.reachable(public))
