"""What a person sees while the demo runs: a live panel on a terminal, plain lines elsewhere. Reads a demo, changes nothing."""

from __future__ import annotations

from collections import Counter

import trio
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from echo_node.demo.swarm import Demo

REFRESH_SECONDS = 0.25
LINE_SECONDS = 5.0
_BARS = " ▁▂▃▄▅▆▇█"
_WIDTH = 58


async def watch(demo: Demo, console: Console) -> None:
    """Show the demo until cancelled, as this console can."""
    if console.is_terminal:
        with Live(console=console, refresh_per_second=8, get_renderable=lambda: panel(demo)):
            await trio.sleep_forever()
    shown = -1
    while True:
        await trio.sleep(LINE_SECONDS)
        if len(demo.records.steps) != shown:
            shown = len(demo.records.steps)
            console.print(line(demo), highlight=False, soft_wrap=True)


def line(demo: Demo) -> str:
    """Where the demo stands, in one line."""
    steps = demo.records.steps
    if not steps:
        return f"{demo.seconds:4.0f} s  starting {demo.config.samplers} samplers and a trainer"
    return (
        f"{demo.seconds:4.0f} s  step {len(steps)}/{demo.config.steps}  reward {demo.records.reward():.2f}  "
        f"version {steps[-1].version}  staleness {_ages(demo)}  {demo.tokens_per_second:,.0f} tokens/s"
    )


def panel(demo: Demo) -> RenderableType:
    """Where the demo stands, at a glance, in 80 columns."""
    steps = demo.records.steps
    config = demo.config
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", min_width=9)
    grid.add_column()
    grid.add_row("step", Group(ProgressBar(total=config.steps, completed=len(steps), width=_WIDTH)))
    reward = f"{demo.records.reward():.2f}" if steps else "…"
    grid.add_row("reward", Text(f"{reward}  the mean of the last ten steps", style="green"))
    grid.add_row("", Text(sparkline([record.reward for record in steps], _WIDTH), style="green"))
    grid.add_row("version", f"{steps[-1].version if steps else 0}, step {len(steps)} of {config.steps}")
    grid.add_row("staleness", _histogram(demo))
    grid.add_row(
        "speed", f"{demo.tokens_per_second:,.0f} tokens/s from {config.samplers} samplers, {_pace(demo)}"
    )
    return Panel(
        grid,
        title=f"echo-node demo, {_mode(demo)}",
        subtitle=f"{demo.seconds:.0f} s · Ctrl-C stops",
        width=min(80, 80),
    )


def sparkline(values: list[float], width: int) -> str:
    """Values from 0 to 1 as a row of bars, the mean of each stretch."""
    if not values:
        return ""
    size = max(1, -(-len(values) // width))
    means = [sum(part) / len(part) for i in range(0, len(values), size) if (part := values[i : i + size])]
    return "".join(_BARS[round(min(max(mean, 0.0), 1.0) * (len(_BARS) - 1))] for mean in means)


def summary(demo: Demo, picture: str | None) -> str:
    """What happened, in plain words."""
    steps = demo.records.steps
    if not steps:
        return "The demo stopped before its first step."
    first = sum(record.reward for record in steps[:10]) / len(steps[:10])
    told = [
        f"In {demo.seconds:.0f} s and {len(steps)} steps the swarm taught the model to reverse five digits:",
        f"it was right {first:.0%} of the time at first, and {demo.records.reward():.0%} at the end.",
        (
            f"{demo.config.samplers} samplers drew {sum(record.tokens for record in steps):,} tokens for it, "
            f"none of them from a policy more than {demo.records.max_staleness} steps old."
        ),
    ]
    if picture:
        told.append(f"The curve is in {picture}.")
    other = "async" if demo.config.mode == "sequential" else "sequential"
    told.append(
        f"Next: echo-node demo --mode {other}, or examples/one_process.py for how it is put together."
    )
    return "\n".join(told)


def _mode(demo: Demo) -> str:
    return "sequential pull" if demo.config.mode == "sequential" else "asynchronous push-pull"


def _recent(demo: Demo) -> Counter[int]:
    ages: Counter[int] = Counter()
    for record in demo.records.steps[-20:]:
        ages += record.staleness
    return ages


def _ages(demo: Demo) -> str:
    ages = _recent(demo)
    return f"{sum(age * n for age, n in ages.items()) / max(ages.total(), 1):.1f}"


def _histogram(demo: Demo) -> str:
    ages = _recent(demo)
    if not ages:
        return "…"
    shares = (f"{age}: {ages[age] / ages.total():.0%}" for age in sorted(ages))
    return "  ".join(shares) + "  (steps old: share)"


def _pace(demo: Demo) -> str:
    recent = demo.records.steps[-20:]
    if len(recent) < 2:
        return "…"
    seconds = recent[-1].at_seconds - recent[0].at_seconds
    return f"{(len(recent) - 1) / max(seconds, 1e-9):.1f} steps/s"
