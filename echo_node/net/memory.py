"""A swarm within one process, for demonstrations and tests.

    async with MemorySwarm(seed=1, loss=0.1) as swarm, swarm.join(identity) as network: ...

It has the limits of the wire, loses, delays, duplicates and reorders gossip on request, and can be
partitioned and healed. All nodes are connected to each other.
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
from echo_node.net.link_faults import FaultyDelivery, Link, LinkFaults
from echo_node.net.memory_node import MemoryNetwork
from protocol import Identity, peer_id

IN_FLIGHT: Final = 65_536
"""Most messages in flight; more are lost, and counted as `overflow`."""
_EVERYBODY_ELSE: Final = -1


@dataclass(frozen=True, slots=True)
class _Parcel:
    """A copy of a message in flight. `again`: a duplicate to be delivered as such."""

    id: bytes
    message: Message
    to: MemoryNetwork
    again: bool


class MemorySwarm:
    """Nodes that reach each other; deterministic by seed, faults and calls."""

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
        self.faults = LinkFaults(loss=loss, delay=delay, duplicate=duplicate, reorder=reorder)
        """Link faults; may be replaced by another `LinkFaults` at any moment."""
        self.address = address
        """The IP address that every node reports for every other; `127.0.0.1` lets them also
        connect outside of this swarm."""
        self._seed = seed
        self._nodes: dict[bytes, MemoryNetwork] = {}
        self._links: dict[tuple[bytes, bytes], Link] = {}
        self._sides: dict[bytes, int] = {}
        self._counts: Counter[str] = Counter()
        self._delivery: FaultyDelivery[_Parcel] = FaultyDelivery(self._deliver, IN_FLIGHT)
        self._open = AsyncExitStack()
        self.nursery: trio.Nursery | None = None

    async def __aenter__(self) -> Self:
        self.nursery = await self._open.enter_async_context(trio.open_nursery())
        self.nursery.start_soon(self._delivery.run)
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
        """Join the swarm with this key for as long as the context lasts."""
        if self.nursery is None:
            raise DefectError(
                "joining a swarm that is not open", advice="use `async with MemorySwarm() as swarm`"
            )
        if identity.public in self._nodes:
            raise ConfigError(
                f"{identity.peer_id} is in this swarm already", advice="give each node its own key"
            )
        node = MemoryNetwork(self, identity.public)
        with self._membership_change():
            self._nodes[identity.public] = node
        await trio.lowlevel.checkpoint()
        try:
            yield node
        finally:
            self._leave(node)

    def partition(self, *groups: Iterable[bytes]) -> None:
        """Split the swarm into groups of public keys that reach only each other.

        Nodes named in no group form one more. Messages in flight across a cut are lost, and
        pending requests fail.
        """
        sides: dict[bytes, int] = {}
        for side, group in enumerate(groups):
            for public in group:
                if sides.setdefault(public, side) != side:
                    raise ConfigError(f"{peer_id(public)} cannot be on two sides of a partition")
        with self._membership_change():
            self._sides = sides

    def heal(self) -> None:
        """Undo the partition."""
        with self._membership_change():
            self._sides = {}

    @property
    def gossip_bytes(self) -> int:
        """Bytes of gossip that were sent, each copy counted."""
        return self._counts["gossip_bytes"]

    def counts(self) -> Mapping[str, int]:
        """Return the counters of what was sent.

        Keys: `sent`, `gossip_bytes`, `lost`, `doubled`, `reordered`, `cut`, `overflow`.
        """
        return dict(self._counts)

    # For the nodes:

    def reachable(self, public: bytes) -> dict[bytes, MemoryNetwork]:
        """Return the other nodes on this side of a partition, in the order of joining."""
        if public not in self._nodes:
            return {}
        side = self._side(public)
        return {
            other: node
            for other, node in self._nodes.items()
            if other != public and self._side(other) == side
        }

    def reach(self, asker: bytes, peer: bytes) -> MemoryNetwork:
        """Return the node of a key, or raise the error that says why it is unreachable."""
        if peer == asker or peer not in self._nodes:
            who = "this node itself" if peer == asker else f"nobody here has the key of {peer_id(peer)}"
            raise RequestError("unknown-peer", f"unknown peer: {who}")
        if self._side(peer) != self._side(asker):
            raise RequestError("unreachable", f"no way to {peer_id(peer)}: it is across a partition")
        return self._nodes[peer]

    def gossip(self, identifier: bytes, message: Message) -> None:
        """Send a message to every subscriber."""
        sender = message.sender
        for public, node in self._nodes.items():
            if public == sender or not node.listens(message.topic):
                continue
            if self._side(public) != self._side(sender):
                self._counts["cut"] += 1
                continue
            transmission = self._link(sender, public).transmit(self.faults, trio.current_time())
            self._counts["lost"] += not transmission.due
            self._counts["doubled"] += len(transmission.due) > 1
            self._counts["reordered"] += transmission.reordered
            self._counts["sent"] += 1
            self._counts["gossip_bytes"] += len(message.data) * max(1, len(transmission.due))
            for copy, due in enumerate(transmission.due):
                if not self._delivery.send(due, _Parcel(identifier, message, node, again=copy > 0)):
                    self._counts["overflow"] += 1

    def pause(self, sender: bytes, receiver: bytes) -> float:
        """Return the delay of a request or response from one node to another, in seconds."""
        return self._link(sender, receiver).pause(self.faults)

    def _deliver(self, parcel: _Parcel) -> None:
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
        with self._membership_change():
            del self._nodes[node.public]
            node.end()

    @contextmanager
    def _membership_change(self) -> Generator[None]:
        """Notify every node of how the block changes what it can reach."""
        before = {public: self.reachable(public) for public in self._nodes}
        yield
        for public, node in self._nodes.items():
            node.notice(before.get(public, {}), self.reachable(public))
