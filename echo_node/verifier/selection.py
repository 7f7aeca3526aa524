"""Random selection of the groups that a verifier checks, by verifiable draws.

A draw is a signature: nobody can foresee it and everybody can check it. All groups of a newcomer
are checked, fewer as it earns trust. What a group claims, such as equal rewards, never lowers its
chance. Under the quorum policy every group is checked. Newcomers together get a tenth of the
checks, so that a crowd of new keys does not shield a cheat. Where another verifier condemns a
group, all of its sampler's are checked for a while, and that one too if it is still here.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import Final

from echo_node.rollouts.record import RolloutRecord
from echo_node.runtime.reputation import NEWCOMER, Trust
from protocol import Identity
from protocol.verdict import drawn, sign_draw

WAITING: Final = 256
"""Groups that wait to be checked, per queue; beyond that the oldest are dropped."""
NEWCOMERS_SHARE: Final = 10
"""One check in this many is for a newcomer, while others wait too."""


CLOSE_LOOKS: Final = 16
"""Groups found honest here that end a closer look at a sampler which another verifier accused."""
OVERTURNS: Final = 3
"""Condemned groups of another verifier that were found honest here before it is not followed."""
RECENT: Final = 512
"""Newest groups of which a condemned one can still be checked."""
RECENT_BYTES: Final = 16 << 20
"""Most sealed bytes of them."""
ACCUSED: Final = 4_096
"""Most samplers that are looked at closer; the oldest accusations are forgotten first."""


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
        self._recent: OrderedDict[bytes, RolloutRecord] = OrderedDict()
        self._recent_bytes = 0
        self._accused: OrderedDict[bytes, int] = OrderedDict()
        """Samplers that other verifiers condemned: groups still to be found honest."""
        self._contested: OrderedDict[bytes, bytes] = OrderedDict()
        """Condemned groups that are checked again here, and who condemned them."""
        self._overturned: Counter[bytes] = Counter()
        self.passed_over = 0
        """Groups that were drawn and never checked, for lack of time."""

    def __len__(self) -> int:
        return len(self._known) + len(self._new)

    def offer(self, admitted: RolloutRecord, now: float) -> bool:
        """Draw whether to check a group; return True if it was queued."""
        sampler = admitted.sampler
        if self._trust.is_muted(sampler, now):
            return False  # trainers refuse it anyway
        self._keep_recent(admitted)
        draw = sign_draw(self._identity, self._run, admitted.id)
        every = self._every or sampler in self._accused
        if not drawn(draw, 1.0 if every else self._trust.rate(sampler, now)):
            return False
        self._put(admitted, draw, now)
        return True

    def accuse(self, group: bytes, verifier: bytes, now: float) -> bool:
        """Look closer at the sampler of a group that another verifier condemned.

        Return whether the group itself was queued for a check.
        """
        admitted = self._recent.get(group)
        if admitted is None or self._overturned[verifier] >= OVERTURNS:
            return False
        sampler = admitted.sampler
        self._accused[sampler] = CLOSE_LOOKS
        self._accused.move_to_end(sampler)
        if len(self._accused) > ACCUSED:
            self._accused.popitem(last=False)
        if self._trust.is_muted(sampler, now) or group in self._contested:
            return False
        self._contested[group] = verifier
        if len(self._contested) > RECENT:
            self._contested.popitem(last=False)
        self._put(admitted, sign_draw(self._identity, self._run, group), now)
        return True

    def acquit(self, admitted: RolloutRecord) -> None:
        """Record a group that was found honest here."""
        if (verifier := self._contested.pop(admitted.id, None)) is not None:
            self._overturned[verifier] += 1
        if (left := self._accused.get(admitted.sampler)) is not None:
            self._accused[admitted.sampler] = left - 1
            if left <= 1:
                del self._accused[admitted.sampler]

    def _keep_recent(self, admitted: RolloutRecord) -> None:
        self._recent[admitted.id] = admitted
        self._recent_bytes += len(admitted.sealed or b"")
        while len(self._recent) > RECENT or self._recent_bytes > RECENT_BYTES:
            _, gone = self._recent.popitem(last=False)
            self._recent_bytes -= len(gone.sealed or b"")

    def _put(self, admitted: RolloutRecord, draw: bytes, now: float) -> None:
        is_new = self._trust.level(admitted.sampler, now) < NEWCOMER / (2 * NEWCOMER)
        queue = self._new if is_new else self._known
        queue[admitted.id] = (admitted, draw)
        if len(queue) > WAITING:
            queue.popitem(last=False)
            self.passed_over += 1

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
