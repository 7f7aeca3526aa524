"""From a batch and the figures of its step to the record of it. Pure; it measures nothing itself."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

from echo_node.metrics import StepRecord, TrainedGroup
from echo_node.trainer.journal import Batch
from echo_node.trainer.step import StepFigures
from protocol import Envelope, TrajectoryGroup


@dataclass(frozen=True, slots=True)
class Circumstances:
    """What is known of a step besides its batch and its figures. A step that is replayed has none of it."""

    dropped: dict[str, int] = field(default_factory=dict)
    waited_seconds: float = 0.0
    step_seconds: float = 0.0
    at_seconds: float = 0.0
    condemned_used: int = 0
    waiting: int = 0
    bytes_in: int = 0
    bytes_out: int = 0


def step_record(batch: Batch, figures: StepFigures, head: bytes, seen: Circumstances) -> StepRecord:
    """The record of one step. `head` is the id of the head that went out for it; empty, if none did yet."""
    tally = figures.tally
    rewards = [reward for group in batch.groups for reward in group.rewards or ()]
    return StepRecord(
        number=batch.number,
        step=figures.version,
        policy_step=batch.policy_step,
        version=batch.version,
        head=head,
        reward=figures.reward,
        spread=statistics.pstdev(rewards),
        loss=figures.loss,
        entropy=tally.mean_entropy,
        clip_share=tally.clip_share,
        mask_share=tally.mask_share,
        veto_share=(tally.vetoed + tally.mistrusted) / max(tally.completions, 1),
        kl=tally.kl,
        mismatch_kl=tally.mismatch_kl,
        effective_sample_share=tally.effective_sample_share,
        gradient_norm=figures.gradient_norm,
        learning_rate=figures.learning_rate,
        tokens=sum(_tokens(group.sealed) for group in batch.groups),
        groups=tuple(
            TrainedGroup(each.id, each.sampler, each.slot, each.head, each.step) for each in batch.groups
        ),
        dropped=seen.dropped,
        waited_seconds=seen.waited_seconds,
        step_seconds=seen.step_seconds,
        at_seconds=seen.at_seconds,
        condemned_used=seen.condemned_used,
        waiting=seen.waiting,
        bytes_in=seen.bytes_in,
        bytes_out=seen.bytes_out,
    )


def _tokens(sealed: bytes | None) -> int:
    if sealed is None:
        return 0
    envelope = Envelope.parse(sealed)
    return envelope.claim(TrajectoryGroup, envelope.run).token_count
