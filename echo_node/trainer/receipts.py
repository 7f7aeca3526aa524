"""What the trainer tells samplers of their groups: taken or refused, and how fast more is wanted.

Answers are gathered and go out together, since the network carries few messages a second.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Final

import trio

from echo_node.net.base import Network
from protocol import Identity, Opened, Receipt, Refusal, WeightsHead, limits, seal, topics

EVERY_SECONDS = 0.1
MOST_WAITING: Final = 16 * limits.RECEIPT_IDS
"""Refusals that wait to be sent, and accepted groups that are remembered."""


class Receipts:
    """Answers that wait to be sent. `tip` tells the newest head, which every receipt names."""

    def __init__(
        self, network: Network, identity: Identity, run: bytes, tip: Callable[[], Opened[WeightsHead] | None]
    ) -> None:
        self._network = network
        self._identity = identity
        self._run = run
        self._tip = tip
        self._accepted: dict[bytes, None] = {}
        self._refused: dict[bytes, str] = {}
        self._taken: dict[bytes, None] = {}
        """The newest of all groups that were accepted: a copy that comes later, or is forged, does not undo it."""
        self.rate: float | None = None
        """Groups a second that are wanted of each sampler; none: as many as there are."""

    def accept(self, group: bytes) -> None:
        self._refused.pop(group, None)
        self._accepted[group] = self._taken[group] = None
        if len(self._taken) > MOST_WAITING:
            del self._taken[next(iter(self._taken))]

    def refuse(self, group: bytes, reason: str) -> None:
        if group in self._taken or group in self._accepted:
            self._accepted[group] = None
        elif group in self._refused or len(self._refused) < MOST_WAITING:
            self._refused[group] = reason

    async def send_now_and_then(self) -> None:
        """Send what has gathered, again and again."""
        while True:
            await trio.sleep(EVERY_SECONDS)
            await self.send()

    async def send(self) -> None:
        """Send what has gathered, in as many messages as it takes."""
        tip = self._tip()
        while tip is not None and (self._accepted or self._refused):
            accepted = list(itertools.islice(self._accepted, limits.RECEIPT_IDS))
            for group in accepted:
                del self._accepted[group]
            receipt = Receipt(
                accepted=b"".join(accepted),
                head=tip.id,
                rate=self.rate,
                refused=self._take_refusals(limits.RECEIPT_IDS - len(accepted)),
                term=tip.message.term,
                version=tip.message.version,
            )
            sealed = seal(receipt, self._identity, self._run)
            await self._network.publish(topics.topic(self._run, topics.RECEIPTS), sealed)

    def _take_refusals(self, room: int) -> tuple[Refusal, ...]:
        """As many refusals as there is room for, by reason."""
        by_reason: dict[str, bytes] = {}
        for group in list(itertools.islice(self._refused, room)):
            reason = self._refused.pop(group)
            by_reason[reason] = by_reason.get(reason, b"") + group
        return tuple(Refusal(reason, by_reason[reason]) for reason in sorted(by_reason))
