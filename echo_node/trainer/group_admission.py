"""Admission of groups by their own checks and by verifiers' verdicts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from echo_node.rollouts.admission import Admission, Refused
from echo_node.rollouts.record import RolloutRecord
from echo_node.telemetry.metrics import Rate
from echo_node.trainer.verdict_listener import VerdictEnforcer
from echo_node.trainer.verdict_policy import VerdictPolicy
from protocol import Envelope


class GroupAdmission:
    """Admission and verdict policy together. `drops` counts refused groups by reason."""

    def __init__(
        self, admission: Admission, policy: VerdictPolicy, enforcer: VerdictEnforcer, drops: Counter[str]
    ) -> None:
        self._admission = admission
        self._policy = policy
        self._enforcer = enforcer
        self._drops = drops
        self.tokens = Rate()
        """Tokens admitted per second."""

    def judge(self, envelope: Envelope) -> RolloutRecord | Refused:
        """Admit a group once, or return why it is refused."""
        return self._by_verdicts(self._admission.judge(envelope))

    async def judge_all(self, envelopes: Sequence[Envelope]) -> list[RolloutRecord | Refused]:
        """Admit several groups, in their order."""
        return [self._by_verdicts(judged) for judged in await self._admission.judge_all(envelopes)]

    def release(self, record: RolloutRecord) -> None:
        """Free the slot of a group that could not be kept."""
        self._admission.release(record)

    def accepts_from(self, sampler: bytes) -> bool:
        """Return whether groups of a sampler are accepted at all."""
        return self._admission.is_member(sampler) and not self._policy.is_muted(sampler)

    def _by_verdicts(self, judged: RolloutRecord | Refused) -> RolloutRecord | Refused:
        if isinstance(judged, RolloutRecord):
            self._enforcer.apply(self._policy.saw(judged.id, judged.sampler, judged.message.heads[0]))
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
        return judged
