"""The manifest's verdict policy: which groups may be used, and who is muted.

`self`: the trainer checks a share itself, if it was given a check. `quorum`: a group needs so many
honest verdicts. `sampled`: unverified groups are at most a share of a batch, but for those of
proven samplers, once a verifier has acknowledged the inventory that lists them; what verifiers drew
waits for their verdicts, and so do its sampler's later groups; while all verifiers are absent, the
trainer checks at least as much itself, as under `self`. A dishonest verdict condemns a group; those
of two verifiers (or of the only one, or the trainer's own check) mute its sampler.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from echo_node.net.base import Mute
from echo_node.rollouts.announced_slots import AnnouncedSlots
from echo_node.rollouts.record import RolloutRecord
from echo_node.runs.run import Run
from echo_node.runtime.change_signal import ChangeSignal
from echo_node.runtime.reputation import CLASS_IN_DOUBT, NEWCOMER, Trust
from echo_node.trainer.batch_selection import YOUNG_SHARE, Entrance, Entry
from echo_node.trainer.disputes import Disputes
from echo_node.trainer.due_verdicts import DueVerdicts
from echo_node.trainer.journal import Finding
from echo_node.trainer.share_credit import ShareCredit
from echo_node.trainer.verifier_presence import VerifierPresence
from protocol import Identity, Opened, ProtocolError, Verdict, peer_id
from protocol.verdict import check_draw, drawn, sign_draw

log = logging.getLogger(__name__)
GROUPS_REMEMBERED: Final = 65_536
"""Most groups whose verdicts and samplers are kept; older ones are too stale."""
LONGEST_UNVOUCHED: Final = 60.0
"""Seconds that a group waits for a verdict while there is no room for others."""
CONTESTED: Final = 64
"""Most condemned groups that wait for the trainer's own look; the oldest are forgotten first."""
DOUBTED: Final = 1_024
"""Most samplers in doubt that are remembered."""
CONDEMNING: Final = 2
"""Number of verifiers whose dishonest verdicts together mute a sampler."""
_GRAVITY: Final = ("undecided", "honest", "dishonest")
UNDECIDED: Final = "undecided"
"""Answer of a check that could not tell."""
Check = Callable[[RolloutRecord], str | None]
"""Check of a group with a model: what is wrong, or None, `UNDECIDED` or `CLASS_IN_DOUBT`.

It is slow: run it in a thread.
"""


@dataclass(frozen=True, slots=True)
class Consequences:
    """Effects of a finding: groups that may not be used, and samplers that are muted."""

    condemned: frozenset[bytes] = frozenset()
    muted: frozenset[bytes] = frozenset()


@dataclass(slots=True)
class _Known:
    """State of one group."""

    sampler: bytes = b""
    head: bytes = b""
    findings: dict[bytes, Finding] = field(default_factory=dict)
    """Findings by verifier."""
    seen_by: set[bytes] = field(default_factory=set)
    """Verifiers that acknowledged an inventory with this group."""
    used: bool = False
    credited: bool = False
    """Whether it has counted towards the trust in its sampler: once, whoever found it honest."""
    refuted: bool = False
    """Whether a lone verifier condemned it, and others found it honest."""
    order: int = 0
    """Order of arrival."""
    since: float = 0.0
    vouched: bool = True
    """Whether its sampler's standing may speak for it: its slot was announced before it came."""

    def by(self, result: str) -> set[bytes]:
        return {key for key, found in self.findings.items() if found.result == result}


