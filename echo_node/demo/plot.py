"""Plot a run's reward and bytes of weights as PNG, with matplotlib."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path
from typing import Any

from echo_node.errors import ConfigError
from echo_node.telemetry.metrics import StepRecord

_SMOOTH = 10


def draw_rewards(steps: list[StepRecord], title: str, file: Path, *, model_bytes: int = 0) -> None:
    """Plot the reward by step with its running mean and standard error.

    With the model's size, plot the bytes of the published versions below.
    """
    try:
        import matplotlib as mpl  # noqa: PLC0415 - an extra; only a picture needs it
    except ImportError:
        raise ConfigError("a picture needs matplotlib", advice="pip install 'echo-node[plot]'") from None
    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415 - after the backend is chosen

    at = [record.step for record in steps]
    rewards = [record.reward for record in steps]
    smooth = [
        sum(part) / len(part) for i in range(len(steps)) if (part := rewards[max(0, i + 1 - _SMOOTH) : i + 1])
    ]
    error = [record.spread / max(len(record.groups), 1) ** 0.5 for record in steps]
    figure, grid = plt.subplots(
        *((2, 1) if model_bytes else (1, 1)),
        figsize=(8, 6.5 if model_bytes else 4.5),
        dpi=120,
        squeeze=False,
        height_ratios=[3, 1] if model_bytes else None,
    )
    axes = grid[0][0]
    axes.fill_between(
        at,
        [mean - e for mean, e in zip(smooth, error, strict=True)],
        [mean + e for mean, e in zip(smooth, error, strict=True)],
        alpha=0.2,
        label="± standard error of a step",
    )
    axes.plot(at, rewards, linewidth=0.6, alpha=0.5, label="reward of a step")
    axes.plot(at, smooth, linewidth=2, label=f"mean of {_SMOOTH} steps")
    axes.set(xlabel="optimiser step", ylabel="reward (share of exact answers)", ylim=(0, 1), title=title)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    if model_bytes:
        _draw_bytes(grid[1][0], steps, model_bytes)
    figure.tight_layout()
    figure.savefig(file)
    plt.close(figure)


def _draw_bytes(axes: Any, steps: list[StepRecord], model_bytes: int) -> None:
    """Plot the cumulative bytes, beside those of whole weights."""
    at = [record.step for record in steps]
    sent = list(accumulate(record.bytes_out / 1e6 for record in steps))
    whole = list(accumulate(bool(record.bytes_out) * model_bytes / 1e6 for record in steps))
    axes.plot(at, whole, linestyle=":", label="whole weights would be")
    axes.plot(at, sent, label="changes, as published")
    axes.set(xlabel="optimiser step", ylabel="MB of versions")
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left")
