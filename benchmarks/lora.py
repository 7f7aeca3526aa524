"""LoRA against full training of the same model: bytes of a version, memory, step, sampling, swap.

Shapes of 135 M and 494 M parameters, random weights, rank 16 on all linear modules. Versions are
trained and published as a trainer does, at a learning rate of 1e-6 for the whole model and 1e-5 for
the adapter; engines run in worker processes as in a node and take versions from the store. Bytes
over full training at 4 B, 7 B and 32 B are computed: the shares measured at 494 M (135 M with
`--quick`) times the sizes of those models and adapters. Each part is kept once it is measured, and
`--resume` goes on with what is kept.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table

from benchmarks import engine_models
from benchmarks.lora_models import PAPER, lora_folder, sizes_of
from benchmarks.lora_parts import (
    FULL_RATE,
    LORA_RATE,
    base_memory,
    peft_times,
    sampling_speeds,
    swap_seconds,
    version_bytes,
    vocabulary_of,
)

KEPT: Final = engine_models.FOLDER.parent / "lora.json"
LLAMA, TORCH = "llama/f16", "torch/f32"
SHAPES: Final = ("135M", "494M")

Figures = dict[str, float]


def versions(shape: str, *, quick: bool) -> Figures:
    """Measure the bytes of versions, of an adapter and of the whole model."""
    steps, tokens = (4, 16) if quick else (8, 64)
    vocabulary = vocabulary_of(shape)
    lora = version_bytes(lora_folder(shape), vocabulary, rate=LORA_RATE, steps=steps, tokens=tokens)
    full = version_bytes(
        engine_models.folder(shape), vocabulary, rate=FULL_RATE, steps=min(steps, 4), tokens=tokens
    )
    return {
        f"bytes_over_adapter_{shape}": lora.share,
        f"bytes_over_full_{shape}": lora.delta / full.delta,
        f"full_share_{shape}": full.share,
    }


def memory(shape: str, *, quick: bool) -> Figures:  # noqa: ARG001 - the same either way
    """Measure the trainer's bytes per parameter of the base."""
    return {f"bytes_per_base_parameter_{shape}": base_memory(lora_folder(shape))}


def step(shape: str, *, quick: bool) -> Figures:
    """Time a step beside PEFT's in TRL."""
    groups, size, tokens, pairs = (2, 4, 32, 1) if quick else (8, 8, 128, 3)
    times = peft_times(shape, groups=groups, size=size, tokens=tokens, pairs=pairs)
    return {f"step_over_peft_trl_{shape}": times.ratio, f"step_seconds_{shape}": times.ours}


def sampling(shape: str, *, quick: bool) -> Figures:
    """Draw with an adapter and without, by both engines."""
    tokens, pairs = (16, 3) if quick else (64, 7)
    found = {}
    for name, engine_class in (("llama", LLAMA), ("torch", TORCH)):
        speeds = sampling_speeds(shape, engine_class, tokens=tokens, pairs=pairs)
        found[f"{name}_with_adapter_{shape}"] = speeds.ratio
        found[f"{name}_tokens_{shape}"] = speeds.adapted
    return found


def swap(shape: str, *, quick: bool) -> Figures:
    """Time an engine's change to the next version, by both engines."""
    steps = 2 if quick else 6
    return {
        f"{name}_swap_ms_{shape}": 1e3 * swap_seconds(shape, engine_class, steps=steps)
        for name, engine_class in (("llama", LLAMA), ("torch", TORCH))
    }


PARTS: Final[dict[str, Callable[..., Figures]]] = {
    "versions": versions,
    "memory": memory,
    "step": step,
    "sampling": sampling,
    "swap": swap,
}


def summary(found: Figures) -> Figures:
    """Return the figures with a bound: the worst of the shapes that were measured; and the rest."""

    def worst(name: str, choose: Callable[[list[float]], float] = max) -> Figures:
        values = [value for key, value in found.items() if key.startswith(f"{name}_")]
        return {name: choose(values)} if values else {}

    swaps = {f"swap_ms_{key}": value for key, value in found.items() if "_swap_ms_" in key}
    figures = {
        **worst("bytes_over_adapter"),
        **worst("bytes_per_base_parameter"),
        **worst("step_over_peft_trl"),
        **worst("llama_with_adapter", min),
        **worst("torch_with_adapter", min),
        **({"swap_ms": max(swaps.values())} if swaps else {}),
    }
    measured = next((each for each in reversed(SHAPES) if f"full_share_{each}" in found), None)
    if measured is not None:
        for name in PAPER:
            model, adapter = sizes_of(name)
            lora, full = found[f"bytes_over_adapter_{measured}"], found[f"full_share_{measured}"]
            figures[f"bytes_over_full_{name}"] = lora * adapter / (full * model)
    return {name: round(value, 5) for name, value in {**figures, **found}.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="135 M alone, short sides; for a trial")
    parser.add_argument("--resume", action="store_true", help="go on with what an earlier run has kept")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="parts to measure")
    parser.add_argument("--kept", type=Path, default=KEPT, help="the file of what was measured")
    wish = parser.parse_args(arguments)
    shapes = SHAPES[:1] if wish.quick else SHAPES
    kept = _read(wish.kept) if wish.resume else {}
    rows, figures = Table("part", "shape", "figure", "measured"), {}
    for shape in shapes:
        for name in wish.only:
            key = f"{name} {shape}{' quick' if wish.quick else ''}"
            if key not in kept:
                kept[key] = PARTS[name](shape, quick=wish.quick)
                _write(wish.kept, kept)
            figures |= kept[key]
            for figure, value in kept[key].items():
                rows.add_row(name, shape, figure, f"{value:.4g}")
    Console(width=120).print(rows)
    print(json.dumps(summary(figures)))


def _read(file: Path) -> dict[str, Figures]:
    found: dict[str, Figures] = json.loads(file.read_text("utf-8")) if file.exists() else {}
    return found


def _write(file: Path, kept: dict[str, Figures]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(".part")
    part.write_text(json.dumps(kept), "utf-8")
    part.replace(file)


if __name__ == "__main__":
    main()
