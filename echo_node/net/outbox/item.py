"""What must arrive: bytes for a topic, under a name. Outbox and arrivals keep it; neither knows what it means."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from echo_node.errors import DefectError, boundary
from protocol import Delivery, limits
from protocol.digest import DIGEST_BYTES

LONGEST: Final = limits.GOSSIP_BYTES - 16
"""Bytes of one item: with the headers of a batch around it, it must still go into one gossip message."""


@dataclass(frozen=True, slots=True)
class Item:
    """A sealed message. Its id names it in receipts, and is the same however often it is sent."""

    id: bytes
    topic: str
    data: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if type(self.id) is not bytes or len(self.id) != DIGEST_BYTES:
            raise DefectError(f"an item is named by {DIGEST_BYTES} bytes")
        if type(self.data) is not bytes or not 1 <= len(self.data) <= LONGEST:
            raise DefectError(
                f"an item has 1 to {LONGEST} bytes", advice="send a reference to what is longer"
            )
        with boundary(DefectError, "an item for a topic"):
            Delivery.on(self.topic, self.data)
