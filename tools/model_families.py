"""Measure every model family in trainer and engines, and write the table of docs/models.md.

Each cell is the mean gap of log-probabilities, in nats a token, from a plain eager forward pass of
transformers, the larger one of before and after a delta; or the reason of the refusal. Models are
tiny and random, as in tests/families: windows that bite, odd head sizes, soft caps that saturate.

    tools/model_families.py             print the table
    tools/model_families.py --write     write it into docs/models.md
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from echo_node.errors import EchoError, EngineError  # noqa: E402 - after the path to it
from echo_node.models.folder import map_folder  # noqa: E402
from echo_node.runs.algorithm import StepSettings  # noqa: E402
from echo_node.trainer import dry_run_worker  # noqa: E402
from echo_node.trainer.step import TrainStep, state_of  # noqa: E402
from echo_node.weights.tensors import from_mapped  # noqa: E402
from tests.families import zoo  # noqa: E402

PAGE: Final = ROOT / "docs" / "models.md"
BEGIN: Final = "<!-- the table: tools/model_families.py --write -->\n"
END: Final = "<!-- end of the table -->\n"
CLASSES: Final = ("torch/f32", "llama/f32", "llama/f16", "llama/bf16", "llama/q8_0")
UNBOUNDED: Final = float("inf")


def table() -> str:
    """Return the table as Markdown."""
    rows = [("model", "trainer", "publish", *CLASSES), *[("---",) * (3 + len(CLASSES))]]
    reasons: list[str] = []
    for name in zoo.MODELS:
        with tempfile.TemporaryDirectory() as folder:
            rows.append((name, *_cells(zoo.make(Path(folder), name), reasons)))
        sys.stderr.write(f"{name}\n")
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    notes = [f"{number}. {reason}" for number, reason in enumerate(reasons, start=1)]
    return "\n".join([*lines, "", *notes, ""])


def _cells(folder: Path, reasons: list[str]) -> list[str]:
    cells, trainer = [], ""
    for engine_class in CLASSES:
        try:
            gaps = dry_run_worker.try_model(folder, {engine_class: UNBOUNDED}, 1.0)
            cells.append(f"{gaps[engine_class]:.0e}")
            trainer = trainer or f"{gaps['trainer']:.0e}"
        except EngineError as error:
            if error.what not in reasons:
                reasons.append(error.what)
            cells.append(f"refused ({reasons.index(error.what) + 1})")
        except EchoError as error:
            cells.append(f"wrong: {error.what}")
    return [trainer, _published(folder), *cells]


def _published(folder: Path) -> str:
    """Return whether what a trainer publishes first is the folder's weights, bit for bit."""
    state = state_of(TrainStep(folder, StepSettings(), threads=1, device="cpu"))
    before = from_mapped(map_folder(folder))
    same = state.keys() == before.keys() and all(
        bytes(state[name].data) == bytes(before[name].data) for name in state
    )
    return "bit for bit" if same else "wrong"


def main() -> None:
    """Print or write the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="write it into docs/models.md")
    dry_run_worker.say = lambda **_: None
    made = table() if not parser.parse_args().write else ""
    if made:
        sys.stdout.write(made)
        return
    text = PAGE.read_text("utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(before + BEGIN + "\n" + table() + "\n" + END + after, "utf-8")


if __name__ == "__main__":
    main()
