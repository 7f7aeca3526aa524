"""Inventories: list every group taken, and track which verifiers saw it.

A group comes through many doors: gossip, a delivery, a reference, an answer, the journal. Whatever
the door, it is listed here, since only what a verifier could draw lots over may be used on trust.
A group is listed again, at growing intervals, for every verifier that is there and has not
acknowledged it: as long as it waits if nobody has, a bounded number of times otherwise.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import dataclass
from functools import partial
from typing import Final

import trio

from echo_node.errors import PeerError
from echo_node.net.base import Network
from echo_node.rollouts.gossip_validation import validate_inventories
from echo_node.rollouts.record import RolloutRecord
from echo_node.rollouts.taken_groups import TakenGroups
from echo_node.runs.run import Run
from echo_node.trainer.receipts import Receipts
from echo_node.trainer.replay_buffer import ReplayBuffer
from echo_node.trainer.verdict_policy import VerdictPolicy
from protocol import Envelope, Identity, Inventory, InventoryAck, limits, open_sealed, seal, topics

log = logging.getLogger(__name__)
EVERY_SECONDS: Final = 0.25
"""Seconds over which groups are collected for one inventory."""
AGAIN_SECONDS: Final = 2.0
"""Seconds before a group that nobody acknowledged is listed again; doubled each time."""
LONGEST_SECONDS: Final = 30.0
"""Upper bound in seconds of that interval."""
OUTSIDE_SECONDS: Final = 60.0
"""Seconds for which a group that is not in the buffer is listed again."""
MOST_TIMES: Final = 8
"""Most times that a group is listed which some verifier has acknowledged, for the others."""
MOST_UNSEEN: Final = 16_384
"""Most groups without an acknowledgement that are kept; the oldest are dropped first."""
MOST_PUBLISHED: Final = 256
"""Most inventories whose acknowledgements are awaited."""


@dataclass(slots=True)
class _Unseen:
    """A group that not all verifiers have acknowledged."""

    since: float
    due: float
    tries: int = 0
    seen: bool = False
    """Whether any has."""


class InventoryPublisher:
    """Publisher of a leader's inventories; idle in a run without verifiers."""

    def __init__(
        self,
        run: Run,
        network: Network,
        identity: Identity,
        policy: VerdictPolicy,
        buffer: ReplayBuffer,
        receipts: Receipts,
    ) -> None:
        self._run = run
        self._network = network
        self._identity = identity
        self._policy = policy
        self._buffer = buffer
        self._receipts = receipts
        self._is_needed = bool(run.manifest.verifiers) and run.manifest.verification.policy != "self"
        self._taken = TakenGroups(run)
        self._unseen: OrderedDict[bytes, _Unseen] = OrderedDict()
        self._published: OrderedDict[bytes, tuple[bytes, ...]] = OrderedDict()
        """Groups of the newest inventories, by the inventory's id."""
        self._number = 0

    def add(self, group: RolloutRecord) -> None:
        """List a group that was taken."""
        if not self._is_needed or group.sealed is None:
            return
        self._taken.add(group.id, group.sealed)
        now = trio.current_time()
        self._unseen.setdefault(group.id, _Unseen(now, now))
        while len(self._unseen) > MOST_UNSEEN:
            self._unseen.popitem(last=False)

    def discard(self, group: bytes) -> None:
        """Do not list a group that could not be kept."""
        self._unseen.pop(group, None)
        self._taken.discard(group)

    async def work(self) -> None:
        """Publish inventories, serve groups, take acknowledgements until cancelled."""
        if not self._is_needed:
            return
        with self._taken.serve(self._network):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._publish_periodically)
                nursery.start_soon(self.listen)

    async def listen(self) -> None:
        """Hear acknowledgements until cancelled."""
        topic = topics.topic(self._run.id, topics.INVENTORIES)
        async with self._network.subscribe(topic, partial(validate_inventories, self._run)) as inbox:
            async for message in inbox:
                envelope = Envelope.parse(message.data)
                if envelope.kind == InventoryAck.KIND:
                    self._hear(envelope)

    async def flush(self) -> None:
        """Publish what is due to be listed, in as few inventories as hold it."""
        now = trio.current_time()
        for group in [each for each, unseen in self._unseen.items() if self._is_past(each, unseen, now)]:
            del self._unseen[group]
        due = [group for group, unseen in self._unseen.items() if unseen.due <= now]
        tip = self._receipts.head
        if tip is None:
            return
        sealed_inventories = []
        for start in range(0, len(due), limits.INVENTORY_IDS):
            groups = tuple(due[start : start + limits.INVENTORY_IDS])
            for unseen in (self._unseen[group] for group in groups):
                unseen.due = now + min(LONGEST_SECONDS, AGAIN_SECONDS * 2.0 ** min(unseen.tries, 10))
                unseen.tries += 1
            self._number += 1
            inventory = Inventory(
                groups=b"".join(groups), head=tip.id, number=self._number, term=tip.message.term
            )
            sealed = seal(inventory, self._identity, self._run.id)
            self._policy.presence.listed(now)
            self._published[open_sealed(sealed, Inventory, self._run.id).id] = groups
            while len(self._published) > MOST_PUBLISHED:
                self._published.popitem(last=False)
            sealed_inventories.append(sealed)
        for sealed in sealed_inventories:  # all are noted as listed: another flush may come meanwhile
            try:
                await self._network.publish(topics.topic(self._run.id, topics.INVENTORIES), sealed)
            except PeerError as error:
                log.info("an inventory was not published: %s", error)

    async def _publish_periodically(self) -> None:
        while True:
            await trio.sleep(EVERY_SECONDS)
            await self.flush()
            if self._policy.presence.review(trio.current_time()):
                self._notify()

    def _is_past(self, group: bytes, unseen: _Unseen, now: float) -> bool:
        """Return whether a group that was listed waits for nothing any more."""
        if unseen.seen and unseen.tries >= MOST_TIMES:
            return True
        return unseen.tries > 0 and now - unseen.since > OUTSIDE_SECONDS and group not in self._buffer

    def _hear(self, envelope: Envelope) -> None:
        """Take in a verifier's acknowledgement of an inventory of this leader."""
        ack = envelope.claim(InventoryAck, self._run.id)  # the validator has checked the signature
        if (groups := self._published.get(ack.inventory)) is None:
            return
        lacking, drawn = {*ack.lacking_ids()}, {*ack.drawn_ids()}
        seen = [group for group in groups if group not in lacking]
        owes = self._policy.owes_verdict(seen, envelope.signer, drawn)
        self._policy.presence.acknowledged(envelope.signer, trio.current_time(), owes=owes)
        done = {*self._policy.acknowledged(seen, envelope.signer, drawn)}
        for group in seen:
            if group in done:
                self._unseen.pop(group, None)
            elif group in self._unseen:
                self._unseen[group].seen = True
        self._notify()

    def _notify(self) -> None:
        """Wake whoever waits for a batch: other groups may be drawn than before."""
        self._buffer.changed.notify()
        self._policy.changed.notify()
