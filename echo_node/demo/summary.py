"""What happened in the demo, in plain words, and what to try next. Reads a demo that has ended."""

from __future__ import annotations

from echo_node.demo.standing import Member, Shown, bytes_out, caught, verdicts
from echo_node.demo.view import wrap
from echo_node.program import name_as_called


def summary(demo: Shown, picture: str | None) -> str:
    """The whole of it."""
    steps = demo.records.steps
    if not steps:
        return "The demo stopped before its first step."
    first = sum(record.reward for record in steps[:10]) / len(steps[:10])
    told = [
        f"In {demo.seconds:.0f} s and {len(steps)} steps the swarm taught the model to reverse five digits:",
        f"it was right {first:.0%} of the time at first, and {demo.records.reward():.0%} at the end.",
        (
            f"{demo.config.samplers} samplers drew {sum(record.tokens for record in steps):,} tokens for it, "
            f"{_how_old(demo.records.max_staleness)}."
        ),
    ]
    if demo.members:
        told += [part for text in _of_the_swarm(demo) for part in wrap(text)]
    if picture:
        told.append(f"The curve is in {picture}.")
    return "\n".join([*told, *_next(demo)])


def outcome(demo: Shown) -> dict[str, float | int | str]:
    """The demo in five numbers; with cheats, also how many there were and how many were caught."""
    told: dict[str, float | int | str] = {
        "final_reward": round(demo.records.reward(), 4),
        "steps": len(demo.records.steps),
        "seconds": round(demo.seconds, 2),
        "mode": demo.config.mode,
        "max_staleness_trained": demo.records.max_staleness,
    }
    if demo.config.hostile:
        cheats = [member for member in demo.members if member.cheat]
        found = {each.peer_id for each in caught(demo)}
        told["cheats"] = len(cheats)
        told["caught"] = sum(member.peer_id in found for member in cheats)
        told["honest_muted"] = len(found - {member.peer_id for member in cheats})
    return told


def _how_old(steps: int) -> str:
    if not steps:
        return "all of them from the newest policy"
    return f"none of them from a policy more than {steps} {'step' if steps == 1 else 'steps'} old"


def _of_the_swarm(demo: Shown) -> list[str]:
    engines = ", ".join(member.engine for member in demo.members if member.engine)
    told = [
        (
            f"{len(demo.members)} processes did it together over the loopback: a seed, a trainer, a verifier and"
            f" samplers ({engines})."
        )
    ]
    sent, whole = bytes_out(demo)
    if sent:
        versions = sum(1 for record in demo.records.steps if record.bytes_out)
        told.append(
            f"{versions} new versions went out as {sent / 1e6:,.1f} MB of changes: whole weights would have been"
            f" {whole / 1e6:,.0f} MB, {whole / sent:.1f} times as much."
        )
    told += [_what_was_found(demo)]
    muted = caught(demo)
    told += [
        f"Caught: {_name(each.member)}peer {each.peer_id}: {each.words} ({each.reason}). The trainer hears it no"
        f" more; it had learnt from {each.trained} of its groups."
        for each in muted
    ]
    found_ids = {each.peer_id for each in muted}
    told += [
        f"Not caught so far: {member.name}, peer {member.peer_id}."
        for member in demo.members
        if member.cheat and member.peer_id not in found_ids
    ]
    return told


def _what_was_found(demo: Shown) -> str:
    found = verdicts(demo)
    if found:
        looked = ", ".join(f"{count:,} {name}" for name, count in found.most_common())
        return f"The verifier looked at {found.total():,} groups: {looked}."
    return "The verifier had no time to look at a group."


def _name(member: Member | None) -> str:
    return f"{member.name}, " if member else ""


def _next(demo: Shown) -> list[str]:
    other = "async" if demo.config.mode == "sequential" else "sequential"
    name = name_as_called()
    if not demo.members:
        return [f"Next: {name} demo --mode {other}, or examples/one_process.py for how it is put together."]
    lines = [f"  {name} demo --mode {other}"]
    if not demo.config.hostile:
        lines.append(f"  {name} demo --hostile     two samplers cheat, and are caught")
    return [
        "Next:",
        *lines,
        f"  {name} run new --help     a run of your own",
        f"  {name} join --help        take part in one",
    ]
