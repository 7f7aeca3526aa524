"""Summary of an ended demo as text and as figures, and what to try next."""

from __future__ import annotations

from typing import Final

from echo_node.demo.held_out import SHOWN, Answer
from echo_node.demo.node_status import DemoState, NodeStatus, bytes_out, caught, verdicts
from echo_node.demo.view import wrap
from echo_node.runtime.exit_codes import command_name

_CHARACTERS: Final = 12
"""Characters of an answer that are shown."""


def summary(demo: DemoState, picture: str | None) -> str:
    """Return the text that is printed at the end."""
    steps = demo.records.steps
    if not steps:
        return "The demo stopped before its first step."
    first = sum(record.reward for record in steps[:10]) / len(steps[:10])
    lines = [
        f"In {demo.seconds:.0f} s and {len(steps)} steps the swarm taught the model to {demo.task.skill}:",
        f"it was right {first:.0%} of the time at first, and {demo.records.reward():.0%} at the end.",
        *_about_held_out(demo),
        (
            f"{demo.config.samplers} samplers drew {sum(record.tokens for record in steps):,} tokens for it, "
            f"{_how_old(demo.records.max_staleness)}."
        ),
    ]
    if demo.members:
        lines += [part for text in _about_the_swarm(demo) for part in wrap(text)]
    if picture:
        lines.append(f"The curve is in {picture}.")
    return "\n".join([*lines, *_next(demo)])


def outcome(demo: DemoState) -> dict[str, float | int | str]:
    """Return the figures of a demo; with cheats, also how many were caught."""
    figures: dict[str, float | int | str] = {
        "final_reward": round(demo.records.reward(), 4),
        "steps": len(demo.records.steps),
        "seconds": round(demo.seconds, 2),
        "mode": demo.config.mode,
        "max_staleness_trained": demo.records.max_staleness,
    }
    if demo.first:
        figures["held_out_before"] = round(demo.first.accuracy, 4)
    if demo.last:
        figures["held_out_after"] = round(demo.last.accuracy, 4)
    if demo.config.hostile:
        cheats = [member for member in demo.members if member.cheat]
        found = {each.peer_id for each in caught(demo)}
        figures["cheats"] = len(cheats)
        figures["caught"] = sum(member.peer_id in found for member in cheats)
        figures["honest_muted"] = len(found - {member.peer_id for member in cheats})
    return figures


def _about_held_out(demo: DemoState) -> list[str]:
    """Return held-out accuracy and answers, at first and at the end.

    Training never uses those prompts.
    """
    first, last = demo.first, demo.last
    if first is None or last is None:
        return []
    lines = [
        (
            f"On {len(last.answers)} held-out prompts it was right {first.accuracy:.0%} of the time at first,"
            f" and {last.accuracy:.0%} at the end. What it says to some of them:"
        )
    ]
    for before, after in list(zip(first.answers, last.answers, strict=True))[:SHOWN]:
        lines.append(f"  {before.question:<26} at first {_said(before):<16} at the end {_said(after)}")
    return lines


def _said(answer: Answer) -> str:
    return f"{answer.text[:_CHARACTERS]!r}{'' if answer.reward else ' (wrong)'}"


def _how_old(steps: int) -> str:
    if not steps:
        return "all of them from the newest policy"
    return f"none of them from a policy more than {steps} {'step' if steps == 1 else 'steps'} old"


def _about_the_swarm(demo: DemoState) -> list[str]:
    engines = ", ".join(member.engine for member in demo.members if member.engine)
    lines = [
        (
            f"{len(demo.members)} processes took part over loopback: a seed, a trainer, a verifier and"
            f" samplers ({engines})."
        )
    ]
    sent, whole = bytes_out(demo)
    if sent:
        versions = sum(1 for record in demo.records.steps if record.bytes_out)
        lines.append(
            f"{versions} new versions were sent as {sent / 1e6:,.1f} MB of changes: whole weights would have been"
            f" {whole / 1e6:,.0f} MB, {whole / sent:.1f} times as much."
        )
    lines += [_verdict_counts(demo)]
    muted = caught(demo)
    lines += [
        f"Caught: {_name(each.member)}peer {each.peer_id}: {each.words} ({each.reason}). The trainer muted it"
        f" after training on {each.trained} of its groups."
        for each in muted
    ]
    found_ids = {each.peer_id for each in muted}
    lines += [
        f"Not caught so far: {member.name}, peer {member.peer_id}."
        for member in demo.members
        if member.cheat and member.peer_id not in found_ids
    ]
    return lines


def _verdict_counts(demo: DemoState) -> str:
    found = verdicts(demo)
    if found:
        counts = ", ".join(f"{count:,} {name}" for name, count in found.most_common())
        return f"The verifier checked {found.total():,} groups: {counts}."
    return "The verifier had no time to check a group."


def _name(member: NodeStatus | None) -> str:
    return f"{member.name}, " if member else ""


def _next(demo: DemoState) -> list[str]:
    other = "async" if demo.config.mode == "sequential" else "sequential"
    name = command_name()
    if not demo.members:
        return [f"Next: {name} demo --mode {other}, or examples/one_process.py for how it is put together."]
    same = "" if demo.config.model == "embedded" else f" --model {demo.config.model}"
    lines = [f"  {name} demo{same} --mode {other}"]
    if demo.config.model == "embedded":
        lines.append(f"  {name} demo --model smollm2    a pretrained language model learns")
    if demo.config.task is None and demo.config.model == "embedded":
        lines.append(f"  {name} demo --task guess-number    several turns")
    if not demo.config.hostile and demo.config.model == "embedded" and demo.config.task is None:
        lines.append(f"  {name} demo --hostile     two samplers cheat, and are caught")
    return [
        "Next:",
        *lines,
        f"  {name} run new --help     a run of your own",
        f"  {name} join --help        take part in one",
    ]
