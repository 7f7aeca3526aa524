"""References to groups too large for gossip, which the recipient fetches as blobs.

A reference is accepted only in a delivery from the group's own sampler, which has the blob, and
which must be a peer that groups are accepted from; gossiped references are ignored. One delivery of
a sampler is fetched at a time, within a deadline by its bytes, and few samplers' at once. A
sampler whose groups could not be had rests, longer each time: a few keys that refer to nothing
would else keep all places taken.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

import trio

from echo_node.errors import PeerError
from echo_node.net.base import Network
from echo_node.net.blobs.client import BlobClient
from echo_node.net.blobs.providers import Want
from echo_node.rollouts.record import RolloutRecord
from protocol import (
    Envelope,
    GroupReference,
    Identity,
    ProtocolError,
    TrajectoryGroup,
    blob_id,
    limits,
    seal,
)

FETCH_SECONDS: Final = 15.0
"""Deadline in seconds for all groups of one delivery, beside the time for their bytes."""
FETCH_RATE: Final = 64 * 1024
"""Bytes per second that a sampler must send at least."""
AT_ONCE: Final = 4
"""Deliveries, each of another sampler, whose groups are fetched at the same time."""
_MOST: Final = limits.GROUP_BYTES + limits.ENVELOPE_BYTES
TOGETHER: Final = _MOST
"""Most bytes of groups fetched for one delivery.

What it refers to beyond that gets no receipt, so the sampler sends it again.
"""
REST_SECONDS: Final = 15.0
"""Seconds for which nothing is fetched from a sampler whose groups were not there; then doubled."""
LONGEST_REST: Final = 960.0
"""Upper bound in seconds of that rest."""
RESTING: Final = 8_192
"""Most samplers whose failures are remembered; the oldest are forgotten first."""


def fetch_seconds(size: int) -> float:
    """Return the deadline in seconds for so many bytes of groups."""
    return FETCH_SECONDS + min(size, TOGETHER) / FETCH_RATE


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
    """Fetch the groups behind references."""

    def __init__(self, network: Network, run: bytes) -> None:
        self._blobs = BlobClient(network)
        self._run = run
        self._slots = trio.CapacityLimiter(AT_ONCE)
        self._fetching: set[bytes] = set()
        self._rests: OrderedDict[bytes, tuple[int, float]] = OrderedDict()
        """Failures in a row by sampler, and the time until which it rests."""

    async def groups_of(
        self, batch: Sequence[Envelope], sender: bytes, *, is_accepted: bool
    ) -> Sequence[Envelope]:
        """Return the groups of a delivered batch, including those that it refers to.

        `is_accepted` says whether groups are accepted from the sender; else nothing is fetched.
        """
        if not any(map(is_reference, batch)):
            return batch
        if not is_accepted:
            raise PeerError("references to groups are taken from samplers of the run only")
        if any(is_reference(each) and each.signer != sender for each in batch):
            raise PeerError("a reference to a group of somebody else's")
        if sender in self._fetching:
            raise PeerError("one delivery with references at a time")
        failures, until = self._rests.get(sender, (0, 0.0))
        if (left := until - trio.current_time()) > 0:
            raise PeerError(f"groups that you referred to were not there: try again in {left:.0f} s")
        self._fetching.add(sender)
        try:
            return await self._fetch_in_turn(batch, sender, failures)
        finally:
            self._fetching.remove(sender)

    async def _fetch_in_turn(
        self, batch: Sequence[Envelope], sender: bytes, failures: int
    ) -> Sequence[Envelope]:
        """Fetch when there is a place; one that waits for a place in vain has not failed."""
        seconds = fetch_seconds(self._size(batch))
        late = f"groups that were referred to could not be had within {seconds:.0f} s"
        with trio.move_on_after(seconds) as waiting:
            await self._slots.acquire_on_behalf_of(sender)
        if waiting.cancelled_caught:
            raise PeerError(late)
        try:
            with trio.fail_after(seconds):
                groups = await self._fetch_groups(batch, sender)
        except trio.TooSlowError:
            self._failed(sender, failures)
            raise PeerError(late) from None
        except (PeerError, ProtocolError):
            self._failed(sender, failures)
            raise
        finally:
            self._slots.release_on_behalf_of(sender)
        self._rests.pop(sender, None)
        return groups

    def _size(self, batch: Sequence[Envelope]) -> int:
        """Return the bytes that a batch refers to; signatures are checked later."""
        return sum(each.claim(GroupReference, self._run).size for each in filter(is_reference, batch))

    def _failed(self, sender: bytes, failures: int) -> None:
        rest = min(LONGEST_REST, REST_SECONDS * 2.0 ** min(failures, 10))
        self._rests[sender] = (failures + 1, trio.current_time() + rest)
        self._rests.move_to_end(sender)
        if len(self._rests) > RESTING:
            self._rests.popitem(last=False)

    async def _fetch_groups(self, batch: Sequence[Envelope], sender: bytes) -> Sequence[Envelope]:
        groups: list[Envelope] = []
        seen: set[bytes] = set()
        size = 0
        for each in batch:
            if not is_reference(each):
                groups.append(each)
                continue
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
