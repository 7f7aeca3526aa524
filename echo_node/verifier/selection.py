"""Random selection of the groups that a verifier checks, by verifiable draws.

A draw is a signature: nobody can foresee it and everybody can check it. All groups of a newcomer
are checked, fewer as it earns trust. What a group claims, such as equal rewards, never lowers its
chance. Under the quorum policy every group is checked. Newcomers together get a tenth of the
checks, so that a crowd of new keys does not shield a cheat.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from echo_node.rollouts.record import RolloutRecord
from echo_node.runtime.reputation import NEWCOMER, Trust
from protocol import Identity
from protocol.verdict import drawn, sign_draw

WAITING: Final = 256
"""Groups that wait to be checked, per queue; beyond that the oldest are dropped."""
NEWCOMERS_SHARE: Final = 10
"""One check in this many is for a newcomer, while others wait too."""


class Selection:
    """Queue of the groups drawn for a check; `every` draws all of them."""

    def __init__(self, run: bytes, identity: Identity, trust: Trust, *, every: bool = False) -> None:
        self._run = run
        self._identity = identity
        self._trust = trust
        self._every = every
        self._known: OrderedDict[bytes, tuple[RolloutRecord, bytes]] = OrderedDict()
        self._new: OrderedDict[bytes, tuple[RolloutRecord, bytes]] = OrderedDict()
        self._turn = 0
        self.passed_over = 0
        """Groups that were drawn and never checked, for lack of time."""

    def __len__(self) -> int:
        return len(self._known) + len(self._new)

    def offer(self, admitted: RolloutRecord, now: float) -> bool:
        """Draw whether to check a group; return True if it was queued."""
        group, sampler = admitted, admitted.sampler
        if self._trust.is_muted(sampler, now):
            return False  # trainers refuse it anyway
        draw = sign_draw(self._identity, self._run, group.id)
        rate = 1.0 if self._every else self._trust.rate(sampler, now)
        if not drawn(draw, rate):
            return False
        queue = self._new if self._trust.level(sampler, now) < NEWCOMER / (2 * NEWCOMER) else self._known
        queue[group.id] = (admitted, draw)
        if len(queue) > WAITING:
            queue.popitem(last=False)
            self.passed_over += 1
        return True

    def forget(self, sampler: bytes) -> None:
        """Drop the queued groups of a condemned sampler, which is muted now."""
        for queue in (self._known, self._new):
            for group in [key for key, (admitted, _) in queue.items() if admitted.sampler == sampler]:
                del queue[group]

    def next(self) -> tuple[RolloutRecord, bytes] | None:
        """Return the next group to check and its draw, or None if the queues are empty."""
        self._turn += 1
        first, second = (self._known, self._new) if self._turn % NEWCOMERS_SHARE else (self._new, self._known)
        for queue in (first, second):
            if queue:
                return queue.popitem(last=False)[1]
        return None
