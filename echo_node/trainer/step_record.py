"""Build the record of a step from its batch, its figures and the published head."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

from echo_node.telemetry.metrics import StepRecord, TrainedGroup
from echo_node.trainer.journal import Batch
from echo_node.trainer.step import StepFigures


@dataclass(frozen=True, slots=True)
class StepContext:
    """Measurements of a step besides its batch and figures; a replayed step has none."""

    dropped: dict[str, int] = field(default_factory=dict)
    waited_seconds: float = 0.0
    step_seconds: float = 0.0
    at_seconds: float = 0.0
    condemned_used: int = 0
    waiting: int = 0
    bytes_in: int = 0
    bytes_out: int = 0


def step_record(batch: Batch, figures: StepFigures, head: bytes, context: StepContext) -> StepRecord:
    """Return the record of one step.

    `head` is the id of the head that was published for it; empty, if there is none yet.
    """
    tally = figures.tally
    rewards = [reward for group in batch.groups for reward in group.rewards or ()]
    return StepRecord(
        number=batch.number,
        step=figures.version,
        policy_step=batch.policy_step,
        version=batch.version,
        head=head,
        reward=_mean_reward(batch, figures),
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
        tokens=sum(each.message.token_count for each in batch.groups if each.sealed is not None),
        groups=tuple(
            TrainedGroup(each.id, each.sampler, each.slot, each.head, each.step) for each in batch.groups
        ),
        dropped=context.dropped,
        waited_seconds=context.waited_seconds,
        step_seconds=context.step_seconds,
        at_seconds=context.at_seconds,
        condemned_used=context.condemned_used,
        waiting=context.waiting,
        bytes_in=context.bytes_in,
        bytes_out=context.bytes_out,
    )


def _mean_reward(batch: Batch, figures: StepFigures) -> float:
    """Return the mean reward of all groups that were drawn, with those passed over."""
    drawn = len(batch.groups) + batch.passed_over
    return (figures.reward * len(batch.groups) + batch.passed_reward * batch.passed_over) / drawn
