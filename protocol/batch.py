"""Several sealed messages in one gossip message: a plain array, since each is sealed by itself.

The network carries few messages a second but many bytes, so whatever is small and frequent (groups, verdicts)
travels as many as fit. Knows nothing of what the messages say.
"""

from __future__ import annotations

from collections.abc import Sequence

from protocol import canonical, limits
from protocol.envelope import Envelope
from protocol.errors import OutOfRangeError, ProtocolError, TooLargeError, WrongTypeError


def read_batch(data: bytes) -> tuple[Envelope, ...]:
    """The sealed messages of one gossip message. They are parsed, not opened: each may have its own fault."""
    items = canonical.decode(data, most=limits.GOSSIP_BYTES)
    if type(items) is not list:
        raise WrongTypeError("a batch is an array of sealed messages", "batch")
    if not 1 <= len(items) <= limits.BATCH:
        raise OutOfRangeError(f"{len(items)} messages, not between 1 and {limits.BATCH}", "batch")
    envelopes = []
    for index, item in enumerate(items):
        if type(item) is not bytes:
            raise WrongTypeError("not bytes", f"batch[{index}]")
        try:
            envelopes.append(Envelope.parse(item))
        except ProtocolError as error:
            error.within(f"batch[{index}]")
            raise
    return tuple(envelopes)


def write_batch(sealed: Sequence[bytes]) -> bytes:
    """One gossip message out of sealed messages that fit (see `fill_batches`)."""
    data = canonical.pack(list(sealed))
    if not 1 <= len(sealed) <= limits.BATCH or len(data) > limits.GOSSIP_BYTES:
        raise TooLargeError(
            f"{len(sealed)} messages, {len(data)} bytes, at most {limits.GOSSIP_BYTES}", "batch"
        )
    return data


def fill_batches(sealed: Sequence[bytes]) -> list[bytes]:
    """As few gossip messages as hold these sealed messages in their order."""
    batches: list[bytes] = []
    waiting: list[bytes] = []
    size = 0
    for item in sealed:
        cost = len(item) + 5  # at most five bytes of header
        if waiting and (len(waiting) == limits.BATCH or size + cost + 5 > limits.GOSSIP_BYTES):
            batches.append(write_batch(waiting))
            waiting, size = [], 0
        waiting.append(item)
        size += cost
    if waiting:
        batches.append(write_batch(waiting))
    return batches
