"""Standby copy of the leader's buffer: gossiped groups that the leader accepted.

A group that the leader has accepted, by its receipts, is checked as the leader checks it, and waits
in this trainer's own journal until a version is trained on it, or it is too stale. So there is a
buffer to go on with, should both the leader and samplers be gone. Groups that were delivered
directly, or are too large for gossip, are fetched from the leader, whose inventories list them.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import Final

import trio

from echo_node.net.base import Message, Network, Validation
from echo_node.net.subscription import Subscription
from echo_node.rollouts.admission import Admission
from echo_node.rollouts.gossip_validation import GossipValidator, validate_inventories, validate_receipt
from echo_node.rollouts.group_refs import is_group
from echo_node.rollouts.record import RolloutRecord
from echo_node.rollouts.taken_groups import fetch_listed
from echo_node.runs.run import Run
from echo_node.trainer.journal import TrainingJournal
from echo_node.trainer.recovery import restore_heads
from echo_node.weights.store import WeightsStore
from protocol import Envelope, Inventory, Opened, Receipt, WeightsHead, limits, open_sealed, topics

log = logging.getLogger(__name__)
MOST_NAMED: Final = 4 * limits.RECEIPT_IDS
"""Most groups accepted by receipts that have not arrived yet."""
UNCONFIRMED_BYTES: Final = 64 << 20
"""Most sealed bytes of groups that have no receipt yet."""
ARRIVED: Final = 16_384
"""Most groups that are remembered as arrived, and are not fetched."""
GOSSIP_SECONDS: Final = 1.0
"""Seconds for which gossip may bring a listed group before it is fetched from the leader."""


class StandbyBuffer:
    """Gossiped groups of a standby trainer.

    `room` is the capacity of its buffer; `saw` is given the samplers of groups that arrived.
    """

    def __init__(
        self,
        run: Run,
        network: Network,
        store: WeightsStore,
        journal: TrainingJournal,
        room: int,
        saw: Callable[[dict[bytes, bytes]], Awaitable[None]] | None = None,
    ) -> None:
        self._run = run
        self._network = network
        self._store = store
        self._journal = journal
        self._room = room
        self._saw = saw
        self._bound = run.manifest.sync.staleness
        self._admission = Admission(run)
        self._validator = GossipValidator(run, self._admission)
        self._tip: Opened[WeightsHead] | None = None
        """The newest head that the admission knows."""
        self._unconfirmed: OrderedDict[bytes, Envelope] = OrderedDict()
        """Groups by id that arrived and have no receipt yet."""
        self._unconfirmed_bytes = 0
        self._arrived: OrderedDict[bytes, None] = OrderedDict()
        self._shares: Counter[bytes] = Counter()
        """Number of them by sampler."""
        self._accepted_unseen: OrderedDict[bytes, None] = OrderedDict()
        """Groups that were accepted and have not arrived."""
        self._turn = trio.Lock()

    async def follow(self) -> None:
        """Receive groups, receipts and inventories until cancelled."""
        run = self._run.id
        async with (
            self._network.subscribe(topics.topic(run, topics.GROUPS), self._validate) as groups,
            self._network.subscribe(
                topics.topic(run, topics.RECEIPTS), partial(validate_receipt, self._run)
            ) as receipts,
            self._network.subscribe(
                topics.topic(run, topics.INVENTORIES), partial(validate_inventories, self._run)
            ) as inventories,
            trio.open_nursery() as nursery,
        ):
            nursery.start_soon(self._receive_inventories, inventories)
            nursery.start_soon(self._receive_groups, groups)
            nursery.start_soon(self._receive_receipts, receipts)

    def bytes_of(self, group: bytes) -> bytes | None:
        """Take the bytes of a group that arrived and has no receipt."""
        envelope = self._forget(group)
        return envelope.sealed if envelope else None

    # Groups

    def _validate(self, message: Message) -> Validation:
        self._restore_heads()
        validation, _ = self._validator.validate(message)
        return validation

    async def _receive_groups(self, groups: Subscription[Message]) -> None:
        async for message in groups:
            here = self._validator.take(message.data)
            await self._receive(each for each in here if is_group(each))

    async def _receive_inventories(self, inventories: Subscription[Message]) -> None:
        """Fetch groups that the leader took and that gossip did not bring."""
        async for message in inventories:
            envelope = Envelope.parse(message.data)
            leader = self._store.follower.leader
            if envelope.kind != Inventory.KIND or envelope.signer != leader:
                continue
            await trio.sleep(GOSSIP_SECONDS)
            listed = envelope.claim(Inventory, self._run.id).ids()  # the validator checked the signature
            if missing := [group for group in listed if group not in self._arrived]:
                await self._receive(await fetch_listed(self._network, self._run, leader, missing))

    async def _receive(self, envelopes: Iterable[Envelope]) -> None:
        self._restore_heads()
        accepted = []
        # A batch may mix members and strangers, whose groups must not take room.
        signed = [each for each in envelopes if self._admission.is_signed(each)]
        if self._saw is not None:
            await self._saw({envelope.id: envelope.signer for envelope in signed})
        for envelope in signed:
            self._arrived[envelope.id] = None
            if envelope.id in self._accepted_unseen:
                del self._accepted_unseen[envelope.id]
                accepted.append(envelope)
            else:
                self._remember(envelope)
        while len(self._arrived) > ARRIVED:
            self._arrived.popitem(last=False)
        await self._keep(accepted)

    def _remember(self, envelope: Envelope) -> None:
        """Keep a group until its receipt comes; the sampler with most groups gives way."""
        if envelope.id not in self._unconfirmed:
            self._unconfirmed[envelope.id] = envelope
            self._unconfirmed_bytes += len(envelope.sealed)
            self._shares[envelope.signer] += 1
        while len(self._unconfirmed) > self._room or self._unconfirmed_bytes > UNCONFIRMED_BYTES:
            largest = max(self._shares, key=lambda signer: self._shares[signer])
            self._forget(next(each.id for each in self._unconfirmed.values() if each.signer == largest))

    def _forget(self, group: bytes) -> Envelope | None:
        envelope = self._unconfirmed.pop(group, None)
        if envelope is not None:
            self._unconfirmed_bytes -= len(envelope.sealed)
            self._shares[envelope.signer] -= 1
            self._shares += Counter()  # drops zero counts
        return envelope

    # Receipts

    async def _receive_receipts(self, receipts: Subscription[Message]) -> None:
        async for message in receipts:
            receipt = open_sealed(message.data, Receipt, self._run.id)
            if receipt.signer == self._store.follower.leader:
                self._restore_heads()
                await self._keep(self._accepted(receipt.message.accepted_ids()))
                await self._drop(dict(receipt.message.refused_ids()))

    def _accepted(self, ids: Iterable[bytes]) -> list[Envelope]:
        """Return the accepted groups that arrived. The others are waited for."""
        found = []
        for group in ids:
            if (envelope := self._forget(group)) is not None:
                found.append(envelope)
            else:
                self._accepted_unseen[group] = None
        while len(self._accepted_unseen) > MOST_NAMED:
            self._accepted_unseen.popitem(last=False)
        return found

    async def _drop(self, refused: dict[bytes, str]) -> None:
        """Drop groups that the leader refused after all."""
        for group in refused:
            self._forget(group)
        if refused:
            await self._journal.drop(refused)

    # What waits

    def _restore_heads(self) -> None:
        tip = self._store.follower.tip
        if tip is not None and tip is not self._tip:
            known, _ = restore_heads(self._admission, self._store, tip, self._bound)
            self._tip = tip if tip.id in known else self._tip  # else its roster is not here yet

    async def _keep(self, groups: list[Envelope]) -> None:
        """Write groups that the leader accepted to the journal, as far as there is room."""
        if not groups or self._tip is None:
            return
        async with self._turn:
            judged = await self._admission.judge_all(groups)
            waiting = await self._journal.expire(self._tip.message.step - self._bound)
            good = [each for each in judged if isinstance(each, RolloutRecord)][
                : max(0, self._room - waiting)
            ]
            await self._journal.keep(good)
        if len(good) < len(groups):
            log.info("%d groups that the leader accepted are not kept here", len(groups) - len(good))
