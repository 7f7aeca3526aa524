"""The reward curve as a PNG. Reads records; needs matplotlib, and says so where it is missing."""

from __future__ import annotations

from pathlib import Path

from echo_node.errors import ConfigError
from echo_node.metrics import StepRecord

_SMOOTH = 10


def draw_rewards(steps: list[StepRecord], title: str, file: Path) -> None:
    """Reward by step: each step, their running mean, and the spread within a batch as a band."""
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
    figure, axes = plt.subplots(figsize=(8, 4.5), dpi=120)
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
    figure.tight_layout()
    figure.savefig(file)
    plt.close(figure)
