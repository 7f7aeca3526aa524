"""Direct delivery of a gossip message to one named peer.

Gossip may be lost; a request is answered or fails. A delivery is not sealed, since what it carries
is.
"""

from __future__ import annotations

import re
from typing import Annotated, ClassVar, Final

from protocol import limits, topics
from protocol.errors import OutOfRangeError
from protocol.fields import Digest, blob, choice
from protocol.wire import record

_TOPIC: Final = re.compile(rf"/echo/{limits.MAJOR}/([0-9a-f]{{64}})/([a-z]+)")


@record
class Delivery:
    """Bytes of one gossip message, with the run and cargo of its topic."""

    LIMIT: ClassVar[int] = limits.DELIVERY_BYTES

    cargo: Annotated[str, choice(*topics.CARGOES)]
    data: Annotated[bytes, blob(limits.GOSSIP_BYTES, 1)]
    run: Digest

    @classmethod
    def on(cls, topic: str, data: bytes) -> Delivery:
        """Make the delivery of what would be gossiped on this topic."""
        named = _TOPIC.fullmatch(topic)
        if named is None or named[2] not in topics.CARGOES:
            raise OutOfRangeError(f"{topic[:100]!r} is not the topic of a cargo of a run", "topic")
        return cls(cargo=named[2], data=data, run=bytes.fromhex(named[1]))

    @property
    def topic(self) -> str:
        """Return the gossip topic that the data belongs to."""
        return topics.topic(self.run, self.cargo)
