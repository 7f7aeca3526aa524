"""From where to where the numbers of a run's algorithm make sense. A sealed run cannot be changed, and one that learns nothing, or
whose first step is its last, is noticed after days.

The bounds are wide: they keep out slips, such as a lost sign, and leave room for whoever means to switch something off. What
each number is for, the trainer's settings say; this module needs no torch, so that every machine can look before it seals.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from echo_node.errors import ConfigError

CHANGE: Final = "change it under [algorithm] in the run's file, or leave it out for its default"
_OFF: Final = 1e10
"""Beyond every ratio, so that a bound on ratios binds nothing."""
RANGES: Final[Mapping[str, tuple[float, float]]] = {
    "batch_groups": (1, 4096),
    "learning_rate": (1e-12, 1),
    "warm_up": (0, 1_000_000),
    "betas": (0, 0.9999999),
    "epsilon": (1e-20, 1),
    "weight_decay": (0, 10),
    "gradient_norm": (1e-6, 1e6),
    "row_tokens": (1, 2**24),
    "micro_batch_tokens": (1, 2**24),
    "clip_low": (0, 1),
    "clip_high": (1, _OFF),
    "dual_clip": (1, _OFF),
    "tis_cap": (1, _OFF),
    "icepop_low": (1e-10, 1),
    "icepop_high": (1, _OFF),
    "geometric_floor": (0, _OFF),
    "geometric_sigmas": (0, _OFF),
    "veto": (0, 0.9999999),
    "entropy": (-10, 10),
    "kl": (0, 1000),
}


def check_ranges(numbers: Mapping[str, Any]) -> None:
    """Refuse a number that is beyond its range, or is none at all. Names and types are not looked at."""
    for name, value in numbers.items():
        if name not in RANGES:
            continue
        low, high = RANGES[name]
        for each in value if isinstance(value, list | tuple) else (value,):
            if isinstance(each, int | float) and not low <= each <= high:
                raise ConfigError(
                    f"algorithm.{name} is {value!r}, and must be from {low:g} to {high:.10g}", advice=CHANGE
                )
