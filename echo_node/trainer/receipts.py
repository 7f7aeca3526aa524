"""Receipts to samplers: groups accepted or refused, and the rate that is wanted.

Receipts are collected and sent together, since the network carries few messages a second.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Final

import trio

from echo_node.net.base import Network
from protocol import Identity, Opened, Receipt, Refusal, WeightsHead, limits, seal, topics
from protocol.digest import DIGEST_BYTES

EVERY_SECONDS = 0.1
MOST_WAITING: Final = 16 * limits.RECEIPT_IDS
"""Most refusals waiting to be sent, and most accepted groups remembered."""
_SAME_RATE: Final = 0.75
"""Ratio of two rates above which a change is not sent by itself."""


class Receipts:
    """Receipts that wait to be sent.

    Each names the newest head; none is sent before `set_head`.
    """

    def __init__(self, network: Network, identity: Identity, run: bytes) -> None:
        self._network = network
        self._identity = identity
        self._run = run
        self._head: Opened[WeightsHead] | None = None
        self._accepted: dict[bytes, None] = {}
        self._announced: dict[bytes, None] = {}
        """Announcements of slots that were taken."""
        self._refused: dict[bytes, str] = {}
        self._taken: dict[bytes, None] = {}
        """The newest accepted groups: a later or forged copy does not undo one."""
        self.rate: float | None = None
        """Groups a second that are wanted of each sampler; None: as many as there are."""
        self._sent_rate: float | None = None
        """The rate that was sent last."""

    def set_head(self, head: Opened[WeightsHead]) -> None:
        """Name this head in every receipt from now on."""
        self._head = head

    @property
    def head(self) -> Opened[WeightsHead] | None:
        """Return the head that receipts name."""
        return self._head

    def set_rate(self, rate: float | None) -> None:
        """Ask each sampler for so many groups a second; None: for as many as it has."""
        self.rate = rate

    def accept(self, group: bytes) -> None:
        self._refused.pop(group, None)
        self._accepted[group] = self._taken[group] = None
        if len(self._taken) > MOST_WAITING:
            del self._taken[next(iter(self._taken))]

    def take_announcement(self, announcement: bytes) -> None:
        """Answer a taken slot announcement, overriding the answer to a copy."""
        self._refused.pop(announcement, None)
        if len(self._announced) < MOST_WAITING:
            self._announced[announcement] = None

    def refuse(self, group: bytes, reason: str) -> None:
        if group in self._taken or group in self._accepted:
            self._accepted[group] = None
        elif group in self._announced:
            return  # an answer to it waits already, and one receipt answers once
        elif group in self._refused or len(self._refused) < MOST_WAITING:
            self._refused[group] = reason

    def has_taken(self, group: bytes) -> bool:
        """Return whether a group was accepted, as far back as is remembered."""
        return group in self._taken

    def remember(self, groups: Iterable[bytes]) -> None:
        """Mark groups as accepted before this process began."""
        for group in groups:
            self._taken[group] = None
        while len(self._taken) > MOST_WAITING:
            del self._taken[next(iter(self._taken))]

    def withdraw(self, group: bytes, reason: str) -> None:
        """Refuse a group that was accepted and is not used after all."""
        self._accepted.pop(group, None)
        self._taken.pop(group, None)
        self.refuse(group, reason)

    def answer(self, groups: Iterable[bytes], announced: Sequence[bytes] = ()) -> bytes:
        """Return a sealed receipt for delivered groups; empty, if nothing is known yet.

        `announced` are delivered announcements that were taken.
        """
        known = dict.fromkeys(groups)
        accepted = [group for group in known if group in self._taken][: limits.RECEIPT_IDS]
        refused: dict[str, bytes] = {}
        for group in [each for each in known if each in self._refused][: limits.RECEIPT_IDS - len(accepted)]:
            reason = self._refused[group]
            refused[reason] = refused.get(reason, b"") + group
        tip = self._head
        if tip is None or not (accepted or refused or announced):
            return b""
        room = limits.RECEIPT_IDS - len(accepted) - sum(map(len, refused.values())) // DIGEST_BYTES
        return self._sealed(
            tip,
            accepted,
            tuple(Refusal(reason, refused[reason]) for reason in sorted(refused)),
            [each for each in dict.fromkeys(announced) if each not in self._refused][: max(0, room)],
        )

    async def send_periodically(self) -> None:
        """Send collected receipts periodically, until cancelled."""
        while True:
            await trio.sleep(EVERY_SECONDS)
            await self.send()

    async def send(self) -> None:
        """Send collected receipts, in as few messages as hold them.

        A changed rate is sent too: idle samplers must learn of it.
        """
        tip = self._head
        while tip is not None and self._is_due():
            accepted = list(itertools.islice(self._accepted, limits.RECEIPT_IDS))
            for group in accepted:
                del self._accepted[group]
            announced = list(itertools.islice(self._announced, limits.RECEIPT_IDS - len(accepted)))
            for each in announced:
                del self._announced[each]
            refused = self._take_refusals(limits.RECEIPT_IDS - len(accepted) - len(announced))
            sealed = self._sealed(tip, accepted, refused, announced)
            self._sent_rate = self.rate
            await self._network.publish(topics.topic(self._run, topics.RECEIPTS), sealed)

    def _is_due(self) -> bool:
        return bool(self._accepted or self._announced or self._refused) or self._is_another_rate()

    def _is_another_rate(self) -> bool:
        """Return whether the rate has moved enough to be sent."""
        if self.rate is None or self._sent_rate is None:
            return self.rate is not self._sent_rate
        return not _SAME_RATE * self._sent_rate <= self.rate <= self._sent_rate / _SAME_RATE

    def _sealed(
        self,
        tip: Opened[WeightsHead],
        accepted: Iterable[bytes],
        refused: tuple[Refusal, ...],
        announced: Iterable[bytes],
    ) -> bytes:
        receipt = Receipt(
            accepted=b"".join(accepted),
            announced=b"".join(announced),
            head=tip.id,
            rate=self.rate,
            refused=refused,
            term=tip.message.term,
            version=tip.message.version,
        )
        return seal(receipt, self._identity, self._run)

    def _take_refusals(self, room: int) -> tuple[Refusal, ...]:
        """Take as many refusals as there is room for, by reason."""
        by_reason: dict[str, bytes] = {}
        for group in list(itertools.islice(self._refused, room)):
            reason = self._refused.pop(group)
            by_reason[reason] = by_reason.get(reason, b"") + group
        return tuple(Refusal(reason, by_reason[reason]) for reason in sorted(by_reason))
