"""References to groups too large for gossip, which the recipient fetches as blobs.

A reference is accepted only in a delivery from the group's own sampler, which has the blob, and
which must be a peer that groups are accepted from; gossiped references are ignored. One delivery of
a sampler is fetched at a time, within one deadline, so that nobody keeps others waiting for long.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import trio

from echo_node.errors import PeerError
from echo_node.net.base import Network
from echo_node.net.blobs.client import BlobClient
from echo_node.net.blobs.providers import Want
from echo_node.rollouts.record import RolloutRecord
from protocol import Envelope, GroupReference, Identity, TrajectoryGroup, blob_id, limits, seal

FETCH_SECONDS: Final = 15.0
"""Deadline in seconds for all groups that one delivery refers to."""
AT_ONCE: Final = 4
"""Deliveries, each of another sampler, whose groups are fetched at the same time."""
TOGETHER: Final = 16 * 1024 * 1024
"""Most bytes of groups fetched for one delivery.

What it refers to beyond that gets no receipt, so the sampler sends it again.
"""
_MOST: Final = limits.GROUP_BYTES + limits.ENVELOPE_BYTES


def refer_to(group: RolloutRecord, identity: Identity, run: bytes) -> bytes:
    """Return a sealed reference to a group, whose blob is its sealed bytes."""
    sealed = group.sealed or b""
    reference = GroupReference(
        blob=blob_id(sealed), group=group.id, head=group.head, size=len(sealed), slot=group.slot
    )
    return seal(reference, identity, run)


def is_group(envelope: Envelope) -> bool:
    return envelope.kind == TrajectoryGroup.KIND


def is_reference(envelope: Envelope) -> bool:
    return envelope.kind == GroupReference.KIND


class GroupRefFetcher:
    """Fetch the groups behind references. `welcome` decides from which samplers."""

    def __init__(self, network: Network, run: bytes, *, welcome: Callable[[bytes], bool]) -> None:
        self._blobs = BlobClient(network)
        self._run = run
        self._welcome = welcome
        self._slots = trio.CapacityLimiter(AT_ONCE)
        self._fetching: set[bytes] = set()

    async def groups_of(self, batch: Sequence[Envelope], sender: bytes) -> Sequence[Envelope]:
        """Return the groups of a delivered batch, including those that it refers to."""
        if not any(map(is_reference, batch)):
            return batch
        if not self._welcome(sender):
            raise PeerError("references to groups are taken from samplers of the run only")
        if sender in self._fetching:
            raise PeerError("one delivery with references at a time")
        self._fetching.add(sender)
        try:
            with trio.fail_after(FETCH_SECONDS):
                async with self._slots:
                    return await self._fetch_groups(batch, sender)
        except trio.TooSlowError:
            text = f"groups that were referred to could not be had within {FETCH_SECONDS:g} s"
            raise PeerError(text) from None
        finally:
            self._fetching.remove(sender)

    async def _fetch_groups(self, batch: Sequence[Envelope], sender: bytes) -> Sequence[Envelope]:
        groups: list[Envelope] = []
        seen: set[bytes] = set()
        size = 0
        for each in batch:
            if not is_reference(each):
                groups.append(each)
                continue
            if each.signer != sender:
                raise PeerError("a reference to a group of somebody else's")
            reference = each.open(GroupReference, self._run).message
            size += reference.size
            if reference.group in seen or (seen and size > TOGETHER):
                continue
            seen.add(reference.group)
            groups.append(await self._fetch_group(reference, sender))
        return groups

    async def _fetch_group(self, reference: GroupReference, sender: bytes) -> Envelope:
        found = await self._blobs.fetch(
            [Want(reference.blob, most=reference.size)], named=[sender], most=_MOST
        )
        group = Envelope.parse(found[reference.blob])
        if (group.id, group.signer) != (reference.group, sender):
            raise PeerError("a reference to another group than the one that it names")
        return group
