"""From groups that were drawn to groups with rewards: the trainer's own look at some, and the contract's word on all.

Every reward is computed here, whatever was claimed. What is condemned, or cannot be scored, is left out, and why is kept.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Sequence

import trio

from echo_node.admission import Admitted
from echo_node.errors import ContractError
from echo_node.run import Run
from echo_node.trainer.heeding import Heeding
from echo_node.trainer.journal import KeptGroup, TrainingJournal
from echo_node.trainer.receipts import Receipts
from echo_node.trainer.verdicts import VerdictPolicy

log = logging.getLogger(__name__)


class Vetting:
    """What one trainer does with a batch before it learns from it."""

    def __init__(
        self,
        run: Run,
        policy: VerdictPolicy,
        heeding: Heeding,
        receipts: Receipts,
        journal: TrainingJournal,
        left_out: Counter[str],
    ) -> None:
        self._run = run
        self._policy = policy
        self._heeding = heeding
        self._receipts = receipts
        self._journal = journal
        self._left_out = left_out
        """How many groups were left out, by reason."""

    async def vet(self, drawn: tuple[Admitted, ...]) -> tuple[tuple[KeptGroup, ...], dict[bytes, str]]:
        """The groups that may be learnt from, with their rewards; and why others may not."""
        good = await self._look(drawn)
        found = await trio.to_thread.run_sync(self._score, good)
        await self._heeding.flush()
        return found

    def leave_out(self, condemned: Iterable[bytes]) -> dict[bytes, str]:
        """Groups that a verdict has condemned while they were scored."""
        told = dict.fromkeys(condemned, "condemned")
        for group, reason in told.items():
            self._receipts.withdraw(group, reason)
            self._left_out[reason] += 1
        return told

    async def _look(self, drawn: tuple[Admitted, ...]) -> tuple[Admitted, ...]:
        """The trainer's own look at a share of the groups, where the run wants that."""
        looked_at = [group for group in drawn if self._policy.wants_to_check(group)]
        if not looked_at:
            return drawn
        findings = [await trio.to_thread.run_sync(self._policy.check, group) for group in looked_at]
        await self._journal.find(findings)
        for found in findings:
            self._heeding.apply(self._policy.take(found))
        bad = {
            group.group.id: "condemned" if self._policy.is_condemned(group.group.id) else "muted"
            for group in drawn
            if self._policy.is_condemned(group.group.id) or self._policy.is_muted(group.group.signer)
        }
        for group, reason in bad.items():
            self._receipts.withdraw(group, reason)
            self._left_out[reason] += 1
        await self._journal.drop(bad)
        return tuple(group for group in drawn if group.group.id not in bad)

    def _score(self, drawn: Sequence[Admitted]) -> tuple[tuple[KeptGroup, ...], dict[bytes, str]]:
        """In a thread: contracts take their time."""
        scored, left_out = [], {}
        for admitted in drawn:
            said = admitted.group.message.completions()
            try:
                worth = self._run.scores(admitted.prompt, [each.ids for each in said])
            except ContractError as error:  # completions are hostile text: none of them may end the trainer
                log.warning("a group is left out of its step: %s", error)
                left_out[admitted.group.id] = "contract-failed"
                self._left_out["contract-failed"] += 1
                continue
            scored.append(KeptGroup.of(admitted.group, admitted.step, [score.value for score in worth]))
        return tuple(scored), left_out
