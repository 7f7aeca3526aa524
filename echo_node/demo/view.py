"""Live view of the demo: a panel on a terminal, plain lines elsewhere."""

from __future__ import annotations

import textwrap
from collections import Counter

import trio
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from echo_node.demo.held_out import SHOWN
from echo_node.demo.node_status import DemoState, NodeStatus, bytes_out, caught, held_out_curve, verdicts
from echo_node.runtime.console import printable

REFRESH_SECONDS = 0.25
LINE_SECONDS = 5.0
_BARS = " ▁▂▃▄▅▆▇█"
_WIDTH = 58
_COLUMNS = 80


async def watch(demo: DemoState, console: Console) -> None:
    """Show the demo until cancelled, in the form that the console supports."""
    if console.is_terminal:
        with Live(console=console, refresh_per_second=8, get_renderable=lambda: panel(demo)):
            await trio.sleep_forever()
    shown = -1
    while True:
        await trio.sleep(LINE_SECONDS)
        if len(demo.records.steps) != shown or not shown:
            shown = len(demo.records.steps)
            console.print(line(demo), highlight=False, soft_wrap=True)


def line(demo: DemoState) -> str:
    """Return the demo's progress in one line; for a swarm of processes, in two."""
    steps = demo.records.steps
    if not steps:
        return f"{demo.seconds:4.0f} s  starting {_who_comes(demo)}{_at_first(demo)}"
    stands = (
        f"{demo.seconds:4.0f} s  step {len(steps)}/{demo.config.steps}  reward {demo.records.reward():.2f}  "
        f"version {steps[-1].version}  staleness {_ages(demo)}  {demo.tokens_per_second:,.0f} tokens/s"
    )
    if not demo.members:
        return stands
    sent, whole = (size / 1e6 for size in bytes_out(demo))
    measured = "".join(
        f"held out {reward:.0%} at step {step}  " for step, reward in held_out_curve(demo)[-1:]
    )
    more = f"{measured}peers {_most_peers(demo)}  weights {sent:,.1f} of {whole:,.0f} MB  verdicts {_verdicts(demo)}"
    return "\n".join([stands, *wrap(more, indent=8)])


def wrap(text: str, *, indent: int = 0) -> list[str]:
    """Wrap text to lines that fit a terminal."""
    return textwrap.wrap(
        text,
        _COLUMNS,
        initial_indent=" " * indent,
        subsequent_indent=" " * indent,
        break_on_hyphens=False,
        break_long_words=False,
    )


def panel(demo: DemoState) -> RenderableType:
    """Return the demo's progress as a panel of 80 columns."""
    steps = demo.records.steps
    config = demo.config
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", min_width=9)
    grid.add_column()
    grid.add_row("step", Group(ProgressBar(total=config.steps, completed=len(steps), width=_WIDTH)))
    reward = f"{demo.records.reward():.2f}" if steps else "…"
    grid.add_row("reward", Text(f"{reward}  the mean of the last ten steps", style="green"))
    grid.add_row("", Text(sparkline([record.reward for record in steps], _WIDTH), style="green"))
    if demo.first:
        grid.add_row("held out", Text(_held_out(demo), style="green"))
        grid.add_row("", "at first it said:")
        for answer in demo.first.answers[:SHOWN]:
            grid.add_row("", Text(f"  {answer.question} {answer.text}", style="" if answer.reward else "dim"))
    grid.add_row("version", f"{steps[-1].version if steps else 0}, step {len(steps)} of {config.steps}")
    grid.add_row("staleness", _histogram(demo))
    grid.add_row(
        "speed", f"{demo.tokens_per_second:,.0f} tokens/s from {config.samplers} samplers, {_pace(demo)}"
    )
    if demo.members:
        _add_swarm(grid, demo)
    if demo.page:
        grid.add_row("page", demo.page)
    return Panel(
        grid,
        title=f"echo-node demo, {_mode(demo)}",
        subtitle=f"{demo.seconds:.0f} s · Ctrl-C stops",
        width=_COLUMNS,
    )


