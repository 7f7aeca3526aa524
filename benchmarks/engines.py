"""Engines against `transformers.generate`, bare decoding and static batching.

All in one process and on the same cores, turn by turn. Models have random weights, so that nothing
ends early: 16 completions of one prompt, 64 tokens each (16 for the large model, whose peer needs a
while). Ours draws from the whole vocabulary by the keyed stream in float64 and gives
log-probabilities; the peers do what they do.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # two pools of threads on the same cores: idle ones sleep

import argparse
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
import transformers
from rich.console import Console
from rich.table import Table

from benchmarks import engine_models
from benchmarks.pairs import PAIRS, interleaved, median_ratio, median_times
from echo_node.engine.base import Change, Finished, SamplingLimits, SlotRequest, Update, generate_groups
from echo_node.engine.decoder import Decoder
from echo_node.engine.engine_classes import EngineSpec, make_engine
from echo_node.engine.local import LocalEngine
from echo_node.engine.token_sampling import draw

GROUP = 16
PROMPT = 32
CLASSES = ("torch/f32", "llama/f32", "llama/f16", "llama/bf16", "llama/q8_0")
SHORTEST, LONGEST, MIXED, MIXED_ROWS = 16, 512, 64, 16
HEAD, NEXT = b"h" * 32, b"n" * 32
THREADS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def limits(name: str, tokens: int) -> SamplingLimits:
    return SamplingLimits(tokens, 1.0, frozenset(), int(str(engine_models.SHAPES[name]["vocab_size"])))


def request(name: str, tokens: int, *, group: int = GROUP, seed: int = 0) -> SlotRequest:
    luck = np.random.default_rng(seed)
    bounds = limits(name, tokens)
    return SlotRequest(luck.integers(0, bounds.vocab_size, PROMPT), luck.bytes(32), group, bounds)


def engine(name: str, engine_class: str, *, rows: int = GROUP) -> LocalEngine:
    made = make_engine(EngineSpec(engine_class, engine_models.folder(name), "cpu", rows, THREADS))
    made.load(HEAD, engine_models.weights(name))
    return made


class Generate:
    """`transformers.generate`, in float32, as its documentation says."""

    def __init__(self, name: str) -> None:
        place = engine_models.folder(name)
        self._model = transformers.AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32).eval()

    def __call__(self, asked: SlotRequest) -> None:
        ids = torch.from_numpy(asked.prompt)[None].expand(asked.group_size, -1)
        with torch.inference_mode():
            out = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                max_new_tokens=asked.limits.max_tokens,
                min_new_tokens=asked.limits.max_tokens,
                pad_token_id=0,
            )
        assert out.shape == (asked.group_size, asked.prompt.size + asked.limits.max_tokens)


def bare(decoder: Decoder, asked: SlotRequest) -> None:
    """Prompt and decode steps, the same tokens at every step: no draw, no log-probability."""
    length = asked.prompt.size
    decoder.make_room(asked.group_size, length + asked.limits.max_tokens)
    decoder.prefill([0], [asked.prompt])
    for row in range(1, asked.group_size):
        decoder.copy(0, row, length)
    tokens = np.arange(asked.group_size)
    for _ in range(asked.limits.max_tokens - 1):
        decoder.decode(tokens)


def mixed(name: str) -> list[SlotRequest]:
    """Return requests of one completion each, of all lengths."""
    luck = np.random.default_rng(7)
    lengths = luck.permutation(np.linspace(SHORTEST, LONGEST, MIXED).astype(int))
    return [request(name, int(tokens), group=1, seed=place) for place, tokens in enumerate(lengths)]


def static(decoder: Decoder, requests: list[SlotRequest], rows: int) -> None:
    """Decode in static batches, each until its longest row has ended."""
    luck = np.random.default_rng(1)
    for start in range(0, len(requests), rows):
        batch = requests[start : start + rows]
        longest = max(asked.limits.max_tokens for asked in batch)
        decoder.make_room(rows, PROMPT + longest)
        logits = decoder.prefill(range(len(batch)), [asked.prompt for asked in batch])
        places = np.arange(len(batch))
        for _ in range(longest - 1):
            tokens, _logprobs = draw(logits, places, luck.random(len(batch)), 1.0)
            logits = decoder.decode(tokens)


class Versions:
    """A new version of the weights every so many steps, to and fro between two."""

    def __init__(self, made: LocalEngine, name: str, every: int) -> None:
        state = engine_models.weights(name)
        there = engine_models.one_percent(state, 0)
        back = [
            Change(each.tensor, each.positions, np.frombuffer(state[each.tensor].data, "<u2")[each.positions])
            for each in there
        ]
        self._ways = {HEAD: (NEXT, there), NEXT: (HEAD, back)}
        self._engine = made
        self._every = every
        self._steps = 0

    def due(self) -> bool:
        return self._steps >= self._every

    def tick(self) -> bool:
        """Count one step; passed as `stop`, which is called at every step."""
        self._steps += 1
        return False

    def update(self) -> Update:
        self._steps = 0
        since = self._engine.loaded
        assert since is not None
        head, changes = self._ways[since]

        @contextmanager
        def opened(_granule: int) -> Iterator[list[Change]]:
            yield changes

        return Update(since, head, opened)

    def news(self) -> Update | None:
        return self.update() if self.due() else None


def in_flight(made: LocalEngine, versions: Versions, requests: list[SlotRequest]) -> list[Finished]:
    return list(made.generate(requests, stop=versions.tick, news=versions.news))


def drained(made: LocalEngine, versions: Versions, requests: list[SlotRequest]) -> list[Finished]:
    """Drain the running slots before a due version is loaded."""
    waiting = iter(requests)
    left = len(requests)
    finished: list[Finished] = []

    def until_due() -> Iterator[SlotRequest]:
        nonlocal left
        while left and not versions.due():
            left -= 1
            yield next(waiting)

    while left:
        finished += made.generate(until_due(), stop=versions.tick)
        if versions.due():
            made.patch(versions.update())
    return finished


def milliseconds(work: Callable[[], object]) -> float:
    times = []
    for _ in range(PAIRS):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


@dataclasses.dataclass
class Report:
    """Measurements, as a table and as ratios."""

    table: Table
    ratios: dict[str, object] = dataclasses.field(default_factory=dict)
    speeds: dict[str, float] = dataclasses.field(default_factory=dict)

    def compare(
        self,
        key: str,
        what: str,
        tokens: int,
        ours: Callable[[], object],
        peer: Callable[[], object],
        peers_name: str,
    ) -> None:
        """Measure a pair turn by turn, after one round of each that does not count."""
        ours()
        peer()
        pairs = interleaved(ours, peer, 1)
        mine, other = median_times(pairs)
        ratio = median_ratio(pairs)
        self.ratios[key] = round(ratio, 3)
        print(f"{key}: {ratio:.3f}", file=sys.stderr, flush=True)  # whoever breaks it off keeps what is done
        self.table.add_row(
            what, f"{tokens / mine:,.0f}", peers_name, f"{tokens / other:,.0f}", f"{ratio:.2f}"
        )


def measure_small(report: Report, say: Callable[[str], None]) -> None:
    name = "29M"
    asked = request(name, 64)
    tokens = GROUP * 64
    generate = Generate(name)
    for engine_class in CLASSES:
        say(f"{name}: {engine_class}")
        made = engine(name, engine_class)
        key = {"torch/f32": "torch_over_generate_g16", "llama/f16": "llama_over_generate_g16"}.get(
            engine_class
        )

        def ours(made: LocalEngine = made) -> object:
            return generate_groups(made, [asked])

        if key:
            report.compare(
                key,
                f"{name} {engine_class}, 16 at once",
                tokens,
                ours,
                lambda: generate(asked),
                "generate f32",
            )
        if engine_class == "llama/f16":
            report.compare(
                "llama_over_bare_decode",
                f"{name} {engine_class}, 16 at once",
                tokens,
                ours,
                lambda made=made: bare(made._decoder, asked),  # type: ignore[misc] # noqa: SLF001
                "bare decode",
            )
        ours()
        report.speeds[f"{name} {engine_class}"] = round(
            statistics.median(tokens / (milliseconds_once(ours) / 1e3) for _ in range(3)), 1
        )
        made.close()
    report.ratios["tokens_s_per_engine"] = report.speeds


def milliseconds_once(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return 1e3 * (time.perf_counter() - start)


def measure_mixed(report: Report, say: Callable[[str], None]) -> None:
    name = "29M"
    requests = mixed(name)
    tokens = sum(asked.limits.max_tokens for asked in requests)
    say(f"{name}: mixed lengths")
    made = engine(name, "llama/f16", rows=MIXED_ROWS)
    report.compare(
        "mixed_lengths_over_static",
        f"{name} llama/f16, lengths {SHORTEST} to {LONGEST}, {MIXED_ROWS} at once",
        tokens,
        lambda: generate_groups(made, requests),
        lambda: static(made._decoder, requests, MIXED_ROWS),  # noqa: SLF001
        "static batches",
    )
    say(f"{name}: new versions in flight and drained first")
    versions = Versions(made, name, every=150)
    fresh: dict[str, list[float]] = {"in flight": [], "drained": []}

    def counted(which: str, work: Callable[[], list[Finished]]) -> Callable[[], None]:
        def run() -> None:
            finished = work()
            assert len(finished) == len(requests)
            switched = sum(
                each.draw.ids.size - each.draw.spans[1].start for each in finished if len(each.draw.spans) > 1
            )
            fresh[which].append(switched / tokens)

        return run

    report.compare(
        "in_flight_over_drained",
        f"{name} llama/f16, mixed, a version every 150 steps: in flight",
        tokens,
        counted("in flight", lambda: in_flight(made, versions, requests)),
        counted("drained", lambda: drained(made, versions, requests)),
        "drained first",
    )
    report.ratios["in_flight_tokens_after_a_switch"] = round(statistics.median(fresh["in flight"]), 3)
    made.close()


def measure_updates(report: Report, say: Callable[[str], None]) -> None:
    for name, engine_class in (("29M", "llama/f16"), ("29M", "llama/q8_0"), ("29M", "torch/f32")):
        say(f"{name}: new weights into {engine_class}")
        made = engine(name, engine_class)
        state = engine_models.weights(name)
        decoder = made._decoder  # noqa: SLF001
        changes = engine_models.in_runs(engine_models.one_percent(state, 0), state, decoder.granule)
        hot = milliseconds(lambda decoder=decoder, changes=changes: decoder.put(changes))  # type: ignore[misc]
        whole = milliseconds(lambda decoder=decoder, state=state: decoder.load(state))  # type: ignore[misc]

        def afresh(engine_class: str = engine_class, name: str = name) -> None:
            engine(name, engine_class).close()

        again = milliseconds(afresh)
        if engine_class == "llama/f16":
            report.ratios |= {"hot_update_ms": round(hot, 1), "reload_ms": round(again, 1)}
        report.table.add_row(
            f"{name} {engine_class}, 1 % of the weights",
            f"{hot:.1f} ms",
            "all of them",
            f"{whole:.1f} ms",
            "",
        )
        report.table.add_row("", "", "a fresh engine", f"{again:.1f} ms", "")
        made.close()


def measure_large(report: Report, say: Callable[[str], None]) -> None:
    name, tokens = "494M", 16
    say(f"{name}: llama/f16 (making the model takes a minute the first time)")
    asked = request(name, tokens)
    made = engine(name, "llama/f16")
    generate = Generate(name)
    report.compare(
        "llama_494m_over_generate_g16",
        f"{name} llama/f16, 16 at once",
        GROUP * tokens,
        lambda: generate_groups(made, [asked]),
        lambda: generate(asked),
        "generate f32",
    )
    state = engine_models.weights(name)
    changes = engine_models.one_percent(state, 0)
    report.ratios["hot_update_494m_ms"] = round(milliseconds(lambda: made._decoder.put(changes)), 1)  # noqa: SLF001
    made.close()


PARTS = {"small": measure_small, "mixed": measure_mixed, "updates": measure_updates, "large": measure_large}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], help="only these; all of them otherwise")
    wanted = parser.parse_args().parts or list(PARTS)
    torch.set_num_threads(THREADS)
    transformers.logging.set_verbosity_error()
    console, quiet = Console(), Console(stderr=True)
    table = Table("what", "ours, tokens/s", "against", "tokens/s", "ratio")
    report = Report(table)
    with quiet.status("making the models") as status:
        for part in wanted:
            PARTS[part](report, status.update)
    console.print(table)
    console.print(f"{THREADS} threads; ratios are medians of {PAIRS} pairs, turn by turn")
    print(json.dumps(report.ratios))


if __name__ == "__main__":
    main()
