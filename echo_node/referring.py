"""Groups too long for gossip: a small reference is sent in their place, and whoever it is delivered to fetches the group.

A reference is taken only from the hand of the sampler that it is about, who has the group, and who must be somebody that
groups are taken from; what is gossiped is passed over. One delivery of a sampler is fetched at a time, within one deadline,
so that nobody keeps others waiting for long. It does not know what is done with a group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import trio

from echo_node.errors import PeerError
from echo_node.net.base import Network
from echo_node.net.blobs.blobs import Blobs
from echo_node.net.blobs.holders import Want
from protocol import Envelope, GroupReference, Identity, TrajectoryGroup, blob_id, limits, read_batch, seal

FETCH_SECONDS: Final = 15.0
"""For all groups that one delivery refers to."""
AT_ONCE: Final = 4
"""Deliveries, each of another sampler, whose groups are fetched together."""
TOGETHER: Final = 16 * 1024 * 1024
"""Bytes of groups that one delivery has fetched. What it refers to beyond that goes without a receipt, and comes again."""
_MOST: Final = limits.GROUP_BYTES + limits.ENVELOPE_BYTES


def refer_to(group: Envelope, identity: Identity, run: bytes) -> bytes:
    """A sealed reference to a sealed group, which is a blob by its bytes."""
    told = group.claim(TrajectoryGroup, run)
    reference = GroupReference(
        blob=blob_id(group.sealed),
        group=group.id,
        head=told.heads[0],
        size=len(group.sealed),
        slot=told.slot,
    )
    return seal(reference, identity, run)


def is_reference(envelope: Envelope) -> bool:
    return envelope.kind == GroupReference.KIND


def groups_in(data: bytes) -> tuple[Envelope, ...]:
    """The groups of a batch that was gossiped, without the references among them."""
    return tuple(envelope for envelope in read_batch(data) if not is_reference(envelope))


class Fetching:
    """References that become groups. `welcome` says whose."""

    def __init__(self, network: Network, run: bytes, *, welcome: Callable[[bytes], bool]) -> None:
        self._blobs = Blobs(network)
        self._run = run
        self._welcome = welcome
        self._places = trio.CapacityLimiter(AT_ONCE)
        self._served: set[bytes] = set()

    async def groups_of(self, data: bytes, sender: bytes) -> Sequence[Envelope]:
        """The groups of a batch that was delivered by hand, those that it refers to with the rest."""
        batch = read_batch(data)
        if not any(map(is_reference, batch)):
            return batch
        if not self._welcome(sender):
            raise PeerError("references to groups are taken from samplers of the run only")
        if sender in self._served:
            raise PeerError("one delivery with references at a time")
        self._served.add(sender)
        try:
            with trio.fail_after(FETCH_SECONDS):
                async with self._places:
                    return await self._wholes(batch, sender)
        except trio.TooSlowError:
            told = f"groups that were referred to could not be had within {FETCH_SECONDS:g} s"
            raise PeerError(told) from None
        finally:
            self._served.remove(sender)

    async def _wholes(self, batch: Sequence[Envelope], sender: bytes) -> Sequence[Envelope]:
        groups: list[Envelope] = []
        seen: set[bytes] = set()
        size = 0
        for each in batch:
            if not is_reference(each):
                groups.append(each)
                continue
            if each.signer != sender:
                raise PeerError("a reference to a group of somebody else's")
            told = each.open(GroupReference, self._run).message
            size += told.size
            if told.group in seen or (seen and size > TOGETHER):
                continue
            seen.add(told.group)
            groups.append(await self._whole(told, sender))
        return groups

    async def _whole(self, told: GroupReference, sender: bytes) -> Envelope:
        found = await self._blobs.fetch([Want(told.blob, most=told.size)], named=[sender], most=_MOST)
        whole = Envelope.parse(found[told.blob])
        if (whole.id, whole.signer) != (told.group, sender):
            raise PeerError("a reference to another group than the one that it names")
        return whole
