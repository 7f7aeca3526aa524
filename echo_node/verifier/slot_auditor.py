"""Audits of samplers by a verifier: what they announced, sent and left out.

Holds the account of announcements, and generates left out slots for the two tests: `SkippedSlots`
within one head, and `SelectionAudit` over all heads. Every reward in them is computed here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from echo_node.engine.base import Engine, SlotRequest, generate_groups
from echo_node.errors import ContractError
from echo_node.rollouts.admission import Admission
from echo_node.rollouts.announced_slots import AnnouncedSlots
from echo_node.rollouts.record import RolloutRecord
from echo_node.runs.episodes import responder, scorable
from echo_node.runs.run import Run
from echo_node.verifier.selection_audit import SelectionAudit, SlotFigures
from echo_node.verifier.skipped_slots import SkippedSlots
from echo_node.verifier.tolerance import Breach
from protocol import Envelope, SlotAnnouncement

AUDITS: Final = 256
"""Pairs of head and sampler whose audited slots are cached."""
UNPOSTED_HEADS: Final = 4
"""Heads without groups that are looked at beside one group, at most."""


@dataclass(frozen=True, slots=True)
class AuditPlan:
    """Knowledge about a sampler when one of its groups is checked."""

    holes: tuple[int, ...]
    until: int
    unposted: tuple[bytes, ...]
    """Fresh older heads whose roster has the sampler, and under which nothing came of it."""


class SlotAuditor:
    """Account and audits of all samplers; `at(head)` returns its engine.

    The engine has the weights of that head.
    """

    def __init__(self, run: Run, admission: Admission, at: Callable[[bytes], Engine]) -> None:
        self._run = run
        self._admission = admission
        self._at = at
        self._announced = AnnouncedSlots()
        self._skipped = SkippedSlots()
        self._selection = SelectionAudit()
        self._cache: OrderedDict[tuple[bytes, bytes], dict[int, SlotFigures]] = OrderedDict()
        """Figures of slots that were generated here, by head and sampler: draws are fixed."""

    def announce(self, envelope: Envelope) -> None:
        """Record an announcement, if it is a member's under a fresh head."""
        read = self._admission.read_announcement(envelope)
        if isinstance(read, SlotAnnouncement):
            self._announced.announce(envelope.signer, read, envelope.id)

    def came(self, group: RolloutRecord) -> None:
        """Record a group that came, whether it is checked or not."""
        self._announced.arrived(group.head, group.sampler, group.slot)
        self._skipped.record(group.head, group.sampler, group.slot, None)

    def settle(self) -> None:
        """Forget announcements under heads that are over."""
        self._announced.settle(self._admission.heads)

    def plan(self, group: RolloutRecord) -> AuditPlan:
        """Return what is known now, for an audit in a thread."""
        head, sampler = group.head, group.sampler
        heads = list(self._admission.heads)
        older = heads[: heads.index(head)] if head in heads else []
        unposted = [
            each
            for each in older
            if self._admission.may_sample(each, sampler) and not self._announced.until(each, sampler)
        ]
        return AuditPlan(
            tuple(self._announced.holes(head, sampler)),
            self._announced.until(head, sampler),
            tuple(unposted[-UNPOSTED_HEADS:]),
        )

    def audit(
        self, group: RolloutRecord, rewards: Sequence[float], plan: AuditPlan, stop: Callable[[], bool]
    ) -> Breach | None:
        """Compare an honest group's sampler with what it left out.

        Slow: run it in a thread. `rewards` are this verifier's. Groups that switched heads are not
        compared: the slots that are generated here are of one.
        """
        head, sampler = group.head, group.sampler
        if len(group.message.heads) > 1 or not rewards:
            return None
        figures = SlotFigures.of(rewards, group.message.lengths)
        self._skipped.record(head, sampler, group.slot, figures.reward)
        self._selection.record(head, sampler, group.slot, figures)
        what = self._skipped_under(head, sampler, stop)
        if what is None:
            left = self._selection.wanted(head, sampler, plan.holes, plan.until)
            self._selection.left_out(head, sampler, self._generate(head, sampler, left, stop))
            for each in plan.unposted:
                first, others = self._selection.wanted_unposted(each, sampler)
                if first and not stop():
                    generated = self._generate(each, sampler, [*first, *others], stop)
                    pick = {slot: generated[slot] for slot in first if slot in generated}
                    self._selection.left_out(each, sampler, pick)
                    pick = {slot: generated[slot] for slot in others if slot in generated}
                    self._selection.compared(each, sampler, pick)
            what = self._selection.breach(sampler)
        return None if what is None else Breach("skipped-slots", what)

    def forget(self, sampler: bytes) -> None:
        """Drop the audits of a sampler that was condemned."""
        self._selection.forget(sampler)

    def _skipped_under(self, head: bytes, sampler: bytes, stop: Callable[[], bool]) -> str | None:
        slots = self._skipped.suspicious(head, sampler)
        found = self._generate(head, sampler, slots, stop)
        return self._skipped.worth_less(head, sampler, [each.reward for each in found.values()])

    def _generate(
        self, head: bytes, sampler: bytes, slots: Sequence[int], stop: Callable[[], bool]
    ) -> dict[int, SlotFigures]:
        """Generate slots of a sampler; return the figures of those scored here.

        Some cannot be scored here.
        """
        cache = self._cache.setdefault((head, sampler), {})
        if len(self._cache) > AUDITS:
            self._cache.popitem(last=False)
        if new := [slot for slot in slots if slot not in cache]:
            keys = [self._run.slot_key(head, sampler, slot) for slot in new]
            prompts = self._run.prompts(keys)
            size = self._run.manifest.sampling.group_size
            requests = [
                SlotRequest(ids, key, size, self._run.limits, turns=self._run.turn_rules)
                for key, (_, ids) in zip(keys, prompts, strict=True)
            ]
            respond = responder(self._run, [prompt for prompt, _ in prompts])
            drawn = generate_groups(self._at(head), requests, stop=stop, respond=respond)
            for slot, (prompt, _), draws in zip(new, prompts, drawn, strict=True):
                try:
                    scores = self._run.scores(prompt, scorable(self._run, prompt, draws))
                except ContractError:
                    continue
                values, lengths = [each.value for each in scores], [len(draw.ids) for draw in draws]
                cache[slot] = SlotFigures.of(values, lengths)
        return {slot: cache[slot] for slot in slots if slot in cache}
