"""Follow the chain: hear heads, fetch what they name, and hold only what was proven. Knows no engine.

Whatever a peer sends is checked against the hash that the head commits to, and the whole state against its root and
layout, before anything is handed on.
"""

from __future__ import annotations

import trio

from echo_node.errors import PeerError, boundary
from echo_node.net.base import Network
from echo_node.weights.heads import ANSWER_BYTES, read_heads
from echo_node.weights.publish import ANCHOR_CODEC
from echo_node.weights.state import State, chunk_hashes, layout_of, read_safetensors
from echo_node.weights.store import check_blob
from protocol import (
    ZERO,
    ChainError,
    ChunkTable,
    Follower,
    Opened,
    Roster,
    Rules,
    WeightsHead,
    blob_id,
    decode,
    encode,
    limits,
    merkle_root,
    open_sealed,
    topics,
)

FETCH_SECONDS = 60.0


class Puller:
    """One node's view of the chain."""

    def __init__(self, network: Network, rules: Rules) -> None:
        self._network = network
        self._rules = rules
        self._news = trio.Event()
        self.follower = Follower.newcomer(rules)

    @property
    def tip(self) -> Opened[WeightsHead] | None:
        return self.follower.tip

    def hear(self, sealed: bytes) -> Opened[WeightsHead]:
        """Take a head that somebody sent. What the rules of the chain refuse is raised, and changes nothing."""
        head = open_sealed(sealed, WeightsHead, self._rules.run)
        self.follower = self.follower.accept(head)
        self._news.set()
        self._news = trio.Event()
        return head

    async def catch_up(self, peer: bytes) -> None:
        """Ask a peer for the heads that follow ours, until there are none."""
        while True:
            newest = self.tip.id if self.tip else ZERO
            answer = await self._network.request(
                peer, topics.CHAIN_STREAM, newest, deadline=FETCH_SECONDS, most=ANSWER_BYTES
            )
            heads = read_heads(answer)
            for sealed in heads:
                self.hear(sealed)
            if not heads or (self.tip and self.tip.id == newest):
                return

    def find(self, head_id: bytes) -> Opened[WeightsHead] | None:
        return next((head for head in reversed(self.follower.heads) if head.id == head_id), None)

    async def wait_for(self, head_id: bytes) -> Opened[WeightsHead]:
        """The head of that id, once it has been heard. The caller sets the deadline."""
        while (found := self.find(head_id)) is None:
            await self._news.wait()
        return found

    async def wait_for_newer(self, than: bytes | None) -> Opened[WeightsHead]:
        """The tip, once it is another one."""
        while (tip := self.tip) is None or tip.id == than:
            await self._news.wait()
        return tip

    async def roster(self, head: Opened[WeightsHead]) -> Roster:
        """Who may sample under a head."""
        return decode(Roster, await self._fetch(head.signer, head.message.roster, limits.ROSTER_BYTES))

    async def state(self, head: Opened[WeightsHead]) -> State:
        """The weights of a head, fetched from whoever signed it, and proven."""
        route = head.message.anchor
        if route is None or route.codec != ANCHOR_CODEC:
            raise PeerError(f"version {head.message.version} has no anchor that this node can read")
        table = decode(ChunkTable, await self._fetch(head.signer, route.table, limits.TABLE_BYTES))
        if table.codec != route.codec or sum(frame.size for frame in table) != route.size:
            raise PeerError(f"the table of version {head.message.version} is not what its head says of it")
        frames = [await self._fetch(head.signer, frame.blob, frame.size) for frame in table]
        return await trio.to_thread.run_sync(self._prove, head, table, b"".join(frames))

    def _prove(self, head: Opened[WeightsHead], table: ChunkTable, anchor: bytes) -> State:
        with boundary(PeerError, f"proving version {head.message.version}"):
            state = read_safetensors(anchor)
            hashes = chunk_hashes(state)
            if blob_id(encode(layout_of(state))) != self._rules.layout:
                raise ChainError("wrong-layout", "weights of another layout than the manifest's")
            if hashes != [frame.after for frame in table] or merkle_root(hashes) != head.message.root:
                raise ChainError("wrong-root", "weights whose hash is not the head's")
            return state

    async def _fetch(self, peer: bytes, blob: bytes, most: int) -> bytes:
        answer = await self._network.request(
            peer, topics.BLOB_STREAM, blob, deadline=FETCH_SECONDS, most=most
        )
        return check_blob(blob, answer)
