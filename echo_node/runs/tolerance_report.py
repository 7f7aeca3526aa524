"""A run's engine tolerances in words, beside the known ones of each class."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from echo_node.runs.run import ENGINES
from protocol.manifest import EngineTolerance

FAR_WIDER: Final = 3.0
"""Multiple of a known bound from which on a run's bound is far wider: cheats may hide in it."""
_WORDS: Final = {
    "d_mean": "mean",
    "d_most": "token",
    "z_mean": "scaled mean",
    "z_most": "scaled token",
    "gap_most": "log-probability",
}


def describe_tolerances(engines: Sequence[EngineTolerance]) -> str:
    """Return one line: class bounds that differ from the known ones, and those."""
    parts = []
    same = []
    for each in engines:
        known = known_tolerance(each.engine)
        if known is None:
            bounds = ", ".join(f"{word} {getattr(each, name):g}" for name, word in _WORDS.items())
            parts.append(f"{each.engine} {bounds} (no known bands)")
            continue
        differing = [
            f"{word} {getattr(each, name):g} (known {getattr(known, name):g})"
            for name, word in _WORDS.items()
            if getattr(each, name) != getattr(known, name)
        ]
        if differing:
            parts.append(f"{each.engine} {', '.join(differing)}")
        else:
            same.append(each.engine)
    if same:
        parts.append(f"{', '.join(same)} as known")
    return "; ".join(parts)


def far_wider(engines: Sequence[EngineTolerance]) -> list[str]:
    """Return the classes with a bound that is far wider than the known one."""
    return [
        each.engine
        for each in engines
        if (known := known_tolerance(each.engine)) is not None
        and any(getattr(each, name) > FAR_WIDER * getattr(known, name) for name in _WORDS)
    ]


def known_tolerance(engine_class: str) -> EngineTolerance | None:
    """Return the known tolerance of a class: that of the embedded model."""
    return next((each for each in ENGINES if each.engine == engine_class), None)
