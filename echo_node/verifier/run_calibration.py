"""Calibration of a new run's engine classes on its own model, cached.

Each class that this machine can run draws for some seconds, and the judge's class scores what came.
The bounds are never below the known ones of the class (`tail_fit`): other machines round otherwise.
What was measured is kept by the hash of all that it depends on: the model, the class, temperature
and length, the versions of the libraries, and the code.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Final

import numpy as np
from blake3 import blake3

import echo_node
from echo_node.engine.base import Engine, EngineStoppedError, Finished, Ids, SamplingLimits, SlotRequest
from echo_node.engine.engine_classes import EngineSpec, kinds
from echo_node.engine.host_resources import available_memory, free_cores
from echo_node.engine.worker.client import WorkerEngine
from echo_node.errors import EngineError, StoreError, boundary
from echo_node.models.progress import Progress, no_progress
from echo_node.verifier.calibration import LEAST, WIDE_SHARE
from echo_node.verifier.evidence import RARE
from echo_node.verifier.tail_fit import TokenFigures, fit_tolerance
from echo_node.verifier.tolerance import Tolerance
from echo_node.weights.open_store import read_folder
from protocol import Manifest, ProtocolError
from protocol.digest import derive
from protocol.manifest import EngineTolerance
from protocol.sampling import uniforms

JUDGE: Final = "torch/f32"
"""The class that verifiers and trainers check with."""
SECONDS: Final = 60.0
"""Seconds of drawing and judging, for all classes together; starting the engines comes on top."""
LARGEST: Final = 600_000_000
"""Parameters of a model that is calibrated unasked: a float32 copy of it has 2.4 GB."""
FEWEST_TOKENS: Final = 1_024
"""Fewest measured tokens that bounds are fitted to."""
MOST_TOKENS: Final = 24_000
"""Tokens of a class after which more would tell little."""
KEPT: Final = "calibrations"
"""Folder in the model cache: a file per model and class."""
_HEAD: Final = bytes(32)
_ROWS: Final = 16
"""Completions drawn at once."""
_SLOTS: Final = 128
"""Slots of a class at most."""
_GROUP: Final = 4
_LONGEST: Final = 512
"""Tokens of a completion at most."""
_SHORTEST: Final = 16
"""Tokens of the first completions, whose speed decides how many more there is time for."""
_WARM_UP: Final = 4
"""Tokens of completions that are not counted: the first ones wait for pages and kernels."""
_NARROW_SECONDS: Final = 8.0
"""Seconds for a class with the smallest known bound: it hardly ever differs from the judge."""
_WORKER_BYTES: Final = 1_000_000_000
"""Memory of two engines beside the weights: libraries, caches, logits."""
_BOUNDS: Final = ("d_mean", "d_most", "gap_most", "z_mean", "z_most")
_CODE: Final = ("verifier/calibration.py", "verifier/tail_fit.py", "verifier/tolerance.py", "engine/*.py")
"""Files that a measurement depends on."""


@dataclass(frozen=True, slots=True)
class ClassCalibration:
    """Bounds of a class, and the tokens measured; 0 for the known bounds."""

    tolerance: EngineTolerance
    tokens: int = 0
    why_not: str = ""
    """Why the known bounds stay."""


def calibrate_run(
    manifest: Manifest,
    folder: Path,
    cache: Path,
    classes: Collection[str],
    prompts: Sequence[Ids],
    *,
    asked: bool = False,
    progress: Progress = no_progress,
    seconds: float = SECONDS,
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, ClassCalibration]:
    """Measure a manifest's classes on its model and prompts, or read the cache.

    `asked` calibrates a model that is larger than `LARGEST` too, if it fits into memory.
    """
    floors = {each.engine: each for each in manifest.engines if each.engine in classes}
    installed = {kind.engine_class for kind in kinds() if kind.installed}
    found: dict[str, ClassCalibration] = {}
    files: dict[str, Path] = {}
    parameters = sum(math.prod(tensor.shape) for tensor in read_folder(folder).values())
    why = _why_not(parameters, asked=asked) if JUDGE in installed else f"{JUDGE} is not installed here"
    for name, floor in floors.items():
        files[name] = cache / KEPT / _key(manifest, name)
        kept = _read(files[name], floor)
        if kept is not None:
            found[name] = kept
        elif name not in installed or why:
            found[name] = ClassCalibration(floor, why_not=why or "its packages are not installed here")
    wanted = {name: floor for name, floor in floors.items() if name not in found}
    try:
        for name, made in _measure_all(manifest, folder, wanted, prompts, progress, seconds, clock):
            found[name] = made
            if made.tokens:
                _write(files[name], made)
    except EngineError as error:  # the judge's: what was measured stays, the rest keeps what is known
        lost = wanted.keys() - found.keys()
        found |= {name: ClassCalibration(floors[name], why_not=error.what) for name in lost}
    return _filling(found)


def _filling(found: Mapping[str, ClassCalibration]) -> dict[str, ClassCalibration]:
    """Let the narrowest class fill a batch if all are wide: a swarm of it must learn."""
    if all(each.tolerance.share < 1.0 for each in found.values()) and found:
        name = min(found, key=lambda name: found[name].tolerance.d_mean)
        narrowest = found[name]
        return {**found, name: replace(narrowest, tolerance=replace(narrowest.tolerance, share=1.0))}
    return dict(found)


def _why_not(parameters: int, *, asked: bool) -> str:
    """Return why a model of this size is not calibrated, or nothing."""
    if parameters > LARGEST and not asked:
        return f"a model of {parameters / 1e9:.2g} billion parameters is calibrated only with --calibrate"
    free, needed = available_memory(), 6 * parameters + _WORKER_BYTES
    if free is not None and needed > free:
        return f"calibrating needs about {needed / 1e9:.1f} GB of memory, and {free / 1e9:.1f} GB are free"
    return ""


# Measuring


def _measure_all(
    manifest: Manifest,
    folder: Path,
    floors: Mapping[str, EngineTolerance],
    prompts: Sequence[Ids],
    progress: Progress,
    seconds: float,
    clock: Callable[[], float],
) -> Iterator[tuple[str, ClassCalibration]]:
    """Measure classes in turn, narrow ones first, each with a part of the time."""
    if not floors:
        return
    sampling, model, threads = manifest.sampling, manifest.model, free_cores()
    limits = SamplingLimits(
        min(_LONGEST, sampling.max_tokens),
        sampling.temperature,
        frozenset(model.end_tokens),
        model.vocab_size,
    )
    slots = [
        SlotRequest(prompt, derive("calibration", b"run     ", number.to_bytes(8)), _GROUP, limits)
        for number, prompt in enumerate(itertools.islice(itertools.cycle(prompts), _SLOTS))
    ]
    order = sorted(floors, key=lambda name: (floors[name].d_mean, name))
    progress(f"calibrating: starting {JUDGE}", 0, 0)
    with _engine(JUDGE, folder, threads) as judge:
        left = seconds
        for place, name in enumerate(order):
            narrow = floors[name].d_mean <= LEAST.d_mean and place < len(order) - 1
            share = min(_NARROW_SECONDS, left / 2) if narrow else left / (len(order) - place)
            try:
                progress(f"calibrating: starting {name}", 0, 0)
                with _engine(name, folder, threads, judge) as sampler:
                    began = clock()
                    figures = list(
                        _measure(sampler, judge, slots, limits, _Time(began, share, clock), progress)
                    )
                    left -= clock() - began
            except EngineError as error:
                yield name, ClassCalibration(floors[name], why_not=error.what)
                continue
            measured = sum(each.d.size for each in figures)
            if measured < FEWEST_TOKENS:
                yield (
                    name,
                    ClassCalibration(floors[name], why_not=f"only {measured} tokens in {share:.0f} seconds"),
                )
            else:
                yield name, ClassCalibration(fit_tolerance(floors[name], figures), measured)


@contextmanager
def _engine(name: str, folder: Path, threads: int, judge: Engine | None = None) -> Iterator[Engine]:
    if judge is not None and name == JUDGE:
        yield judge
        return
    with WorkerEngine(EngineSpec(name, folder, device="cpu", rows=_ROWS, threads=threads)) as engine:
        engine.load(_HEAD, read_folder(folder))
        yield engine


@dataclass(frozen=True, slots=True)
class _Time:
    """Seconds for one class, since `began`."""

    began: float
    seconds: float
    clock: Callable[[], float]

    @property
    def left(self) -> float:
        return self.seconds - (self.clock() - self.began)

    def is_over(self) -> bool:
        return self.left < -0.5 * self.seconds


def _measure(
    sampler: Engine,
    judge: Engine,
    requests: Sequence[SlotRequest],
    limits: SamplingLimits,
    time_: _Time,
    progress: Progress,
) -> Iterator[TokenFigures]:
    """Draw and score completions, as many and as long as there is time for."""
    slots = iter(requests)
    for done in list(_drawn(sampler, _of_length(requests[:1], _WARM_UP), time_)):
        judge.score(requests[0].prompt, done.draw.ids, limits)
    length, measured = min(_SHORTEST, limits.max_tokens), 0
    while asked := _of_length(list(itertools.islice(slots, _ROWS // _GROUP)), length):
        began, finished = time_.clock(), list(_drawn(sampler, asked, time_))
        for done in finished:  # after all were drawn: the judge may be the sampler
            yield _figures(judge, asked[done.request], done)
            spent = min(time_.seconds, time_.seconds - time_.left)
            progress(f"calibrating {sampler.engine_class}", int(spent), math.ceil(time_.seconds))
        drawn = sum(done.draw.ids.size for done in finished)
        measured += drawn
        pace = (time_.clock() - began) / max(1, drawn)
        fitting = [each for each in _lengths(limits.max_tokens) if pace * each * _ROWS <= 0.8 * time_.left]
        if measured >= MOST_TOKENS or not fitting:
            return
        length = fitting[-1]


def _drawn(sampler: Engine, asked: Sequence[SlotRequest], time_: _Time) -> Iterator[Finished]:
    """Yield completions until the time is over."""
    try:
        yield from sampler.generate(asked, stop=time_.is_over)
    except EngineStoppedError:
        return


def _of_length(requests: Sequence[SlotRequest], most: int) -> list[SlotRequest]:
    return [
        replace(each, limits=replace(each.limits, max_tokens=min(most, each.limits.max_tokens)))
        for each in requests
    ]


def _lengths(most: int) -> list[int]:
    """Return lengths of completions that are tried, the longest last."""
    return sorted({min(most, _SHORTEST * 2**power) for power in range(6)})


def _figures(judge: Engine, request: SlotRequest, done: Finished) -> TokenFigures:
    ids, limits = done.draw.ids, request.limits
    scores = judge.score(request.prompt, ids, limits)
    replay = scores.replay(uniforms(request.slot_key, done.completion, ids.size))
    return TokenFigures(
        d=replay.d,
        z=replay.z,
        gaps=done.draw.logprobs - scores.logprobs,
        is_end=np.isin(ids, np.array(sorted(limits.end_tokens), np.int64)),
        is_rare=scores.logprobs < RARE,
    )


# What is kept


def _read(file: Path, floor: EngineTolerance) -> ClassCalibration | None:
    """Return a class's cached result, raised to its floor; None to measure."""
    try:
        kept = json.loads(file.read_text("utf-8"))
        bounds = {name: float(kept["tolerance"][name]) for name in _BOUNDS}
        tokens = int(kept["tokens"])
        raised = {name: max(value, getattr(floor, name)) for name, value in bounds.items()}
        tolerance = replace(floor, **raised)
    except (OSError, ValueError, KeyError, TypeError, ProtocolError):
        return None
    wide = Tolerance(tolerance).wide
    return ClassCalibration(replace(tolerance, share=WIDE_SHARE) if wide else tolerance, max(1, tokens))


def _write(file: Path, made: ClassCalibration) -> None:
    with boundary(StoreError, f"writing {file}", advice="make room on that disk"):
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(f".{os.getpid()}.part")
        part.write_text(json.dumps({"tokens": made.tokens, "tolerance": asdict(made.tolerance)}) + "\n")
        part.replace(file)


def _key(manifest: Manifest, engine_class: str) -> str:
    key = blake3(manifest.model.root)
    tokens = min(_LONGEST, manifest.sampling.max_tokens)
    key.update(json.dumps([engine_class, JUDGE, manifest.sampling.temperature, tokens]).encode())
    for name in ("torch", "transformers", "llama-cpp-python", "gguf"):
        try:
            key.update(f"{name} {metadata.version(name)}\n".encode())
        except metadata.PackageNotFoundError:
            key.update(f"{name} is missing\n".encode())
    own = Path(echo_node.__file__).parent
    for file in sorted(path for pattern in _CODE for path in own.glob(pattern)):
        key.update(file.name.encode()).update(file.read_bytes())
    return f"{key.hexdigest()}.json"