class VerdictPolicy(Entry):
    """The verification policy of a run's manifest. `check` is the trainer's own check."""

    def __init__(
        self,
        run: Run,
        identity: Identity,
        *,
        check: Check | None = None,
        trust: Trust | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        verification = run.manifest.verification
        self._run = run.id
        self._identity = identity
        self._verifiers = frozenset(run.manifest.verifiers)
        self._policy, self._quorum, self._share = verification.policy, verification.quorum, verification.share
        self._check = check
        self._clock = clock
        self._known: OrderedDict[bytes, _Known] = OrderedDict()
        self._arrivals = 0
        self._reached: dict[bytes, dict[bytes, int]] = {}
        """Arrival order of the newest group checked, by sampler and verifier."""
        self._accusers: dict[bytes, set[bytes]] = {}
        """Verifiers that found a sampler dishonest, since it was last muted."""
        self.trust = trust or Trust()
        self._credit = ShareCredit()
        self.disputes = Disputes(identity.public, self._verifiers)
        self.presence = VerifierPresence(self._verifiers - {identity.public})
        """Which verifiers answer; absent ones are not waited for."""
        self._due = DueVerdicts()
        """Groups that verifiers drew and have not judged."""
        self._contested: OrderedDict[bytes, RolloutRecord] = OrderedDict()
        """Groups that one of several verifiers condemned, for the trainer to look at."""
        self.announced = AnnouncedSlots()
        """Slots that samplers have announced: what never came cuts their share."""
        self.changed = ChangeSignal()
        """Notified when verdicts have come that may let other groups into a batch."""
        self.doubted: OrderedDict[bytes, float] = OrderedDict()
        """Samplers with a narrow breach that may be their class's fault, and when."""
        self.used_condemned = 0
        """Number of groups that were condemned after they had been trained on."""
        self.counts: Counter[str] = Counter()
        """Findings that were accepted, by result; and refused ones, by reason."""

    # What may go into a batch

    @property
    def _rule(self) -> str:
        """Return the policy that holds now: `self` while no verifier is there."""
        alone = self._policy == "sampled" and self._check is not None and self.presence.is_nobody_there
        return "self" if alone else self._policy

    @property
    def is_hard(self) -> bool:
        return self._rule == "sampled"

    def entrance(self, group: RolloutRecord) -> Entrance:
        known = self._known.get(group.id) or _Known()
        honest = known.by("honest")
        if not self.disputes.vouches(group.sampler, honest) and self._check is None:
            return Entrance.CLOSED  # with a check, the trainer looks before it learns
        if self._policy == "quorum":
            enough = len(honest - {self._identity.public}) >= self._quorum
            return Entrance.OPEN if enough else Entrance.CLOSED
        if honest or not self._verifies:
            return Entrance.OPEN
        if self._is_held_back(known):
            return Entrance.CLOSED
        if (
            (self._rule != "sampled" or self._is_seen(known))
            and known.vouched
            and self._is_proven(group.sampler)
        ):
            return Entrance.OPEN
        return Entrance.BOUNDED

    def _is_seen(self, known: _Known) -> bool:
        """Return whether a believed verifier that could have drawn a group saw it."""
        return not known.seen_by.isdisjoint(self._believed)

    def _is_held_back(self, known: _Known) -> bool:
        """Return whether a group waits for the verdict on it, or on one before it."""
        return self._rule == "sampled" and self._due.holds_back(
            known.sampler, known.order, self._believed, self._clock()
        )

    @property
    def _believed(self) -> frozenset[bytes]:
        """Return the verifiers that answer, and were not overturned too often."""
        return frozenset(each for each in self.presence.present if not self.disputes.is_unreliable(each))

    def bound(self, batch: int) -> int:
        if self._rule == "sampled":
            return int(self._share * batch)
        return max(1, batch // YOUNG_SHARE)

    @property
    def is_weighted(self) -> bool:
        return self._verifies

    def is_young(self, sampler: bytes) -> bool:
        return self._verifies and not self._is_proven(sampler)

    def weight(self, sampler: bytes) -> float:
        return self._credit.weight(sampler, self._clock()) * self.announced.kept_share(sampler)

    def gives_way(self, group: RolloutRecord) -> bool:
        if self.entrance(group) is Entrance.OPEN:
            return False
        known = self._known.get(group.id)
        return known is None or self._is_passed_over(known) or self._clock() - known.since > LONGEST_UNVOUCHED

    def awaits(self, group: RolloutRecord) -> bool:
        """Return whether a verdict may still let in a group that may not go in yet."""
        known = self._known.get(group.id)
        if known is None:
            return False
        unseen = self._rule == "sampled" and not self._is_seen(known)
        return unseen or self._is_held_back(known) or not self._is_passed_over(known)

    def _is_passed_over(self, known: _Known) -> bool:
        """Return whether verifiers have skipped a group.

        They check one sampler's groups in their order, and do not come back to earlier ones.
        """
        enough = self._quorum if self._policy == "quorum" else 1
        return sum(known.order <= at for at in self._reached.get(known.sampler, {}).values()) >= enough

    def is_muted(self, sampler: bytes) -> bool:
        return self.trust.is_muted(sampler, self._clock())

    def mutes(self) -> Mapping[bytes, Mute]:
        """Return the samplers that verifiers' findings have muted."""
        return self.trust.mutes(self._clock())

    def is_condemned(self, group: bytes) -> bool:
        known = self._known.get(group)
        if known is None or not (dishonest := known.by("dishonest")):
            return False
        alone = next(iter(dishonest)) if len(dishonest) == 1 else None
        return alone is None or not (known.refuted or self.disputes.is_unreliable(alone))

    @property
    def _verifies(self) -> bool:
        """Return whether anybody checks groups; else newcomers could never earn trust."""
        return self._policy != "self" or (self._check is not None and self._share > 0)

    def _is_proven(self, sampler: bytes) -> bool:
        return self.trust.level(sampler, self._clock()) >= 0.5

    # Arrivals and findings

    def saw(self, group: bytes, sampler: bytes, head: bytes = b"", *, vouched: bool = True) -> Consequences:
        """Record a group that arrived; a verdict may have come before it.

        One that is not `vouched` for counts as a newcomer's, whatever its sampler's standing.
        """
        known = self._remember(group)
        if known.sampler:
            return Consequences()
        known.sampler, known.head, known.vouched = sampler, head, vouched
        self._arrivals += 1
        known.order, known.since = self._arrivals, self._clock()
        consequences = Consequences()
        for found in list(known.findings.values()):
            consequences = _merged(consequences, self._apply(group, known, found))
        return consequences

    def acknowledged(
        self, groups: Iterable[bytes], verifier: bytes, drawn: Collection[bytes] = ()
    ) -> list[bytes]:
        """Record that a verifier drew lots over groups.

        Return those that all present verifiers have seen. `drawn` are those that it looks at.
        """
        seen = []
        for group in groups:
            known = self._remember(group)
            if not known.seen_by and self._is_passed_over(known):  # verdicts before it was seen say nothing
                self._arrivals += 1
                known.order = self._arrivals
            if verifier != known.sampler:
                known.seen_by.add(verifier)
            if group in drawn and known.sampler and verifier not in known.findings:
                self._due.drew(known.sampler, verifier, known.order, self._clock())
            if known.seen_by >= self.presence.present:
                seen.append(group)
        return seen

    def owes_verdict(self, groups: Iterable[bytes], verifier: bytes, drawn: Collection[bytes] = ()) -> bool:
        """Return whether a verifier owes a verdict on any of these groups.

        It owes one on groups that it drew, or must have drawn, and has not judged. All of a
        newcomer's are drawn.
        """
        return any(
            verifier not in known.findings and (group in drawn or self.is_young(known.sampler))
            for group in groups
            if (known := self._known.get(group)) is not None
        )

    def used(self, groups: Iterable[bytes]) -> None:
        """Record that groups were trained on."""
        for group in groups:
            self._remember(group).used = True

    def recall_used_condemned(self, count: int) -> None:
        """Restore the count after a restart."""
        self.used_condemned = count

    def read(self, verdict: Opened[Verdict]) -> Finding | None:
        """Return the finding of a verdict, if a verifier's draw selected the group."""
        message = verdict.message
        if verdict.signer not in self._verifiers:
            self.counts["not-a-verifier"] += 1
            return None
        try:
            check_draw(verdict.signer, self._run, message.group, message.draw)
        except ProtocolError:
            self.counts["wrong-draw"] += 1
            return None
        known = self._known.get(message.group)
        sampler = known.sampler if known else b""
        return Finding(message.group, sampler, verdict.signer, message.result, message.reason, self._clock())

    def take(self, found: Finding) -> Consequences:
        """Apply a finding, once.

        Of several by one verifier on one group, the gravest counts.
        """
        known = self._remember(found.group)
        before = known.findings.get(found.verifier)
        if before is not None and _GRAVITY.index(before.result) >= _GRAVITY.index(found.result):
            return Consequences()
        known.findings[found.verifier] = found
        self.presence.judged(found.verifier)
        known.sampler = known.sampler or found.sampler
        self.counts[found.result] += 1
        return self._apply(found.group, known, found) if known.sampler else Consequences()

    # The trainer's own check

    def wants_to_check(self, group: RolloutRecord) -> bool:
        """Return whether the trainer checks this group itself, by its own draw.

        All of a newcomer's groups are checked, and at least the run's share of others. Groups of a
        disputed sampler are checked unless another verifier has.
        """
        if self._check is not None and self.disputes.is_disputed(group.sampler):
            known = self._known.get(group.id)
            return not self.disputes.vouches(group.sampler, known.by("honest") if known else set())
        known = self._known.get(group.id) or _Known()
        if self._check is None or self._rule != "self" or (self._policy == "self" and self._share <= 0):
            return False
        if known.by("honest"):
            return False  # a verifier has looked at it
        rate = self._own_rate(group.sampler, self._clock()) if known.vouched else 1.0
        return drawn(sign_draw(self._identity, self._run, group.id), rate)

    def _own_rate(self, sampler: bytes, now: float) -> float:
        """Return the share of a sampler's groups that is looked at."""
        rate = self.trust.rate(sampler, now)
        return max(self._share, rate) if self._policy == "self" else rate

    def contest(self, groups: Iterable[RolloutRecord]) -> None:
        """Keep groups that a lone verifier condemned, for the trainer's own check."""
        for group in groups:
            if self._check is not None and self.disputes.is_disputed(group.sampler):
                self._contested[group.id] = group
        while len(self._contested) > CONTESTED:
            self._contested.popitem(last=False)

    def next_contested(self) -> RolloutRecord | None:
        """Return a condemned group that the trainer should look at, once."""
        while self._contested:
            group = self._contested.popitem(last=False)[1]
            if self.disputes.is_disputed(group.sampler):
                return group
        return None

    def check(self, group: RolloutRecord) -> Finding:
        """Check a group. Blocks: call it in a thread, and pass the finding to `take`."""
        wrong = self._check(group) if self._check is not None else None
        if wrong is not None and wrong not in {UNDECIDED, CLASS_IN_DOUBT}:
            return self.condemn(group, wrong)
        result = "honest" if wrong is None else UNDECIDED
        return Finding(group.id, group.sampler, self._identity.public, result, wrong or result, self._clock())

    def condemn(self, group: RolloutRecord, reason: str) -> Finding:
        """Return the trainer's own finding that a group is dishonest, for `take`."""
        return Finding(group.id, group.sampler, self._identity.public, "dishonest", reason, self._clock())

    # Internals

    def _apply(self, group: bytes, known: _Known, found: Finding) -> Consequences:
        if found.verifier == known.sampler:  # nobody vouches for itself
            del known.findings[found.verifier]
            self.counts["own-group"] += 1
            return Consequences()
        reached = self._reached.setdefault(known.sampler, {})
        reached[found.verifier] = max(reached.get(found.verifier, 0), known.order)
        self._due.judged(known.sampler, found.verifier, known.order)
        if found.result == "honest" and not known.credited:
            known.credited = True
            rate = self._own_rate(known.sampler, found.at)
            self._credit.verified(known.sampler, known.head, rate, found.at)
            self.trust.honest(known.sampler, found.at)
        if found.result == UNDECIDED and found.reason == CLASS_IN_DOUBT:
            self.trust.doubted(known.sampler, found.at)
            self.doubted[known.sampler] = found.at
            self.doubted.move_to_end(known.sampler)
            while len(self.doubted) > DOUBTED:
                self.doubted.popitem(last=False)
        if found.result == "honest":
            self.disputes.acquitted(known.sampler, found.verifier)
        dishonest = known.by("dishonest")
        known.refuted = self.disputes.weigh(group, known.sampler, known.by("honest"), dishonest)
        if known.refuted:
            self._accusers.get(known.sampler, set()).difference_update(dishonest)
        if found.result != "dishonest":
            return Consequences()
        if known.used and len(known.by("dishonest")) == 1:
            self.used_condemned += 1
        if not self.is_condemned(group):
            return Consequences()
        self.disputes.accused(known.sampler, found.verifier)
        return Consequences(frozenset((group,)), self._accuse(known, found))

    def _accuse(self, known: _Known, found: Finding) -> frozenset[bytes]:
        sampler = known.sampler
        accusers = self._accusers.setdefault(sampler, set())
        accusers.update(known.by("dishonest"))
        enough = min(CONDEMNING, len(self._verifiers))
        if found.verifier != self._identity.public and len(accusers) < enough:
            return frozenset()
        del self._accusers[sampler]
        if self.trust.is_muted(sampler, found.at):
            return frozenset()
        self.trust.condemned(sampler, found.reason, found.at)
        self._credit.condemned(sampler)
        self.disputes.settled(sampler)
        log.warning("sampler %s is muted: %s", peer_id(sampler), found.reason)
        return frozenset((sampler,))

    def _remember(self, group: bytes) -> _Known:
        known = self._known.setdefault(group, _Known())
        if len(self._known) > GROUPS_REMEMBERED:
            self._known.popitem(last=False)
        return known


def _merged(one: Consequences, other: Consequences) -> Consequences:
    return Consequences(one.condemned | other.condemned, one.muted | other.muted)


__all__ = ["NEWCOMER", "Check", "Consequences", "VerdictPolicy"]
