"""Score a batch: rewards by the contract, and the trainer's own check of a share.

Every reward is computed here, whatever the sampler claimed, and every reply of an environment. A
group that is condemned, that has other replies or claims other rewards than the contract gives, or
that the contract cannot score, is left out with its reason. A claim or a reply that two fresh jails
refute condemns its group, and mutes its sampler.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

import trio

from echo_node.errors import ContractError
from echo_node.rollouts import claims
from echo_node.rollouts.record import RolloutRecord
from echo_node.runs.episodes import EpisodeReplay, is_proven
from echo_node.runs.run import Run, Scorable
from echo_node.trainer.journal import Finding, TrainingJournal
from echo_node.trainer.receipts import Receipts
from echo_node.trainer.verdict_listener import VerdictEnforcer
from echo_node.trainer.verdict_policy import UNDECIDED, VerdictPolicy

log = logging.getLogger(__name__)
CONTESTED_PER_STEP: Final = 2
"""Most condemned groups that the trainer looks at in one step."""


class BatchScorer:
    """Score the batches of one trainer before it learns from them."""

    def __init__(
        self,
        run: Run,
        policy: VerdictPolicy,
        enforcer: VerdictEnforcer,
        receipts: Receipts,
        journal: TrainingJournal,
        left_out: Counter[str],
    ) -> None:
        self._run = run
        self._policy = policy
        self._enforcer = enforcer
        self._receipts = receipts
        self._journal = journal
        self._left_out = left_out
        """Number of groups left out, by reason."""

    async def score(
        self, groups: tuple[RolloutRecord, ...]
    ) -> tuple[tuple[RolloutRecord, ...], dict[bytes, str]]:
        """Return the scored groups to learn from, and the reasons of those left out."""
        await self._check_contested()
        checked = await self._check_share(groups)
        scored, left_out, lies = await trio.to_thread.run_sync(self._score, checked)
        for group, reason in left_out.items():
            if reason != "contract-failed":
                self._receipts.withdraw(group, reason)
                self._left_out[reason] += 1
        if lies:
            scored, left_out = await self._punish(lies, scored, left_out)
        await self._enforcer.flush()
        return scored, left_out

    def leave_out(self, condemned: Iterable[bytes]) -> dict[bytes, str]:
        """Withdraw groups condemned while they were scored, and return the reasons."""
        reasons = dict.fromkeys(condemned, "condemned")
        for group, reason in reasons.items():
            self._receipts.withdraw(group, reason)
            self._left_out[reason] += 1
        return reasons

    async def _check_contested(self) -> None:
        """Check groups that a lone verifier condemned, which settles the dispute."""
        for _ in range(CONTESTED_PER_STEP):
            if (group := self._policy.next_contested()) is None:
                return
            found = await trio.to_thread.run_sync(self._policy.check, group)
            await self._journal.find([found])
            self._enforcer.apply(self._policy.take(found))

    async def _check_share(self, groups: tuple[RolloutRecord, ...]) -> tuple[RolloutRecord, ...]:
        """Check a share of the groups with the trainer's model, if the run asks for it."""
        selected = [group for group in groups if self._policy.wants_to_check(group)]
        if not selected:
            return groups
        findings = [await trio.to_thread.run_sync(self._policy.check, group) for group in selected]
        bad = await self._apply(findings, groups)
        await self._journal.drop(bad)
        return tuple(group for group in groups if group.id not in bad)

    async def _punish(
        self,
        lies: Sequence[tuple[RolloutRecord, str]],
        scored: tuple[RolloutRecord, ...],
        left_out: dict[bytes, str],
    ) -> tuple[tuple[RolloutRecord, ...], dict[bytes, str]]:
        """Condemn groups that lie about rewards or replies.

        All else that their samplers sent is dropped.
        """
        bad = await self._apply([self._policy.condemn(*lie) for lie in lies], scored)
        return tuple(group for group in scored if group.id not in bad), left_out | bad

    async def _apply(self, findings: Sequence[Finding], groups: Sequence[RolloutRecord]) -> dict[bytes, str]:
        """Record own findings; return which of the groups they exclude, and why."""
        await self._journal.find(findings)
        for found in findings:
            self._enforcer.apply(self._policy.take(found))
        bad = {
            group.id: "condemned" if self._policy.is_condemned(group.id) else "muted"
            for group in groups
            if self._policy.is_condemned(group.id) or self._policy.is_muted(group.sampler)
        }
        bad |= {
            found.group: "unverified"
            for found in findings
            if found.result == UNDECIDED
            and found.group not in bad
            and (self._policy.is_young(found.sampler) or self._policy.disputes.is_disputed(found.sampler))
        }
        for group, reason in bad.items():
            self._receipts.withdraw(group, reason)
            self._left_out[reason] += 1
        return bad

    def _score(
        self, groups: Sequence[RolloutRecord]
    ) -> tuple[tuple[RolloutRecord, ...], dict[bytes, str], list[tuple[RolloutRecord, str]]]:
        """Return scored groups, left-out ones with reasons, and proven lies.

        Blocks while the contract runs: call it in a thread.
        """
        scored: list[RolloutRecord] = []
        left_out: dict[bytes, str] = {}
        lies: list[tuple[RolloutRecord, str]] = []
        for group in groups:
            completions = group.message.completions()
            try:
                answers: Sequence[Scorable] = [each.ids for each in completions]
                if self._run.turn_rules is not None:
                    episodes = EpisodeReplay(self._run, group.prompt, completions)
                    if (found := episodes.breach()) is not None:
                        left_out[group.id] = found.reason
                        if is_proven(self._run, group.prompt, completions, found):
                            log.warning("group %s lies: %s", group.id.hex()[:16], found.what)
                            lies.append((group, found.reason))
                        continue
                    answers = episodes.turns
                scores = self._run.scores(group.prompt, answers)
            except ContractError as error:  # completions are untrusted text: none may stop the trainer
                log.warning("a group is left out of its batch: %s", error)
                left_out[group.id] = "contract-failed"
                self._left_out["contract-failed"] += 1
                continue
            rewards = tuple(score.value for score in scores)
            if claims.differ(group, rewards):
                left_out[group.id] = "wrong-reward"
                if lie := claims.find_lie(self._run, group):
                    log.warning("group %s lies: %s", group.id.hex()[:16], lie)
                    lies.append((group, "wrong-reward"))
                continue
            scored.append(replace(group, rewards=rewards))
        return tuple(scored), left_out, lies
