"""What the trainer tells samplers of their groups: taken or refused, and how fast more is wanted.

Answers are gathered and go out together, since the network carries few messages a second.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Final

import trio

from echo_node.net.base import Network
from protocol import Identity, Opened, Receipt, Refusal, WeightsHead, limits, seal, topics

EVERY_SECONDS = 0.1
MOST_WAITING: Final = 16 * limits.RECEIPT_IDS
"""Refusals that wait to be sent, and accepted groups that are remembered."""
_SAME_RATE: Final = 0.75
"""Rates that are no further apart than this are not worth a message of their own."""


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
        self._said: float | None = None
        """The rate that was sent last."""

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

    def has_taken(self, group: bytes) -> bool:
        """Whether a group was accepted, as far back as is remembered."""
        return group in self._taken

    def remember(self, groups: Iterable[bytes]) -> None:
        """These were accepted before this process began."""
        for group in groups:
            self._taken[group] = None
        while len(self._taken) > MOST_WAITING:
            del self._taken[next(iter(self._taken))]

    def withdraw(self, group: bytes, reason: str) -> None:
        """A group that was accepted is not used after all: something came to light."""
        self._accepted.pop(group, None)
        self._taken.pop(group, None)
        self.refuse(group, reason)

    def answer(self, groups: Iterable[bytes]) -> bytes:
        """What became of these groups, for who delivered them by hand: a sealed receipt; nothing, if nothing is known yet."""
        known = dict.fromkeys(groups)
        accepted = [group for group in known if group in self._taken][: limits.RECEIPT_IDS]
        refused: dict[str, bytes] = {}
        for group in [each for each in known if each in self._refused][: limits.RECEIPT_IDS - len(accepted)]:
            reason = self._refused[group]
            refused[reason] = refused.get(reason, b"") + group
        tip = self._tip()
        if tip is None or not (accepted or refused):
            return b""
        return self._sealed(
            tip, accepted, tuple(Refusal(reason, refused[reason]) for reason in sorted(refused))
        )

    async def send_now_and_then(self) -> None:
        """Send what has gathered, again and again."""
        while True:
            await trio.sleep(EVERY_SECONDS)
            await self.send()

    async def send(self) -> None:
        """Send what has gathered, in as many messages as it takes. Another rate is news too: who waits must hear of it."""
        tip = self._tip()
        while tip is not None and (self._accepted or self._refused or self._is_another_rate()):
            accepted = list(itertools.islice(self._accepted, limits.RECEIPT_IDS))
            for group in accepted:
                del self._accepted[group]
            refused = self._take_refusals(limits.RECEIPT_IDS - len(accepted))
            sealed = self._sealed(tip, accepted, refused)
            self._said = self.rate
            await self._network.publish(topics.topic(self._run, topics.RECEIPTS), sealed)

    def _is_another_rate(self) -> bool:
        """Whether the rate has moved enough to be told."""
        if self.rate is None or self._said is None:
            return self.rate is not self._said
        return not _SAME_RATE * self._said <= self.rate <= self._said / _SAME_RATE

    def _sealed(
        self, tip: Opened[WeightsHead], accepted: Iterable[bytes], refused: tuple[Refusal, ...]
    ) -> bytes:
        receipt = Receipt(
            accepted=b"".join(accepted),
            head=tip.id,
            rate=self.rate,
            refused=refused,
            term=tip.message.term,
            version=tip.message.version,
        )
        return seal(receipt, self._identity, self._run)

    def _take_refusals(self, room: int) -> tuple[Refusal, ...]:
        """As many refusals as there is room for, by reason."""
        by_reason: dict[str, bytes] = {}
        for group in list(itertools.islice(self._refused, room)):
            reason = self._refused.pop(group)
            by_reason[reason] = by_reason.get(reason, b"") + group
        return tuple(Refusal(reason, by_reason[reason]) for reason in sorted(by_reason))