def sparkline(values: list[float], width: int) -> str:
    """Return values from 0 to 1 as a row of bars, averaged to the width."""
    if not values:
        return ""
    size = max(1, -(-len(values) // width))
    means = [sum(part) / len(part) for i in range(0, len(values), size) if (part := values[i : i + size])]
    return "".join(_BARS[round(min(max(mean, 0.0), 1.0) * (len(_BARS) - 1))] for mean in means)


def _add_swarm(grid: Table, demo: DemoState) -> None:
    """Add the rows of a swarm of processes."""
    steps = demo.records.steps
    grid.add_row("tokens", f"{sum(record.tokens for record in steps):,} learnt from" if steps else "…")
    grid.add_row("weights", _weights(demo) if steps else "…")
    grid.add_row("verdicts", _verdicts(demo))
    trained: Counter[bytes] = Counter()
    for record in steps:
        trained += record.by_sampler
    grid.add_row("peers", f"{_most_peers(demo)} met by the best connected")
    for member in demo.members:
        grid.add_row("", _one_member(member, trained))
    for each in caught(demo):
        name = each.member.name if each.member else each.peer_id
        grid.add_row("caught", Text(f"{name} (peer …{each.peer_id[-8:]}): {each.words}", style="red"))


def _one_member(member: NodeStatus, trained: Counter[bytes]) -> Text:
    if not member.is_up:
        return Text(f"{member.name:<11} …", style="dim")
    parts = [f"{member.name:<11} version {'…' if member.version is None else member.version}"]
    if member.role == "bootstrap":
        parts = [f"{member.name:<11} introduces nodes to each other"]
    if member.engine:
        parts.append(member.engine)
    if member.role == "sampler":
        parts.append(f"{trained[member.public]:,} groups learnt from")
    return Text(", ".join(parts))


def _held_out(demo: DemoState) -> str:
    first, curve = demo.first, held_out_curve(demo)
    at_first = f"{first.accuracy:.0%} of {len(first.answers)} prompts right at first" if first else ""
    if demo.last:
        return f"{at_first}, {demo.last.accuracy:.0%} at the end"
    return at_first + "".join(f", {reward:.0%} at step {step}" for step, reward in curve[-1:] if step)


def _at_first(demo: DemoState) -> str:
    """Return what the model says before it has learnt, once that is known."""
    if demo.first is None:
        return ""
    said = "; ".join(f"{each.question} {each.text}" for each in demo.first.answers[:SHOWN])
    return f"\n        held out {demo.first.accuracy:.0%} right; it says: {printable(said)}"


def _who_comes(demo: DemoState) -> str:
    if not demo.members:
        return f"{demo.config.samplers} samplers and a trainer"
    up = [member.name for member in demo.members if member.is_up]
    return f"{len(demo.members)} processes: {', '.join(up) or 'none'} ready"


def _most_peers(demo: DemoState) -> int:
    return max((member.peers for member in demo.members), default=0)


def _weights(demo: DemoState) -> str:
    sent, whole = bytes_out(demo)
    if not sent:
        return "…"
    return f"{sent / 1e6:,.1f} MB of changes; whole weights would be {whole / 1e6:,.0f} MB"


def _verdicts(demo: DemoState) -> str:
    found = verdicts(demo)
    return ", ".join(f"{count:,} {name}" for name, count in found.most_common()) or "none yet"


def _mode(demo: DemoState) -> str:
    return "sequential pull" if demo.config.mode == "sequential" else "asynchronous push-pull"


def _recent(demo: DemoState) -> Counter[int]:
    ages: Counter[int] = Counter()
    for record in demo.records.steps[-20:]:
        ages += record.staleness
    return ages


def _ages(demo: DemoState) -> str:
    ages = _recent(demo)
    return f"{sum(age * n for age, n in ages.items()) / max(ages.total(), 1):.1f}"


def _histogram(demo: DemoState) -> str:
    ages = _recent(demo)
    if not ages:
        return "…"
    shares = (f"{age}: {ages[age] / ages.total():.0%}" for age in sorted(ages))
    return "  ".join(shares) + "  (steps old: share)"


def _pace(demo: DemoState) -> str:
    recent = demo.records.steps[-20:]
    if len(recent) < 2:
        return "…"
    seconds = recent[-1].at_seconds - recent[0].at_seconds
    pace = (len(recent) - 1) / max(seconds, 1e-9)
    return f"{pace:.1f} steps/s" if pace >= 1 else f"{1 / pace:.1f} s a step"
