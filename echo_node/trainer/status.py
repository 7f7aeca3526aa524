"""Status of a leading trainer: the record of each step, and numbers for people."""

from __future__ import annotations

import time
from collections import Counter, deque
from typing import Any, Final

from echo_node.net.base import Mute
from echo_node.runtime.pause_gate import PauseGate
from echo_node.telemetry.metrics import Records
from echo_node.trainer.group_intake import GroupIntake
from echo_node.trainer.journal import Batch
from echo_node.trainer.roster import RosterBuilder
from echo_node.trainer.step import StepFigures, TrainStep
from echo_node.trainer.step_record import StepContext, step_record
from echo_node.weights.publisher import Publisher
from protocol import Opened, WeightsHead, peer_id

MOST_MUTED: Final = 100
"""Muted samplers that are named in the status."""
ACTIVE_BATCHES: Final = 8
"""Batches whose samplers count as active when the rate is shared out."""


class TrainerStatus:
    """Records and status of one trainer."""

    def __init__(
        self,
        *,
        step: TrainStep,
        publisher: Publisher,
        records: Records,
        groups: GroupIntake,
        joins: RosterBuilder,
        gate: PauseGate,
    ) -> None:
        self._step = step
        self._publisher = publisher
        self._records = records
        self._groups = groups
        self._buffer, self._gossip = groups.buffer, groups.gossip
        self._policy, self._drops = groups.policy, groups.drops
        self._joins = joins
        self._gate = gate
        self._began = time.monotonic()
        self._bytes_in = 0
        self._active: deque[set[bytes]] = deque(maxlen=ACTIVE_BATCHES)
        self._groups_used: Counter[bytes] = Counter()
        """Groups that were learnt from, by sampler."""
        self._last_steps: dict[bytes, int] = {}
        """Step of the policy that made the newest of them, by sampler."""

    def record_step(
        self,
        batch: Batch,
        figures: StepFigures,
        head: Opened[WeightsHead] | None,
        *,
        waited: float,
        seconds: float,
    ) -> None:
        """Record a step, its wait for a batch, and the head that it published, if any."""
        self._active.append({group.sampler for group in batch.groups})
        self._gossip.stepped(seconds, len(set.union(*self._active)))
        context = StepContext(
            dropped=dict(self._buffer.dropped + self._drops),
            waited_seconds=waited,
            step_seconds=seconds,
            at_seconds=time.monotonic() - self._began,
            condemned_used=self._policy.used_condemned,
            waiting=len(self._buffer),
            bytes_in=self._gossip.bytes_in - self._bytes_in
            or sum(len(each.sealed or b"") for each in batch.groups),
            bytes_out=sum(route.size for route in head.message.routes) if head else 0,
        )
        self._bytes_in = self._gossip.bytes_in
        record = step_record(batch, figures, head.id if head else b"", context)
        self._groups_used += record.by_sampler
        self._last_steps |= {group.sampler: group.step for group in record.groups}
        self._records.add(record)

    def status(self, *, batches: int, learning: bool, waits_for: str | None) -> dict[str, Any]:
        """Return the state of the trainer in plain numbers."""
        tip = self._publisher.tip
        return {
            "version": tip.message.version if tip else None,
            "step": self._step.version,
            "batches": batches,
            "learning": learning,
            "reward": round(self._records.reward(), 4),
            "samplers": len(self._joins.roster().members),
            "waiting": len(self._buffer),
            "waits_for": waits_for,
            "batch": self._batch_progress(),
            "dropped": dict(sorted((self._buffer.dropped + self._drops).items())),
            "muted": {peer_id(key): mute.why for key, mute in sorted(self._mutes().items())[:MOST_MUTED]},
            "verifiers_overturned": {
                peer_id(key): count for key, count in sorted(self._policy.disputes.overturned.items())
            },
            "verifiers_absent": {
                peer_id(key): why for key, why in sorted(self._policy.presence.absent.items())
            },
            "classes_in_doubt": self._classes_in_doubt(),
            "tokens_per_second": round(self._groups.admission.tokens.per_second(), 1),
            "paused": list(self._gate.reasons),
        }

    def _classes_in_doubt(self) -> dict[str, int]:
        """Return the samplers per class with narrow breaches.

        The tolerance of such a class may be too narrow.
        """
        members = self._joins.roster().members
        return dict(Counter(each.engine for each in members if each.key in self._policy.doubted))

    def _batch_progress(self) -> str | None:
        """Return how far the next batch is, in words; None while a step is computed."""
        if (requested := self._groups.sequential.progress) is not None:
            return requested
        if (arrived := self._gossip.progress) is None:
            return None
        return f"{arrived}, {self._groups.admission.announced.under_way} announced ones are under way"

    def members(self) -> dict[bytes, dict[str, Any]]:
        """Return the joined samplers: engine, groups used, policy step of the newest."""
        return {
            member.key: {
                "engine": member.engine,
                "groups": self._groups_used[member.key],
                "step": self._last_steps.get(member.key),
            }
            for member in self._joins.roster().members
        }

    def _mutes(self) -> dict[bytes, Mute]:
        return dict(self._groups.reputation.mutes())
