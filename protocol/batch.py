"""Batch: several sealed messages in one gossip message, as a plain array.

The network carries few messages a second but many bytes, so whatever is small and frequent (groups,
verdicts) travels as many as fit.
"""

from __future__ import annotations

from collections.abc import Sequence

from protocol import canonical, limits
from protocol.envelope import Envelope
from protocol.errors import OutOfRangeError, ProtocolError, TooLargeError, WrongTypeError


def read_batch(data: bytes, *, most: int = limits.GOSSIP_BYTES) -> tuple[Envelope, ...]:
    """Parse the sealed messages of a gossip message or an answer, unopened.

    Each may have its own fault.
    """
    items = canonical.decode(data, most=most)
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


def write_batch(sealed: Sequence[bytes], *, most: int = limits.GOSSIP_BYTES) -> bytes:
    """Encode sealed messages as one gossip message or answer.

    They must fit (`fill_batches`).
    """
    data = canonical.pack(list(sealed))
    if not 1 <= len(sealed) <= limits.BATCH or len(data) > most:
        raise TooLargeError(f"{len(sealed)} messages, {len(data)} bytes, at most {most}", "batch")
    return data


def fill_batches(sealed: Sequence[bytes]) -> list[bytes]:
    """Pack sealed messages, in order, into as few gossip messages as possible."""
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
