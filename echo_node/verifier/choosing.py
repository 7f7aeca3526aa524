"""Which groups are looked at: by lots that nobody can foresee and everybody can check, more of those that weigh more.

All of a newcomer's, fewer as it earns trust; none that teach nothing. Where a run uses no group without a quorum's word, all
of everybody's. Newcomers together get a tenth of the time, so that a crowd of new names does not shield a cheat. It knows no
model and no network.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from echo_node.admission import Admitted
from echo_node.trust import NEWCOMER, Trust
from protocol import Identity
from protocol.verdict import drawn, sign_draw

WAITING: Final = 256
"""Groups that wait to be looked at; beyond that the oldest are left."""
NEWCOMERS_SHARE: Final = 10
"""One look in so many is for a newcomer, while others wait too."""


class Choosing:
    """The groups that one verifier has drawn and not yet looked at. With `every` it draws all of them."""

    def __init__(self, run: bytes, identity: Identity, trust: Trust, *, every: bool = False) -> None:
        self._run = run
        self._identity = identity
        self._trust = trust
        self._every = every
        self._known: OrderedDict[bytes, tuple[Admitted, bytes]] = OrderedDict()
        self._new: OrderedDict[bytes, tuple[Admitted, bytes]] = OrderedDict()
        self._turn = 0
        self.passed_over = 0
        """Groups that were drawn, and left for want of time."""

    def __len__(self) -> int:
        return len(self._known) + len(self._new)

    def offer(self, admitted: Admitted, now: float) -> bool:
        """Draw the lot of a group. Whether it will be looked at."""
        group, sampler = admitted.group, admitted.group.signer
        rewards = group.message.rewards
        if self._trust.is_muted(sampler, now):
            return False  # nobody hears it
        if min(rewards) == max(rewards) and not self._every:
            return False  # it teaches nothing, by what it claims
        lot = sign_draw(self._identity, self._run, group.id)
        rate = 1.0 if self._every else self._trust.rate(sampler, now)
        if not drawn(lot, rate):
            return False
        queue = self._new if self._trust.level(sampler, now) < NEWCOMER / (2 * NEWCOMER) else self._known
        queue[group.id] = (admitted, lot)
        if len(queue) > WAITING:
            queue.popitem(last=False)
            self.passed_over += 1
        return True

    def forget(self, sampler: bytes) -> None:
        """It was condemned, and nobody hears it now: the time for what it has waiting is others'."""
        for queue in (self._known, self._new):
            for group in [key for key, (admitted, _) in queue.items() if admitted.group.signer == sampler]:
                del queue[group]

    def next(self) -> tuple[Admitted, bytes] | None:
        """The group whose turn it is, and its lot."""
        self._turn += 1
        first, second = (self._known, self._new) if self._turn % NEWCOMERS_SHARE else (self._new, self._known)
        for queue in (first, second):
            if queue:
                return queue.popitem(last=False)[1]
        return None
