"""Whose word counts before a group is used, and what follows from it: the verdict policy of the manifest.

`self`: the trainer looks at a share itself, if it was given something to look with. `quorum`: a group needs so many honest
verdicts. `sampled`: what nobody vouches for is at most a share of a batch. A dishonest verdict condemns a group; two
verifiers' (or the only one's, or the trainer's own look) mute its sampler. It knows no network and no model.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

from echo_node.admission import Admitted
from echo_node.run import Run
from echo_node.trainer.choosing import Entrance, Entry
from echo_node.trainer.journal import Finding
from echo_node.trust import NEWCOMER, Trust
from protocol import Identity, Opened, ProtocolError, Verdict, peer_id
from protocol.verdict import check_draw, drawn, sign_draw

log = logging.getLogger(__name__)
GROUPS_REMEMBERED: Final = 65_536
"""Groups whose verdicts and samplers are known; older ones are long past use."""
NEWCOMERS_SHARE: Final = 10
"""One group of a batch in so many may be a newcomer's, while others suffice."""
LONGEST_UNVOUCHED: Final = 60.0
"""Seconds that a group is kept for a verdict, when there is no room for others."""
CONDEMNING: Final = 2
"""Verifiers who mute a sampler together."""

_GRAVITY: Final = ("undecided", "honest", "dishonest")

Check = Callable[[Admitted], str | None]
"""Looks at a group with a model: what is wrong with it, or nothing. It takes a while and runs in a thread."""


@dataclass(frozen=True, slots=True)
class Consequences:
    """What a finding changes: groups that may not be used, and samplers that are no longer heard."""

    condemned: frozenset[bytes] = frozenset()
    muted: frozenset[bytes] = frozenset()


@dataclass(slots=True)
class _Known:
    """What is known of one group."""

    sampler: bytes = b""
    findings: dict[bytes, Finding] = field(default_factory=dict)
    """By verifier."""
    used: bool = False
    order: int = 0
    """Of arrival."""
    since: float = 0.0

    def by(self, result: str) -> set[bytes]:
        return {key for key, found in self.findings.items() if found.result == result}


