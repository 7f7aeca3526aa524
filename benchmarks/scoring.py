"""Cost of the jail: a cheap score in the pool against the same call in this process.

The score is `digits-reverse`'s, in batches and one by one, as a built-in contract (one process for
all texts) and as a plug-in (a forked child per text).

Pairs are interleaved and medians taken; one core scores and the other one asks.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.pairs import interleaved, median_times
from echo_node.contract import Score, load, prompt_of, score_of
from echo_node.contract.sandbox import Sandbox

BATCH = 256
REPEATS = 40
STARTS = 7
SINGLES = 200
PLUGGED = 64
"""Texts of one batch of the plug-in."""
PLUG_IN = """
from echo_node.contract.builtin.digits_reverse import DigitsReverse
class Plugged(DigitsReverse):
    name, version = "digits-plugged", "1"
"""


def start_seconds() -> float:
    """Return the seconds from nothing to the first score of a fresh process."""
    start = time.perf_counter()
    with Sandbox("digits-reverse", "1") as sandbox:
        assert len(sandbox.prompts([bytes(32)])) == 1
        return time.perf_counter() - start


def plug_in(folder: Path) -> Path:
    """Lay the same contract out in a folder as a plug-in."""
    facts = folder / "plugged-1.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: plugged\nVersion: 1\n")
    (facts / "entry_points.txt").write_text("[echo_node.contracts]\ndigits-plugged@1 = plugged:Plugged\n")
    (folder / "plugged.py").write_text(PLUG_IN)
    return folder


def main() -> None:
    contract = load("digits-reverse", "1")
    prompts = [prompt_of(contract, number.to_bytes(32, "big")) for number in range(BATCH)]
    texts = [contract.answer(prompt) if number % 2 else "12345" for number, prompt in enumerate(prompts)]
    batch = list(zip(prompts, texts, strict=True))

    def in_process() -> list[Score]:
        return [score_of(contract, prompt, text) for prompt, text in batch]

    with Sandbox("digits-reverse", "1") as sandbox:
        jailed = partial(sandbox.scores, batch)
        assert jailed() == in_process(), "both sides do the same work"
        many, plain = median_times(interleaved(jailed, in_process, REPEATS))
        single, _ = median_times(
            interleaved(
                partial(sandbox.scores, batch[:1]), partial(score_of, contract, prompts[0], texts[0]), SINGLES
            )
        )
    with (
        tempfile.TemporaryDirectory() as folder,
        Sandbox("digits-plugged", "1", folders=[plug_in(Path(folder))]) as sandbox,
    ):
        some = batch[:PLUGGED]
        assert sandbox.scores(some) == in_process()[:PLUGGED], "both sides do the same work"
        forked, _ = median_times(interleaved(partial(sandbox.scores, some), in_process, STARTS))
    started = statistics.median(start_seconds() for _ in range(STARTS))
    figures = {
        "jailed_score_us": round(many / BATCH * 1e6, 1),
        "in_process_us": round(plain / BATCH * 1e6, 1),
        "jailed_single_us": round(single * 1e6, 1),
        "plug_in_score_us": round(forked / PLUGGED * 1e6, 1),
        "plug_in_scores_per_second": round(PLUGGED / forked),
        "start_ms": round(started * 1e3, 1),
    }
    table = Table("a score of digits-reverse", "µs", title=f"medians of 7, batches of {BATCH}")
    table.add_row("in this process", f"{figures['in_process_us']}")
    table.add_row("in the jail, in batches", f"{figures['jailed_score_us']}")
    table.add_row("in the jail, one by one", f"{figures['jailed_single_us']}")
    table.add_row("of a plug-in, in a child per text", f"{figures['plug_in_score_us']}")
    table.add_row("in a jail that has to be started", f"{figures['start_ms'] * 1e3:.0f}")
    Console().print(table)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
