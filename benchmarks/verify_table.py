"""The figures of `verify` as tables for people. Whatever was not measured is left blank."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.forgers import DISTANCES, FORGERS
from benchmarks.verify_toploc import BLIND

_CLOSER = "at 0.1 % false alarms, 99 % detection; by the manifest's own bands in brackets"


def show(console: Console, found: dict[str, Any]) -> None:
    """Every forger, versions by their distance, and what honesty costs."""
    tiny = found.get("embedded", {})
    table = Table(
        *("forger", "SmolLM2: groups caught", "tokens needed", "embedded: groups caught", "tokens needed"),
        "TOPLOC",
        title="What the verifier finds",
        caption=_CLOSER,
    )
    for name in FORGERS:
        toploc = "does not see it" if name in BLIND else ""
        table.add_row(name, _share(found, name), _needed(found, name), *_both(tiny, name), toploc)
    console.print(table)
    apart = Table(
        *("weights", "SmolLM2: mean distance", "tokens needed", "embedded: mean distance", "tokens needed"),
        title="How far a version may be off",
    )
    for name in DISTANCES:
        distances = [f"{figures.get('d_mean', {}).get(name, '')}" for figures in (found, tiny)]
        apart.add_row(name, distances[0], _needed(found, name), distances[1], _needed(tiny, name))
    console.print(apart)
    for title, figures in (("SmolLM2", found), ("embedded", tiny)):
        if "verify_over_generate" in figures:
            console.print(
                f"{title}: {figures['honest_refused']} of {figures['honest_completions']} honest completions"
                f" refused; a token costs {figures['verify_over_generate']} of its drawing to verify"
            )
    if "toploc" in found:
        console.print(f"the proof takes 0 bytes a token, TOPLOC's {found['toploc']['bytes_per_token']}")


def _both(figures: dict[str, Any], name: str) -> tuple[str, str]:
    return _share(figures, name), _needed(figures, name)


def _share(figures: dict[str, Any], name: str) -> str:
    caught = figures.get("caught", {}).get(name)
    return "" if caught is None else f"{caught:.0%}"


def _needed(figures: dict[str, Any], name: str) -> str:
    needed = figures.get("tokens_needed", {}).get(name)
    bands = figures.get("tokens_until_condemned", {}).get(name)
    return "" if needed is None else f"{needed}" if bands is None else f"{needed} ({bands})"
