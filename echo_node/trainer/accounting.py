"""Accounts of versions: written by who leads, and by who stands by fetched, checked and put into its own journal.

So whoever leads next knows what the chain was trained on, uses none of it again, and can name it. An account is believed if its
ids have the root that the head signed, each is signed by its sampler, and each group was fresh under a head of the same chain.
Slots and rewards are the leader's word: at worst, a slot stays empty, or a replay does not come to the published bits.
"""

from __future__ import annotations

import itertools
import logging
import struct
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

import trio

from echo_node.admission import MOST_HEADS
from echo_node.errors import PeerError, StoreError
from echo_node.trainer.journal import Batch, KeptGroup, TrainingJournal
from echo_node.trainer.resuming import in_chain
from echo_node.weights.account import Account, UsedBatch, UsedGroup, account_of
from echo_node.weights.journal import Head
from echo_node.weights.pull import Puller
from protocol import ProtocolError, TrajectoryGroup, WeightsHead, decode, encode, merkle_root
from protocol.envelope import verify_id
from protocol.errors import TooLargeError

log = logging.getLogger(__name__)
AGAIN_SECONDS: Final = 1.0
"""After an account could not be had."""
_NOTHING: Final = merkle_root([])
_SIGNATURE_BYTES: Final = 64
"""At the end of every sealed message."""


def account_for(batches: Sequence[Batch]) -> bytes | None:
    """The account of a version that was trained on these batches; none, if it would be too long to travel."""
    if not batches:
        return None
    try:
        return encode(
            Account(tuple(UsedBatch(batch.policy_step, tuple(map(_used, batch.groups))) for batch in batches))
        )
    except TooLargeError as error:
        log.warning("a version goes out without the account of its groups: %s", error)
        return None


def _used(group: KeptGroup) -> UsedGroup:
    if group.sealed is None or group.rewards is None:
        raise StoreError(f"group {group.id.hex()[:16]} of a batch is not in the journal any more")
    rewards = struct.pack(f"<{len(group.rewards)}d", *group.rewards)
    return UsedGroup(
        group.id, group.sampler, group.slot, group.head, rewards, group.sealed[-_SIGNATURE_BYTES:]
    )


def batches_of(data: bytes, heads: Sequence[Head], bound: int) -> list[Batch]:
    """The batches of the last of these heads, which are those of a chain, by its account; a `PeerError`, if it is not true."""
    head = heads[-1].message
    known = {each.id: each.message for each in heads[:-1]}
    before = known.get(head.previous)
    try:
        batches = decode(Account, data).batches
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


def _checked(used: UsedGroup, under: WeightsHead | None, at: int, bound: int) -> KeptGroup:
    """A group that was used at a step, if it was fresh then, and is signed."""
    if under is None or not 0 <= at - under.step <= bound:
        raise PeerError(f"group {used.id.hex()[:16]} was drawn under no head of the newest")
    try:
        verify_id(TrajectoryGroup.KIND, used.id, used.sampler, used.signature)
    except ProtocolError as error:
        raise PeerError(f"group {used.id.hex()[:16]} is not signed by its sampler: {error}") from error
    rewards = struct.unpack(f"<{len(used.rewards) // 8}d", used.rewards)
    return KeptGroup(used.id, used.sampler, used.slot, used.head, under.step, None, rewards, used.signature)


class Accounting:
    """The side of a trainer that stands by. `overheard` gives the bytes of a group by its id, where they were heard."""

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
        """Heads of the newest whose groups are known, or never will be."""

    async def follow(self) -> None:
        """Account for every head as soon as it is heard, before its weights are here, until cancelled: who leads may be gone soon."""
        seen: bytes | None = None
        while True:
            with trio.move_on_after(AGAIN_SECONDS):
                seen = (await self._puller.hearing.wait_for_newer(seen)).id
            await self.keep_up()

    async def keep_up(self) -> None:
        """Know what the newest heads were trained on: those after which groups may still be used that an earlier one had.

        The newest come first: what one was trained on that nobody knows may be of any head before it.
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
        # What this trainer drew for branches that were left is disowned: others may have used the same groups.
        after = await self._journal.last_number(heads[fresh[0]].message.version - 1)
        own, _ = await in_chain(self._journal, await self._journal.batches(after=after), heads)
        known = {batch.version for batch in own}
        for at in reversed(fresh):
            head = heads[at]
            try:
                if head.id not in self._done and head.message.version not in known:
                    await self._account(heads[max(0, at - MOST_HEADS) : at + 1])
                self._done.add(head.id)
            except PeerError as error:  # others may give it, or give it later
                log.info("what version %d was trained on: %s", head.message.version, error)

    async def _account(self, heads: Sequence[Head]) -> None:
        head = heads[-1]
        blob = account_of(head.message)
        if blob is None or head.message.groups == _NOTHING:
            return
        data = await self._puller.named(head, blob, Account.LIMIT)
        try:
            batches = await trio.to_thread.run_sync(batches_of, data, heads, self._bound)
        except PeerError as error:
            log.warning("the leader's account is not believed: %s", error)
            return
        if twice := await self._journal.follow([self._with_bytes(batch) for batch in batches]):
            log.warning("version %d was trained on %d groups again", head.message.version, len(twice))

    def _with_bytes(self, batch: Batch) -> Batch:
        """The same, with the bytes of the groups that were overheard: who has all of them can learn from it again."""
        return replace(batch, groups=tuple(map(self._with_own, batch.groups)))

    def _with_own(self, group: KeptGroup) -> KeptGroup:
        sealed = self._overheard(group.id)
        is_it = sealed is not None and sealed[-_SIGNATURE_BYTES:] == group.signature
        return replace(group, sealed=sealed) if is_it else group
