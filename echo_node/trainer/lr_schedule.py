"""Learning-rate schedule: linear warm-up, then constant, linear or cosine decay."""

from __future__ import annotations

import math

from echo_node.runs.algorithm import StepSettings


def learning_rate_at(settings: StepSettings, step: int) -> float:
    """Return the learning rate of a step; the first is step 0."""
    if step < settings.warm_up:
        return settings.learning_rate * (step + 1) / settings.warm_up
    if settings.schedule == "constant":
        return settings.learning_rate
    progress = min(1.0, (step - settings.warm_up) / (settings.decay_steps - settings.warm_up))
    left = 1.0 - progress if settings.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return settings.learning_rate * (settings.final_rate + (1.0 - settings.final_rate) * left)
