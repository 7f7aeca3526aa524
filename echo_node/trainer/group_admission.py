"""Admission of groups by their own checks, announcements and verifiers' verdicts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from echo_node.rollouts.admission import Admission, Refused
from echo_node.rollouts.record import RolloutRecord
from echo_node.telemetry.metrics import Rate
from echo_node.trainer.inventory import InventoryPublisher
from echo_node.trainer.verdict_listener import VerdictEnforcer
from echo_node.trainer.verdict_policy import VerdictPolicy
from protocol import Envelope, TrajectoryGroup


class GroupAdmission:
    """Admission and verdict policy together. `drops` counts refused groups by reason.

    Whatever is admitted is listed in the `inventory` for verifiers.
    """

    def __init__(
        self,
        admission: Admission,
        policy: VerdictPolicy,
        enforcer: VerdictEnforcer,
        drops: Counter[str],
        inventory: InventoryPublisher | None = None,
    ) -> None:
        self._admission = admission
        self._policy = policy
        self._enforcer = enforcer
        self._drops = drops
        self.announced = policy.announced
        self._newest: bytes | None = None
        """The newest head when announcements were last settled."""
        self._inventory = inventory
        self.tokens = Rate()
        """Tokens admitted per second."""

    def judge(self, envelope: Envelope) -> RolloutRecord | Refused:
        """Admit a group that the leader requested, or return why it is refused.

        Of a sampler that left requests unanswered only a share is vouched for.
        """
        judged = self._admission.judge(envelope)
        vouched = False
        if isinstance(judged, RolloutRecord):
            self._settle()
            self.announced.arrived(judged.head, judged.sampler, judged.slot)
            vouched = self.announced.trusts_next(judged.sampler)
        return self._by_verdicts(judged, vouched=vouched)

    def requested(self, head: bytes, sampler: bytes, until: int) -> None:
        """Count slots that a sampler was asked for, and did not fill, as holes."""
        self._settle()
        self.announced.requested(head, sampler, until)

    async def judge_all(self, envelopes: Sequence[Envelope]) -> list[RolloutRecord | Refused]:
        """Admit several groups, in their order."""
        judged = await self._admission.judge_all(envelopes)
        return [
            self._by_verdicts(each, vouched=self._is_vouched(envelope, each))
            for envelope, each in zip(envelopes, judged, strict=True)
        ]

    def announce(self, envelope: Envelope) -> Refused | None:
        """Take in an announcement of slots, or return why it is refused."""
        self._settle()
        read = self._admission.read_announcement(envelope)
        if isinstance(read, Refused):
            return read
        reason = self.announced.announce(envelope.signer, read, envelope.id)
        what = "an announcement that reaches too far ahead, or is no news"
        return None if reason is None else Refused(envelope.id, reason, what, signed=True)

    def exempt_known_heads(self) -> None:
        """Ask for no announcements under the heads that this process did not publish."""
        self.announced.exempt(tuple(self._admission.heads))

    def _settle(self) -> None:
        """Count holes of heads that are over, once per new head."""
        heads = self._admission.heads
        newest = next(reversed(list(heads)), None)
        if newest != self._newest:
            self._newest = newest
            self.announced.settle(heads)

    def _is_vouched(self, envelope: Envelope, judged: RolloutRecord | Refused) -> bool:
        """Record an arrived group; return whether its sampler's standing vouches.

        It must have been announced before, and of a sampler with holes only a share is vouched for.
        """
        self._settle()
        if isinstance(judged, RolloutRecord):
            is_announced = self.announced.arrived(judged.head, judged.sampler, judged.slot)
            return self.announced.trusts_next(judged.sampler) and is_announced
        if judged.reason == "stale" and judged.signed:
            group = envelope.claim(TrajectoryGroup, envelope.run)
            self.announced.was_late(group.heads[0], envelope.signer, group.slot)
        return False

    def release(self, record: RolloutRecord) -> None:
        """Free the slot of a group that could not be kept."""
        self._admission.release(record)
        if self._inventory is not None:
            self._inventory.discard(record.id)

    def accepts_from(self, sampler: bytes) -> bool:
        """Return whether groups of a sampler are accepted at all."""
        return self._admission.accepts_from(sampler) and not self._policy.is_muted(sampler)

    def _by_verdicts(self, judged: RolloutRecord | Refused, *, vouched: bool) -> RolloutRecord | Refused:
        if isinstance(judged, RolloutRecord):
            saw = self._policy.saw(judged.id, judged.sampler, judged.head, vouched=vouched)
            self._enforcer.apply(saw)
            if self._policy.is_muted(judged.sampler):
                judged = Refused(
                    judged.id, "muted", "its sampler is muted for what it sent before", signed=True
                )
            elif self._policy.is_condemned(judged.id):
                judged = Refused(judged.id, "condemned", "a verifier found it dishonest", signed=True)
        if isinstance(judged, Refused):
            self._drops[judged.reason] += 1
        else:
            self.tokens.add(judged.message.token_count)
            if self._inventory is not None:
                self._inventory.add(judged)
        return judged
