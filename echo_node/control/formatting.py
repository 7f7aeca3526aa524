"""Format a node's snapshot as text for the terminal.

Text that others chose, such as a run's name, is reduced to one printable line.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from echo_node.control.offline_report import OfflineReport
from echo_node.errors import one_line
from echo_node.runtime.pause_gate import BATTERY, LEAVING, PERSON

Row = tuple[str, str]


def rows(snapshot: Mapping[str, Any]) -> list[Row]:
    """Return named lines of a snapshot, the most important first."""
    progress: Mapping[str, Any] = snapshot.get("progress") or {}
    node: Mapping[str, Any] = snapshot.get("node") or {}
    found = [
        ("doing", _doing(snapshot, progress, node)),
        ("clock", one_line(str(progress.get("clock") or ""))),
        ("run", _run(snapshot.get("run"))),
        ("version", _version(progress)),
        ("speed", _speed(progress)),
        ("learning", _learning(progress)),
        ("held out", _held_out(progress.get("evaluation"))),
        ("groups", _groups(progress)),
        ("verdicts", _counts(progress.get("verdicts"))),
        ("credit", _credit(progress)),
        ("peers", _peers(snapshot, progress)),
        ("reach", one_line(str(snapshot.get("reach") or "")).rstrip(".")),
        ("identity", one_line(str(node.get("peer_id", "")))),
        ("since", _since(snapshot, node)),
        ("state", one_line(str(node.get("state", "")))),
    ]
    return [(name, text) for name, text in found if text]


def line(snapshot: Mapping[str, Any]) -> str:
    """Return a snapshot as one line, for logs."""
    shown = ("doing", "version", "speed", "learning", "held out", "groups", "verdicts", "credit", "peers")
    parts = [text for name, text in rows(snapshot) if name in shown]
    return f"{time.strftime('%H:%M:%S', time.localtime(_number(snapshot.get('at'))))}  {'; '.join(parts)}"


def held_rows(held: OfflineReport, now: float) -> list[Row]:
    """Return named lines of a state folder without a running node."""
    if not held.path.is_dir():
        return [("state", f"{one_line(str(held.path))} does not exist yet")]
    backup = "a backup was made" if held.backed_up else "no backup yet: echo-node keys backup"
    nobody = one_line(held.key_problem) or "no key yet"
    found = [("identity", f"{held.peer_id} ({backup})" if held.peer_id else nobody)]
    for run in held.runs:
        named = f"{run.id[:12]} {one_line(run.name)}".rstrip()
        found.append(("run", f"{named}, {size(run.bytes)}, of which weights {size(run.weights)}"))
        if run.credit is not None:
            found.append(
                ("credit", f"{_credit({'credit': asdict(run.credit)})}, as it was when the node ended")
            )
        elif run.credit_problem:
            found.append(("credit", one_line(run.credit_problem)))
    found.append(("disk", size(held.bytes)))
    if held.last_seen is not None:
        found.append(("last seen", f"{duration(now - held.last_seen)} ago"))
    found.append(("state", one_line(str(held.path))))
    return found


def size(count: float) -> str:
    """Format a number of bytes."""
    for unit in ("bytes", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}"
        count /= 1000
    return f"{count:,.1f} GB"


def duration(seconds: float) -> str:
    """Format a duration in its two largest units."""
    minutes, seconds = divmod(max(0, int(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {seconds} s" if minutes else f"{seconds} s"


def _doing(snapshot: Mapping[str, Any], progress: Mapping[str, Any], node: Mapping[str, Any]) -> str:
    role = one_line(str(node.get("role", "node")))
    reasons = progress.get("paused") or []
    phase = snapshot.get("phase")
    if phase == "paused" or reasons:
        return f"{role}, {_paused([one_line(str(reason)) for reason in reasons])}"
    if phase != "working":
        return f"{role}, {one_line(str(phase))}"
    if (hindered := _hindered(progress)) is not None:
        return one_line(f"{role}, {hindered}")
    why = progress.get("waits_for")
    batch = progress.get("batch") or progress.get("requested")
    more = f"waiting: {why}" if why else f"working: {batch}" if batch else "working"
    return one_line(f"{role}, {more}")


def _hindered(progress: Mapping[str, Any]) -> str | None:
    """Return what keeps a node from working, or None."""
    if failing := progress.get("failing"):
        return f"failing: {failing}"
    if progress.get("leader_is_silent"):
        return "waiting: the leading trainer is silent"
    if progress.get("joined") is False:
        why = progress.get("turned_away")
        return f"refused by the trainer: {why}" if why else "waiting to be added to the roster"
    return "standing by: another trainer leads" if progress.get("leading") is False else None


def _paused(reasons: list[str]) -> str:
    if LEAVING in reasons:
        return "leaving: finished groups are delivered first"
    advice = {
        BATTERY: "until it is plugged in",
        PERSON: "until echo-node resume",
        "disk": "--max-disk is reached",
    }
    status = f"paused ({', '.join(reasons)})" if reasons else "paused"
    return ", ".join([status, *(advice[reason] for reason in reasons if reason in advice)])


def _run(run: Mapping[str, Any] | None) -> str:
    if not run:
        return ""
    name, author = one_line(str(run.get("name", ""))), one_line(str(run.get("author", "")))
    run_id, mode, contract = str(run.get("id", ""))[:12], run.get("mode", ""), run.get("contract", "")
    return one_line(f"{name} ({run_id}), {mode}, contract {contract}, by {author}")


def _version(progress: Mapping[str, Any]) -> str:
    newest, mine = progress.get("version"), progress.get("engine_version")
    if newest is None:
        return "none known yet" if "version" in progress else ""
    if "engine_version" not in progress:
        return f"{_number(newest):.0f}"
    if mine is None:
        return f"none in the engine yet, the newest known is {_number(newest):.0f}"
    behind = _number(newest) - _number(mine)
    return f"{_number(mine):.0f}, " + (
        "the newest known" if behind <= 0 else f"{behind:.0f} behind the newest known"
    )


def _speed(progress: Mapping[str, Any]) -> str:
    if "tokens_per_second" not in progress:
        return ""
    return f"{_number(progress['tokens_per_second']):,.0f} tokens/s"


def _learning(progress: Mapping[str, Any]) -> str:
    if "reward" not in progress:
        return ""
    samplers = _number(progress.get("samplers"))
    return (
        f"step {_number(progress.get('step')):.0f}, reward {_number(progress['reward']):.3f}, "
        f"{samplers:.0f} {'sampler' if samplers == 1 else 'samplers'}"
    )


def _held_out(found: Any) -> str:
    """Format the evaluations of a trainer on held-out prompts."""
    if not isinstance(found, Mapping):
        return ""
    parts = []
    if found.get("version") is not None:
        parts.append(
            f"reward {_number(found.get('reward')):.3f} ± {_number(found.get('error')):.3f} at version"
            f" {_number(found.get('version')):.0f}, in {_number(found.get('seconds')):.1f} s"
        )
    if found.get("best_version") is not None:
        parts.append(
            f"best {_number(found.get('best_reward')):.3f} at version {_number(found['best_version']):.0f}, kept"
        )
    if found.get("running") is not None:
        done, prompts = _number(found.get("scored")), _number(found.get("prompts"))
        parts.append(
            f"version {_number(found['running']):.0f} is measured, {done:.0f} of {prompts:.0f} prompts"
        )
    if problem := one_line(str(found.get("problem") or "")):
        parts.append(problem)
    return "; ".join(parts) or f"every {_number(found.get('every')):.0f} steps, none measured yet"


def _groups(progress: Mapping[str, Any]) -> str:
    if "accepted" in progress:
        refused = progress.get("refused")
        answered = f"{_number(progress['accepted']):,.0f} accepted, {_total(refused)} refused{_why(refused)}"
        return f"{answered}, {_number(progress.get('waiting')):,.0f} wait for an answer"
    if "dropped" in progress:
        dropped = progress["dropped"]
        return f"{_number(progress.get('waiting')):,.0f} wait, {_total(dropped)} dropped{_why(dropped)}"
    return ""


def _credit(progress: Mapping[str, Any]) -> str:
    credit = progress.get("credit")
    if isinstance(credit, Mapping):
        others = credit.get("attested")
        attested = others if isinstance(others, Mapping) else {}
        own = f"{_verified(credit)}, {_number(credit.get('admitted')):,.0f} more groups accepted"
        more = _number(attested.get("tokens")) > _number(credit.get("tokens"))
        text = f"{_verified(attested)}, as a verifier attests (counted here: {own})" if more else own
        learnt = _number(attested.get("learnt"))
        if learnt > _number(credit.get("groups")) + _number(credit.get("admitted")):
            text += f", {learnt:,.0f} groups learnt from, as a trainer attests"
        condemned = _number(credit.get("condemned"))
        return text + (f", {condemned:,.0f} condemned" if condemned else "")
    if "accepted" in progress:
        return f"{_number(progress['accepted']):,.0f} groups accepted since it started"
    return ""


def _verified(credit: Mapping[str, Any]) -> str:
    return (
        f"{_number(credit.get('tokens')):,.0f} verified tokens in {_number(credit.get('groups')):,.0f} groups"
    )


def _peers(snapshot: Mapping[str, Any], progress: Mapping[str, Any]) -> str:
    if "peers" not in progress:
        return ""
    connected = f"{_number(progress['peers']):.0f} connected"
    muted = [peer for peer in snapshot.get("peers") or [] if peer.get("muted")]
    return connected + (f", {len(muted)} muted" if muted else "")


def _since(snapshot: Mapping[str, Any], node: Mapping[str, Any]) -> str:
    lasted = duration(_number(snapshot.get("at")) - _number(node.get("began")))
    return f"{lasted}, as process {node.get('pid', '?')}, {one_line(str(snapshot.get('program', '')))}"


def _counts(counts: Any) -> str:
    if not isinstance(counts, Mapping):
        return ""
    parts = (f"{_number(count):,.0f} {one_line(str(name))}" for name, count in counts.items())
    return ", ".join(parts) or "none yet"


def _why(counts: Any) -> str:
    return f" ({_counts(counts)})" if counts else ""


def _total(counts: Any) -> str:
    return f"{sum(map(_number, counts.values())) if isinstance(counts, Mapping) else 0:,.0f}"


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else 0.0
