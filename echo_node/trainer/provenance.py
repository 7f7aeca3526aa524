"""Provenance of versions: which groups each was trained on, written and verified.

The leader writes a record for each version; standby trainers fetch, check and journal it. So the
next leader knows what the chain was trained on, uses none of it again, and can name it. A record is
believed if its ids have the Merkle root that the head signed, each is signed by its sampler, and
each group was fresh under a head of the same chain. Slots and rewards are the leader's word: at
worst, a slot stays empty, or a replay does not reproduce the published bits.
"""

from __future__ import annotations

import itertools
import logging
import struct
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

import trio

from echo_node.errors import PeerError, StoreError
from echo_node.rollouts.admission import MOST_HEADS
from echo_node.rollouts.record import SIGNATURE_BYTES, RolloutRecord
from echo_node.trainer.journal import Batch, TrainingJournal
from echo_node.trainer.recovery import in_chain
from echo_node.weights.chain_log import Head
from echo_node.weights.provenance_record import ProvenanceRecord, UsedBatch, UsedGroup, provenance_blob
from echo_node.weights.puller import Puller
from protocol import ProtocolError, TrajectoryGroup, WeightsHead, decode, encode, merkle_root
from protocol.envelope import verify_id
from protocol.errors import TooLargeError

log = logging.getLogger(__name__)
AGAIN_SECONDS: Final = 1.0
"""Seconds before another attempt after a record could not be fetched."""
_NOTHING: Final = merkle_root([])


def provenance_record_of(batches: Sequence[Batch]) -> bytes | None:
    """Return the record of a version trained on these batches, or None if too long."""
    if not batches:
        return None
    try:
        return encode(
            ProvenanceRecord(
                tuple(UsedBatch(batch.policy_step, tuple(map(_used, batch.groups))) for batch in batches)
            )
        )
    except TooLargeError as error:
        log.warning("a version is published without its provenance record: %s", error)
        return None


def _used(group: RolloutRecord) -> UsedGroup:
    if group.signature is None or group.rewards is None:
        raise StoreError(f"group {group.id.hex()[:16]} of a batch is not in the journal any more")
    rewards = struct.pack(f"<{len(group.rewards)}d", *group.rewards)
    return UsedGroup(group.id, group.sampler, group.slot, group.head, rewards, group.signature)


def batches_of(data: bytes, heads: Sequence[Head], bound: int) -> list[Batch]:
    """Return the batches of the last of these heads of one chain, by its record.

    Raise `PeerError` if the record does not match the heads.
    """
    head = heads[-1].message
    known = {each.id: each.message for each in heads[:-1]}
    before = known.get(head.previous)
    try:
        batches = decode(ProvenanceRecord, data).batches
    except ProtocolError as error:
        raise PeerError(f"the account of version {head.version} is none: {error}") from error
    ids = sorted(group.id for batch in batches for group in batch.groups)
    if merkle_root(ids) != head.groups or len(set(ids)) != len(ids):
        raise PeerError(f"the account of version {head.version} has other groups than its head commits to")
    steps = [batch.policy_step for batch in batches]
    moves = [after - step for step, after in itertools.pairwise((*steps, head.step))]
    if before is None or steps[0] != before.step or not set(moves) <= {0, 1}:
        raise PeerError(f"the account of version {head.version} has other steps than its chain")
    return [
        Batch(
            batch.policy_step + 1,
            batch.policy_step,
            head.version,
            tuple(_checked(each, known.get(each.head), batch.policy_step, bound) for each in batch.groups),
            head.previous,
        )
        for batch in batches
    ]


def _checked(used: UsedGroup, under: WeightsHead | None, at: int, bound: int) -> RolloutRecord:
    """Return a group that was used at a step, if it was fresh then, and is signed."""
    if under is None or not 0 <= at - under.step <= bound:
        raise PeerError(f"group {used.id.hex()[:16]} was drawn under no head of the newest")
    try:
        verify_id(TrajectoryGroup.KIND, used.id, used.sampler, used.signature)
    except ProtocolError as error:
        raise PeerError(f"group {used.id.hex()[:16]} is not signed by its sampler: {error}") from error
    rewards = struct.unpack(f"<{len(used.rewards) // 8}d", used.rewards)
    return RolloutRecord(
        used.id, used.sampler, used.slot, used.head, under.step, None, rewards, used.signature
    )


class ProvenanceReader:
    """Fetch provenance records for a standby trainer.

    `overheard` returns the bytes of a group by its id, where they were received.
    """

    def __init__(
        self,
        puller: Puller,
        journal: TrainingJournal,
        bound: int,
        overheard: Callable[[bytes], bytes | None] = lambda _id: None,
    ) -> None:
        self._puller = puller
        self._journal = journal
        self._bound = bound
        self._overheard = overheard
        self._done: set[bytes] = set()
        """Fresh heads whose groups are known, or never will be."""

    async def follow(self) -> None:
        """Fetch the record of every head as soon as it is announced, until cancelled.

        It does not wait for the weights: the leader may be gone soon.
        """
        seen: bytes | None = None
        while True:
            with trio.move_on_after(AGAIN_SECONDS):
                seen = (await self._puller.chain.wait_for_newer(seen)).id
            await self.keep_up()

    async def keep_up(self) -> None:
        """Fetch the records of the fresh heads, whose groups could still be used again.

        The newest come first: the groups of a head without a record may be of any head before it.
        """
        heads = self._puller.store.follower.heads
        fresh = [
            at
            for at in range(max(0, len(heads) - MOST_HEADS), len(heads))
            if heads[-1].message.step - heads[at].message.step <= self._bound
        ]
        self._done &= {heads[at].id for at in fresh}
        if all(heads[at].id in self._done for at in fresh):
            return
        # Batches of branches that were left are disowned: others may have used the same groups.
        after = await self._journal.last_number(heads[fresh[0]].message.version - 1)
        own, _ = await in_chain(self._journal, await self._journal.batches(after=after), heads)
        known = {batch.version for batch in own}
        for at in reversed(fresh):
            head = heads[at]
            try:
                if head.id not in self._done and head.message.version not in known:
                    await self._fetch_record(heads[max(0, at - MOST_HEADS) : at + 1])
                self._done.add(head.id)
            except PeerError as error:  # another peer may have it, or have it later
                log.info("provenance of version %d is not here yet: %s", head.message.version, error)

    async def _fetch_record(self, heads: Sequence[Head]) -> None:
        head = heads[-1]
        blob = provenance_blob(head.message)
        if blob is None or head.message.groups == _NOTHING:
            return
        data = await self._puller.named(head, blob, ProvenanceRecord.LIMIT)
        try:
            batches = await trio.to_thread.run_sync(batches_of, data, heads, self._bound)
        except PeerError as error:
            log.warning("the leader's provenance record is refused: %s", error)
            return
        if twice := await self._journal.follow([self._with_bytes(batch) for batch in batches]):
            log.warning("version %d was trained on %d groups again", head.message.version, len(twice))

    def _with_bytes(self, batch: Batch) -> Batch:
        """Return the batch with the received bytes of its groups, to replay it if whole."""
        return replace(batch, groups=tuple(map(self._with_sealed, batch.groups)))

    def _with_sealed(self, group: RolloutRecord) -> RolloutRecord:
        sealed = self._overheard(group.id)
        matches = sealed is not None and sealed[-SIGNATURE_BYTES:] == group.signature
        return replace(group, sealed=sealed) if matches else group