class VerdictPolicy(Entry):
    """What one run's manifest says of verification, applied. `check` is the trainer's own look at a group."""

    def __init__(
        self,
        run: Run,
        identity: Identity,
        *,
        check: Check | None = None,
        trust: Trust | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        told = run.told.verification
        self._run = run.id
        self._identity = identity
        self._verifiers = frozenset(run.told.verifiers)
        self._policy, self._quorum, self._share = told.policy, told.quorum, told.share
        self._check = check
        self._clock = clock
        self._known: OrderedDict[bytes, _Known] = OrderedDict()
        self._arrivals = 0
        self._reached: dict[bytes, dict[bytes, int]] = {}
        """The newest group of each sampler that each verifier has looked at, by its order."""
        self._accusers: dict[bytes, set[bytes]] = {}
        """Of samplers, since they were last muted."""
        self.trust = trust or Trust()
        self.used_condemned = 0
        """Groups that were condemned after they had been trained on."""
        self.counts: Counter[str] = Counter()
        """Findings that were taken, by result; and those that were not, by why not."""

    # What may go into a batch

    @property
    def is_hard(self) -> bool:
        return self._policy == "sampled"

    def entrance(self, group: Admitted) -> Entrance:
        known = self._known.get(group.group.id) or _Known()
        honest = len(known.by("honest") - {self._identity.public})
        if self._policy == "quorum":
            return Entrance.OPEN if honest >= self._quorum else Entrance.CLOSED
        if honest or not self._verifies or self._is_proven(group.group.signer):
            return Entrance.OPEN
        return Entrance.BOUNDED

    def bound(self, batch: int) -> int:
        if self._policy == "sampled":
            return int(self._share * batch)
        return max(1, batch // NEWCOMERS_SHARE)

    def gives_way(self, group: Admitted) -> bool:
        if self.entrance(group) is Entrance.OPEN:
            return False
        known = self._known.get(group.group.id)
        return known is None or self._is_passed_over(known) or self._clock() - known.since > LONGEST_UNVOUCHED

    def awaits(self, group: Admitted) -> bool:
        """Whether a verdict may still let in a group that may not go in yet. What teaches nothing, by what it claims, is
        looked at only where a quorum must vouch for everything.
        """
        known, rewards = self._known.get(group.group.id), group.group.message.rewards
        teaches = self._policy == "quorum" or min(rewards) < max(rewards)
        return known is not None and teaches and not self._is_passed_over(known)

    def _is_passed_over(self, known: _Known) -> bool:
        """Verifiers look at one sampler's groups in their order: what they have passed over they do not come back to."""
        enough = self._quorum if self._policy == "quorum" else 1
        return sum(known.order <= at for at in self._reached.get(known.sampler, {}).values()) >= enough

    def is_muted(self, sampler: bytes) -> bool:
        return self.trust.is_muted(sampler, self._clock())

    def muted(self) -> dict[bytes, str]:
        """Samplers that are not heard now, and what for."""
        return self.trust.muted(self._clock())

    def is_condemned(self, group: bytes) -> bool:
        known = self._known.get(group)
        return known is not None and bool(known.by("dishonest"))

    @property
    def _verifies(self) -> bool:
        """Whether anybody looks at groups at all: else a newcomer stays one for ever, and there is nothing to bound."""
        return self._policy == "sampled" or (self._check is not None and self._share > 0)

    def _is_proven(self, sampler: bytes) -> bool:
        return self.trust.level(sampler, self._clock()) >= 0.5

    # What is heard

    def saw(self, group: bytes, sampler: bytes) -> Consequences:
        """A group has come. A verdict may have come before it."""
        known = self._remember(group)
        if known.sampler:
            return Consequences()
        known.sampler = sampler
        self._arrivals += 1
        known.order, known.since = self._arrivals, self._clock()
        told = Consequences()
        for found in list(known.findings.values()):
            told = _both(told, self._weigh(group, known, found))
        return told

    def used(self, groups: Iterable[bytes]) -> None:
        """These were trained on."""
        for group in groups:
            self._remember(group).used = True

    def read(self, verdict: Opened[Verdict]) -> Finding | None:
        """What a verdict says, if it is one of the run's verifiers' and of a group that fell to it by lot."""
        told = verdict.message
        if verdict.signer not in self._verifiers:
            self.counts["not-a-verifier"] += 1
            return None
        try:
            check_draw(verdict.signer, self._run, told.group, told.draw)
        except ProtocolError:
            self.counts["wrong-draw"] += 1
            return None
        known = self._known.get(told.group)
        sampler = known.sampler if known else b""
        return Finding(told.group, sampler, verdict.signer, told.result, told.reason, self._clock())

    def take(self, found: Finding) -> Consequences:
        """Let a finding count, once. Of a verifier that says several things of one group the gravest counts."""
        known = self._remember(found.group)
        before = known.findings.get(found.verifier)
        if before is not None and _GRAVITY.index(before.result) >= _GRAVITY.index(found.result):
            return Consequences()
        known.findings[found.verifier] = found
        known.sampler = known.sampler or found.sampler
        self.counts[found.result] += 1
        return self._weigh(found.group, known, found) if known.sampler else Consequences()

    # The trainer's own look

    def wants_to_check(self, group: Admitted) -> bool:
        """Whether the trainer looks at this group itself: by lot, all of a newcomer's, and at least its share of others."""
        if self._check is None or self._policy != "self" or self._share <= 0:
            return False
        rate = max(self._share, self.trust.rate(group.group.signer, self._clock()))
        return drawn(sign_draw(self._identity, self._run, group.group.id), rate)

    def check(self, group: Admitted) -> Finding:
        """Look at a group. In a thread; `take` what comes of it."""
        wrong = self._check(group) if self._check is not None else None
        result = "honest" if wrong is None else "dishonest"
        return Finding(
            group.group.id,
            group.group.signer,
            self._identity.public,
            result,
            wrong or "honest",
            self._clock(),
        )

    # Inside

    def _weigh(self, group: bytes, known: _Known, found: Finding) -> Consequences:
        reached = self._reached.setdefault(known.sampler, {})
        reached[found.verifier] = max(reached.get(found.verifier, 0), known.order)
        if found.result == "honest":
            self.trust.honest(known.sampler, found.at)
            return Consequences()
        if found.result != "dishonest":
            return Consequences()
        if known.used and len(known.by("dishonest")) == 1:
            self.used_condemned += 1
        return Consequences(frozenset((group,)), self._accuse(known.sampler, found))

    def _accuse(self, sampler: bytes, found: Finding) -> frozenset[bytes]:
        accusers = self._accusers.setdefault(sampler, set())
        accusers.add(found.verifier)
        enough = min(CONDEMNING, len(self._verifiers))
        if found.verifier != self._identity.public and len(accusers) < enough:
            return frozenset()
        del self._accusers[sampler]
        if self.trust.is_muted(sampler, found.at):
            return frozenset()
        self.trust.condemned(sampler, found.reason, found.at)
        log.warning("sampler %s is muted: %s", peer_id(sampler), found.reason)
        return frozenset((sampler,))

    def _remember(self, group: bytes) -> _Known:
        known = self._known.setdefault(group, _Known())
        if len(self._known) > GROUPS_REMEMBERED:
            self._known.popitem(last=False)
        return known


def _both(one: Consequences, other: Consequences) -> Consequences:
    return Consequences(one.condemned | other.condemned, one.muted | other.muted)


__all__ = ["NEWCOMER", "Check", "Consequences", "VerdictPolicy"]
