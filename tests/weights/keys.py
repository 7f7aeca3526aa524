"""Who is who in the tests of weights, and the rules of their run."""

from __future__ import annotations

import itertools

from echo_node.weights.tensors import layout_of, root_of
from protocol import Identity, Roster, Rules, blob_id, encode

RUN = b"r" * 32
LEADER, FOLLOWER, STRANGER = (Identity(bytes([n]) * 32) for n in (1, 2, 3))
NOBODY = Roster(())


def rules_of(first, *, leader: Identity = LEADER, run: bytes = RUN) -> Rules:
    """A run that begins with this state."""
    layout = blob_id(encode(layout_of(first)))
    return Rules(run, layout, root_of(first), (leader.public,), (leader.public,))


def counting(start: int = 0):
    """Luck that can be repeated."""
    numbers = itertools.count(start)
    return lambda: next(numbers).to_bytes(32)
