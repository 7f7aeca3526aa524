"""The swarm's side: `echo-node run new` and `join`, as an operator and volunteers type them.

A trainer, a verifier and two samplers (llama.cpp and torch) are processes on loopback; the trainer
is the seed of its own run. After training its store is read, and versions are measured.
"""

from __future__ import annotations

import itertools
import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Final

from benchmarks.smollm2_task import (
    ENGINE,
    LIMIT_SECONDS,
    PROMPTS,
    Trained,
    accuracy,
    settings,
)
from echo_node.config import one_thread_environment
from echo_node.engine.engine_classes import EngineSpec
from echo_node.engine.worker.client import WorkerEngine
from echo_node.runs.run import read_model
from echo_node.runs.spec import open_run
from echo_node.storage.state_dir import prepared
from echo_node.telemetry.evaluations import read_evaluations
from echo_node.telemetry.metrics import StepRecord
from echo_node.telemetry.step_db import read_records
from echo_node.weights.engine_sync import hand_over, opened
from echo_node.weights.store import WeightsStore
from echo_node.weights.tensors import layout_of

START_SECONDS: Final = 300.0
END_SECONDS: Final = 60.0
HONEST: Final = "honest"
REFUSED: Final = ("dishonest", "condemned", "failed-check", "muted")
"""Reasons of dropped groups that say a sampler lied."""


def train_swarm(side: str, task: str, seed: int, steps: int, prompts: int = PROMPTS) -> Trained:
    """Train over real processes, then measure the versions."""
    with tempfile.TemporaryDirectory(prefix="echo-smollm2-") as name:
        place = Path(name)
        run = _seal(place, task, "async" if side == "async" else "sequential")
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        began = time.monotonic()
        _play(place, run, steps)
        seconds = time.monotonic() - began
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        (state,) = (place / "trainer" / "runs").iterdir()
        records = read_records(state / "records.sqlite")
        if not records:
            raise SystemExit(f"{task}, {side}: no step was taken; see {_tail(place / 'trainer.err')}")
        whole = sum(len(tensor.data) for tensor in read_model(_folder(run)).values())
        sent = [record.bytes_out for record in records if record.bytes_out]
        verifier = _last(place / "verifier.out", "progress")
        verdicts = verifier.get("verdicts", {})
        taken = sum(len(record.groups) for record in records)
        gaps = [later.at_seconds - now.at_seconds for now, later in itertools.pairwise(records)]
        more = {
            "delta_ratio": whole / statistics.median(sent),
            "checked": sum(verdicts.values()),
            "looked_share": round(sum(verdicts.values()) / taken, 4),
            "passed_over": verifier.get("passed_over", 0),
            "refused": _refused(verdicts, records[-1]),
            "rewards": [round(record.reward, 4) for record in records],
            "waited": round(sum(record.waited_seconds for record in records), 1),
            "cpu_seconds": round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 1),
        }
        curve = _curve(run, state, prompts)
        return Trained(
            side, task, seed, records[-1].step, curve, seconds, statistics.median(gaps or [0]), more
        )


def _seal(place: Path, task: str, mode: str) -> Path:
    """Write the run's file and seal it by `run new`."""
    values = settings(task, mode)
    values["trainers"] = [prepared(place / "trainer").identity().peer_id]
    values["verifiers"] = [prepared(place / "verifier").identity().peer_id]
    file = place / "run.toml"
    file.write_text("".join(_toml(name, value) for name, value in _sorted(values)), "utf-8")
    words = ("run", "new", str(file), "--out", str(place / "run"), "--state", str(place / "trainer"))
    subprocess.run(_command(*words), check=True, stdout=subprocess.DEVNULL, timeout=START_SECONDS * 2)
    return place / "run"


