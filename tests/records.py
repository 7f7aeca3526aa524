"""Rollout records for tests, made from groups that were opened."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from echo_node.contract import Prompt
from echo_node.rollouts.record import RolloutRecord
from protocol import Envelope, Opened, TrajectoryGroup


def record_of(
    group: Opened[TrajectoryGroup],
    step: int,
    prompt: Prompt | None = None,
    rewards: Sequence[float] | None = None,
) -> RolloutRecord:
    """Return the record that admission would make of a group."""
    return RolloutRecord.of(Envelope.parse(group.sealed), group.message, step, prompt, rewards)


def sealed_record(sealed: bytes, step: int = 0) -> RolloutRecord:
    """Return the record of a sealed group, whose signature is not checked."""
    envelope = Envelope.parse(sealed)
    return RolloutRecord.of(envelope, envelope.claim(TrajectoryGroup, envelope.run), step)


def columns(completions: Sequence[tuple[Any, Any, float]]) -> list[list[Any]]:
    """Return the ids, log-probabilities and rewards of completions as three columns."""
    return [list(column) for column in zip(*completions, strict=True)]
