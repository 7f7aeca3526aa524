"""The trainer at real sizes: bytes a parameter, the output head's peak, step and publishing times.

Shapes of 135 M and 494 M parameters, random weights. Bytes are those of tensors alive when the
optimiser begins, and the temporaries of its step. The head's peak leaves out the weight's gradient,
which the bytes a parameter have, on both sides; the table also has the peak with it. Times are
medians over sides in turn. `--only` measures some of it; the JSON then has what was measured.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.table import Table

from benchmarks import engine_models
from benchmarks.size_memory import CHECKED, TOKENS, head_peaks, step_memory
from benchmarks.size_time import publish_times, step_times

PARAMETERS = {"135M": 134_515_008, "494M": 494_032_768}
STEP_PAIRS = 3
"""Pairs of whole steps: each takes minutes on two cores, so there are fewer than seven."""
PUBLISH_PAIRS = 3
PUBLISH_TOKENS = 4096

Figures = dict[str, float]


def bytes_per_parameter(rows: Table, shape: str = "494M") -> Figures:
    """Measure the bytes a parameter of the three ways to hold weights and gradients."""
    folder, found = engine_models.folder(shape), {}
    ways = {
        "bf16": {"micro_batches": 1, "gradient_dtype": "bf16", "micro_batch_tokens": 4096},
        "accumulating": {"micro_batches": 2, "micro_batch_tokens": 1},
        "f32": {"micro_batches": 2, "micro_batch_tokens": 1, "compute_copy": "f32"},
    }
    for way, settings in ways.items():
        memory = step_memory(folder, **settings)  # type: ignore[arg-type]
        name = f"bytes_per_parameter_{way}"
        found[name] = round(memory.total, 3)
        rows.add_row(name, f"{memory.total:.2f}", f"{memory.temporary:.3f} of it temporaries of the step")
    return found


def head(rows: Table, shape: str = "494M") -> Figures:
    """Measure the head on shapes at 16k tokens; check with real arithmetic at few."""
    folder = engine_models.folder(shape)
    real, same = (head_peaks(folder, CHECKED, shapes_only=only) for only in (False, True))
    assert real == same, "shapes alone give the bytes of the real arithmetic"
    peaks = head_peaks(folder, TOKENS, shapes_only=True)
    found = {"head_peak_over_nv": peaks.ours, "head_peak_over_trl": peaks.ours / peaks.trl}
    rows.add_row("head_peak_over_nv", f"{peaks.ours:.4f}", f"{TOKENS} tokens, without the weight's gradient")
    rows.add_row("", f"{peaks.ours_with_gradient:.4f}", "with it")
    rows.add_row("head_peak_over_trl", f"{peaks.ours / peaks.trl:.4f}", f"TRL's: {peaks.trl:.4f}")
    return {name: round(value, 4) for name, value in found.items()}


def step(rows: Table, shape: str = "135M", *, groups: int = 8, size: int = 8, tokens: int = 128) -> Figures:
    """Time a step beside TRL's."""
    vocabulary = int(engine_models.SHAPES[shape]["vocab_size"])  # type: ignore[call-overload]
    times = step_times(
        engine_models.folder(shape),
        vocabulary,
        PARAMETERS.get(shape, 0),
        groups=groups,
        size=size,
        tokens=tokens,
        pairs=STEP_PAIRS,
    )
    spread = f"{times.ours:.1f} s, TRL {times.trl:.1f} s in micro-batches of {times.micro_batch}"
    rows.add_row("step_time_over_trl", f"{times.ratio:.3f}", f"{spread}; {times.pairs} pairs")
    return {"step_time_over_trl": round(times.ratio, 3)}


def publishing(rows: Table, shape: str = "494M", *, tokens: int = PUBLISH_TOKENS) -> Figures:
    """Time cycles with and without publishing."""
    vocabulary = int(engine_models.SHAPES[shape]["vocab_size"])  # type: ignore[call-overload]
    times = publish_times(
        engine_models.folder(shape), vocabulary, PARAMETERS.get(shape, 0), tokens=tokens, pairs=PUBLISH_PAIRS
    )
    cycle = f"cycle {times.alone:.1f} s alone, {times.beside:.1f} s beside; {PUBLISH_PAIRS} turns of 3 cycles"
    rows.add_row("publish_stall", f"{times.stall:.3f}", cycle)
    rows.add_row("", f"{times.sequential_stall:.3f}", f"sequential, cycle {times.sequential:.1f} s")
    return {"publish_stall": round(times.stall, 3)}


PARTS: dict[str, Callable[[Table], Figures]] = {
    "bytes": bytes_per_parameter,
    "head": head,
    "step": step,
    "publishing": publishing,
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="parts to measure")
    chosen = parser.parse_args(arguments).only
    rows = Table("figure", "measured", "how")
    figures: Figures = {}
    for name, measure in PARTS.items():
        if name in chosen:
            figures |= measure(rows)
    Console(width=120).print(rows)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
