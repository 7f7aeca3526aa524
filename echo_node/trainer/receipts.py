"""What the trainer tells samplers of their groups: taken or refused, and how fast more is wanted.

Answers are gathered and go out together, since the network carries few messages a second.
"""

from __future__ import annotations

from collections.abc import Callable

import trio

from echo_node.net.base import Network
from protocol import Identity, Opened, Receipt, Refusal, WeightsHead, limits, seal, topics

EVERY_SECONDS = 0.1


class Receipts:
    """Answers that wait to be sent. `tip` tells the newest head, which every receipt names."""

    def __init__(
        self, network: Network, identity: Identity, run: bytes, tip: Callable[[], Opened[WeightsHead] | None]
    ) -> None:
        self._network = network
        self._identity = identity
        self._run = run
        self._tip = tip
        self._accepted: list[bytes] = []
        self._refused: dict[bytes, str] = {}
        self.rate: float | None = None
        """Groups a second that are wanted of each sampler; none: as many as there are."""

    def accept(self, group: bytes) -> None:
        self._accepted.append(group)

    def refuse(self, group: bytes, reason: str) -> None:
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
            accepted, self._accepted = (
                self._accepted[: limits.RECEIPT_IDS],
                self._accepted[limits.RECEIPT_IDS :],
            )
            receipt = Receipt(
                accepted=b"".join(dict.fromkeys(accepted)),
                head=tip.id,
                rate=self.rate,
                refused=self._take_refusals(limits.RECEIPT_IDS - len(accepted), set(accepted)),
                term=tip.message.term,
                version=tip.message.version,
            )
            sealed = seal(receipt, self._identity, self._run)
            await self._network.publish(topics.topic(self._run, topics.RECEIPTS), sealed)

    def _take_refusals(self, room: int, accepted: set[bytes]) -> tuple[Refusal, ...]:
        """As many refusals as there is room for, by reason. What was accepted once is not refused as a duplicate."""
        taken = list(self._refused.items())[:room]
        for group, _ in taken:
            del self._refused[group]
        by_reason: dict[str, bytes] = {}
        for group, reason in taken:
            if group not in accepted:
                by_reason[reason] = by_reason.get(reason, b"") + group
        return tuple(Refusal(reason, by_reason[reason]) for reason in sorted(by_reason))