def _play(place: Path, run: Path, steps: int) -> None:
    """Run all nodes until the trainer has taken its steps, or the time is over."""
    with _nodes() as start:
        words = ("--steps", str(steps), "--first-samplers", "2")
        trainer = start(place, "trainer", *words, str(run))
        seed = _listening(place / "trainer.out", trainer)
        for name, engine in (("llama", "llama/f16"), ("torch", "torch/f32")):
            words = ("--engine", engine, "--slots", "4", "--seed", seed)
            start(place, name, *words, str(run), role="sampler")
        start(place, "verifier", "--seed", seed, str(run))
        try:
            trainer.wait(LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            trainer.send_signal(signal.SIGINT)
            trainer.wait(END_SECONDS)


@contextmanager
def _nodes() -> Iterator[Any]:
    """Start nodes; end all of them with the block."""
    started: list[subprocess.Popen[bytes]] = []

    def start(place: Path, name: str, *words: str, role: str = "") -> subprocess.Popen[bytes]:
        common = ("--role", role or name, "--state", str(place / name), "--threads", "1", "--json")
        listen = ("--listen", "/ip4/127.0.0.1/tcp/0", "--yes")
        with (place / f"{name}.out").open("wb") as out, (place / f"{name}.err").open("wb") as err:
            started.append(
                subprocess.Popen(
                    _command("join", *common, *listen, *words),
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                    env=one_thread_environment(),
                    start_new_session=True,  # Ctrl-C reaches the benchmark alone, which ends them
                )
            )
        return started[-1]

    try:
        yield start
    finally:
        for each in started:
            each.terminate()
        deadline = time.monotonic() + END_SECONDS
        for each in started:
            try:
                each.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                each.kill()
                each.wait()


def _curve(run: Path, state: Path, prompts: int) -> list[tuple[int, float]]:
    """Return what the trainer measured beside its steps, and the ends on more prompts."""
    between = {each.step: each.reward for each in read_evaluations(state)}
    with closing(open_run(run)) as found:
        layout = layout_of(read_model(found.folder))
        with (
            WeightsStore.open(state / "weights", found.rules, layout) as store,
            closing(WorkerEngine(EngineSpec(ENGINE, found.folder, rows=32))) as engine,
        ):
            engine.start()
            engine.load(bytes(32), read_model(found.folder))
            first = accuracy(found, engine, prompts)
            if (tip := store.tip) is None:
                raise SystemExit("the trainer has published no version")
            with opened(store, tip.id) as held:
                hand_over(held, engine)
            last = accuracy(found, engine, prompts)
    return sorted({**between, 0: first, tip.message.step: last}.items())


def _folder(run: Path) -> Path:
    with closing(open_run(run)) as found:
        return found.folder


def _refused(verdicts: dict[str, int], last: StepRecord) -> int:
    """Return how many groups of these honest samplers were found dishonest, by anybody."""
    by_verifier = sum(count for name, count in verdicts.items() if name != HONEST)
    return by_verifier + sum(last.dropped.get(reason, 0) for reason in REFUSED)


def _listening(file: Path, node: subprocess.Popen[bytes]) -> str:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and node.poll() is None:
        found = _last(file, "listening")
        if found:
            return str(found["addresses"][0])
        time.sleep(0.2)  # the node writes a file; there is no event to wait for
    raise SystemExit(f"the trainer did not listen: {_tail(file.with_suffix('.err'))}")


def _last(file: Path, event: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for line in file.read_text("utf-8", "replace").splitlines():
        try:
            each = json.loads(line)
        except ValueError:
            continue
        if isinstance(each, dict) and each.get("event") == event:
            found = each
    return found


def _tail(file: Path) -> str:
    return file.read_text("utf-8", "replace")[-2000:]


def _command(*words: str) -> list[str]:
    return [sys.executable, "-P", "-m", "echo_node.cli.demo_process", str(os.getpid()), *words]


def _sorted(values: dict[str, Any]) -> Sequence[tuple[str, Any]]:
    """Return plain values before tables, as TOML wants them."""
    return sorted(values.items(), key=lambda pair: isinstance(pair[1], dict))


def _toml(name: str, value: Any) -> str:
    if isinstance(value, dict):
        return f"\n[{name}]\n" + "".join(_toml(*pair) for pair in value.items())
    return f"{name} = {json.dumps(value)}\n"
