"""Program that takes a model once through training, publishing and every engine.

`python -m echo_node.trainer.dry_run_worker FOLDER REQUEST`, for `dry_run`: load, one training
step, publish, delta into each engine, verify. It prints one JSON object per line: what it is doing,
at the end the gaps that it measured, or why the model is refused.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import tempfile
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoModelForCausalLM

from echo_node.engine.base import (
    Change,
    Claim,
    Draw,
    Engine,
    Ids,
    SamplingLimits,
    SlotRequest,
    TensorBytes,
    Update,
    generate_groups,
)
from echo_node.engine.engine_classes import EngineSpec, make_engine
from echo_node.errors import ConfigError, EchoError, boundary
from echo_node.models.adapter import (
    PREFIX,
    SETTINGS,
    WEIGHTS,
    adapter_tensors,
    base_shapes,
    map_weights,
    read_adapter,
    settings_file,
    write_first_adapter,
)
from echo_node.models.families import check_family, read_config, window_of
from echo_node.models.folder import map_folder
from echo_node.runs.algorithm import StepSettings
from echo_node.trainer.dry_run_model import CONTEXT, write_cut_model
from echo_node.trainer.step import TrainingGroup, TrainStep, state_of
from echo_node.weights.tensors import State, from_mapped
from protocol import sampling

LARGEST: Final = 20_000_000
"""Parameters of a model that is tried itself; a larger one is tried as a cut random model."""
LIMITS: Final = {"f32": 1e-4, "f16": 0.03, "bf16": 0.2, "q8_0": 0.6, "q4_0": 2.0}
"""Largest mean gap of log-probabilities, in nats, from an eager forward pass, per arithmetic.

Families that were computed wrongly differed by 2 to 3.6 nats; right ones by a fifth of this.
"""
_HEADS: Final = (b"0" * 32, b"1" * 32)
_PROMPTS: Final = (3, 19)
"""Tokens of the prompts: shorter and longer than the window of a cut model."""
_GROUP: Final = 3
_RATE: Final = 1e-2  # a learning rate at which one step changes bf16 values


def say(**what: Any) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def try_model(folder: Path, classes: Mapping[str, float], temperature: float) -> dict[str, float]:
    """Return the mean gap of the trainer and each engine class, in nats.

    It is measured after a delta too. `classes` has the mean distance that the run's manifest allows
    each class.
    """
    family = check_family(read_config(folder)).name
    state = from_mapped(map_folder(folder))
    size = sum(math.prod(tensor.shape) for tensor in state.values())
    window = window_of(read_config(folder))
    gaps: dict[str, float] = {}
    if size <= LARGEST:
        gaps = _pass_through(family, folder, classes, temperature)
    if size > LARGEST or (window is not None and window > sum(_PROMPTS)):
        with tempfile.TemporaryDirectory(prefix="echo-dry-run-") as cut:
            write_cut_model(folder, Path(cut))
            _write_cut_adapter(folder, Path(cut))
            unbounded = dict.fromkeys(classes, math.inf)  # a random model is no measure of distances
            for name, gap in _pass_through(family, Path(cut), unbounded, temperature).items():
                gaps[name] = max(gap, gaps.get(name, 0.0))
    return gaps


def _pass_through(
    family: str, folder: Path, classes: Mapping[str, float], temperature: float
) -> dict[str, float]:
    say(doing=f"dry run: loading the {family} model")
    before = from_mapped(map_weights(folder))
    config = read_config(folder)
    vocabulary = int(config["vocab_size"])
    limits = SamplingLimits(24, temperature, frozenset(), vocabulary)
    settings = StepSettings(learning_rate=_RATE, warm_up=0, temperature=temperature, vocab_size=vocabulary)
    step = TrainStep(folder, settings, threads=1, device="cpu")
    _check_layout(family, before, state_of(step))
    requests = _requests(limits, int(config.get("max_position_embeddings") or CONTEXT))
    eager = _Eager(folder, limits)
    engines = {
        name: make_engine(EngineSpec(name, folder, device="cpu", rows=8, threads=1)) for name in classes
    }
    try:
        gaps: dict[str, float] = {}
        drawn = {}
        for name, engine in engines.items():
            say(doing=f"dry run: sampling with {name}")
            engine.load(_HEADS[0], before)
            own = [_within(each, engine) for each in requests]
            drawn[name] = list(zip(own, generate_groups(engine, own), strict=True))
            gaps[name] = _gap(
                [
                    (eager.log_probs(request.prompt, draw.ids), draw.logprobs)
                    for request, draw in _each(drawn[name])
                ]
            )
            _check_distance(family, name, _distance(eager, drawn[name]), classes[name])
        groups = [pair for pairs in drawn.values() for pair in pairs]
        say(doing="dry run: one training step")
        gaps["trainer"] = _gap(list(_trained(step, eager, groups)))
        _check(family, gaps)
        step.step([_rewarded(request, group) for request, group in groups])
        after = state_of(step)
        eager.load(after)
        for name, engine in engines.items():
            say(doing=f"dry run: a delta into {name}")
            engine.patch(_update(before, after))
            gaps[name] = max(gaps[name], _gap(list(_scored(engine, eager, drawn[name], limits))))
        _check(family, gaps)
        return gaps
    finally:
        for engine in engines.values():
            engine.close()


class _Eager:
    """A plain eager forward pass of transformers: no packing, no cache."""

    def __init__(self, folder: Path, limits: SamplingLimits) -> None:
        make: Any = AutoModelForCausalLM
        self._model = make.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", local_files_only=True
        )
        self._model.eval()
        self._limits = limits
        self._adapter = read_adapter(folder)
        self._base = (
            {}
            if self._adapter is None
            else {name: weight.clone() for name, weight in self._model.named_parameters()}
        )

    @torch.no_grad()
    def load(self, state: State) -> None:
        """Take weights over; an adapter is added to the base's own, in float32."""
        for name, weight in self._model.named_parameters():
            if self._adapter is None:
                weight.copy_(_floats(state[name]))
                continue
            module = PREFIX + name.removesuffix(".weight")
            if (low := state.get(f"{module}.lora_A.weight")) is not None:
                product = _floats(state[f"{module}.lora_B.weight"]) @ _floats(low)
                weight.copy_(self._base[name] + self._adapter.scale * product)

    def log_probs(self, prompt: Ids, ids: Ids) -> NDArray[np.float32]:
        """Return the log-probability of each token after a prompt."""
        every = torch.log_softmax(self._logits(prompt, ids) / self._limits.temperature, dim=-1)
        found: NDArray[np.float32] = every.gather(1, torch.from_numpy(ids)[:, None])[:, 0].numpy()
        return found

    def replay(self, prompt: Ids, ids: Ids, u: NDArray[np.float64]) -> sampling.Replay:
        """Return how far each token lies from where its number `u` would have drawn it."""
        probability = sampling.probabilities(self._logits(prompt, ids).numpy(), self._limits.temperature)
        return sampling.replay(probability, ids, u)

    @torch.no_grad()
    def _logits(self, prompt: Ids, ids: Ids) -> Tensor:
        whole = torch.from_numpy(np.concatenate((prompt, ids)))[None]
        logits: Tensor = self._model(whole).logits[0, len(prompt) - 1 : -1, : self._limits.vocab_size]
        return logits


def _floats(tensor: TensorBytes) -> Tensor:
    bits = torch.from_numpy(np.frombuffer(tensor.data, np.int16).copy())
    return bits.view(torch.bfloat16).view(tensor.shape).float()


def _write_cut_adapter(folder: Path, cut: Path) -> None:
    """Give a cut model an adapter of the same targets."""
    if (settings := read_adapter(folder)) is None:
        return
    shapes = base_shapes(cut)
    rank = min(settings.rank, *(min(shape) for shape in shapes.values() if len(shape) == 2))
    settings = dataclasses.replace(settings, rank=rank, alpha=settings.scale * rank)
    (cut / SETTINGS).write_bytes(settings_file(settings))
    write_first_adapter(cut / WEIGHTS, adapter_tensors(shapes, settings), b"dry run")


def _requests(limits: SamplingLimits, context: int) -> list[SlotRequest]:
    draws = np.random.default_rng(0)
    room = max(1, context // 2)
    return [
        SlotRequest(
            draws.integers(0, limits.vocab_size, min(length, room)),
            draws.bytes(32),
            _GROUP,
            SamplingLimits(
                min(limits.max_tokens, room), limits.temperature, limits.end_tokens, limits.vocab_size
            ),
        )
        for length in _PROMPTS
    ]


def _within(request: SlotRequest, engine: Engine) -> SlotRequest:
    """Return the request cut to an engine's shorter context."""
    room = engine.describe().context
    if room is None or request.prompt.size + request.limits.max_tokens <= room:
        return request
    prompt = request.prompt[: max(1, room // 2)]
    own = request.limits
    limits = SamplingLimits(room - prompt.size, own.temperature, own.end_tokens, own.vocab_size)
    return SlotRequest(prompt, request.slot_key, request.group_size, limits)


Drawn = Sequence[tuple[SlotRequest, tuple[Draw, ...]]]
Pairs = Sequence[tuple[NDArray[Any], NDArray[Any]]]


def _each(drawn: Drawn) -> Iterator[tuple[SlotRequest, Draw]]:
    return ((request, draw) for request, group in drawn for draw in group)


def _trained(step: TrainStep, eager: _Eager, drawn: Drawn) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
    for request, group in drawn:
        for draw, own in zip(group, step.log_probs(_rewarded(request, group)), strict=True):
            yield eager.log_probs(request.prompt, draw.ids), own


def _distance(eager: _Eager, drawn: Drawn) -> float:
    """Return the mean distance of the drawn tokens from where their numbers fall."""
    found = []
    for request, group in drawn:
        for completion, draw in enumerate(group):
            u = sampling.uniforms(request.slot_key, completion, draw.ids.size)
            found.append(eager.replay(request.prompt, draw.ids, u).d)
    return float(np.concatenate(found).mean())


def _scored(
    engine: Engine, eager: _Eager, drawn: Drawn, limits: SamplingLimits
) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
    for request, group in drawn:
        claims = [Claim(request.prompt, draw.ids) for draw in group]
        for claim, scores in zip(claims, engine.score_many(claims, limits), strict=True):
            yield eager.log_probs(claim.prompt, claim.ids), scores.logprobs


def _rewarded(request: SlotRequest, group: Sequence[Draw]) -> TrainingGroup:
    rewards = [float(place % 2) for place in range(len(group))]
    return TrainingGroup(
        request.prompt, [draw.ids for draw in group], [draw.logprobs for draw in group], rewards
    )


def _gap(pairs: Pairs) -> float:
    gap = float(np.concatenate([np.abs(one - other) for one, other in pairs]).mean())
    return gap if math.isfinite(gap) else math.inf


def _check(family: str, gaps: Mapping[str, float]) -> None:
    for name, gap in gaps.items():
        limit = LIMITS[name.partition("/")[2] or "f32"]
        if not gap <= limit:
            raise ConfigError(
                f"{name} and a plain forward pass differ by {gap:.3g} nats a token on this {family} model,"
                f" and {limit:g} is the most that its arithmetic explains",
                advice="take another model or leave that engine class out; please report the model",
            )


def _check_distance(family: str, name: str, distance: float, limit: float) -> None:
    if distance > limit:
        raise ConfigError(
            f"tokens that {name} draws from this {family} model lie {distance:.3g} from where they should, and the"
            f" run allows the class {limit:g}: honest samplers would be condemned",
            advice="leave that engine class out, or calibrate it: echo-node verifier calibrate",
        )


def _check_layout(family: str, folder: State, published: State) -> None:
    kept = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in folder.items()}
    given = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in published.items()}
    for name in sorted(kept.keys() | given.keys()):
        if kept.get(name) != given.get(name):
            raise ConfigError(
                f"the {family} model's weights {name} are {kept.get(name)} in the folder and {given.get(name)} as"
                " the trainer publishes them",
                advice="write the model with save_pretrained, in bf16",
            )


def _update(before: Mapping[str, TensorBytes], after: Mapping[str, TensorBytes]) -> Update:
    @contextmanager
    def changes(granule: int) -> Generator[Iterator[Change]]:
        yield _changes(before, after, granule)

    return Update(_HEADS[0], _HEADS[1], changes)


def _changes(
    before: Mapping[str, TensorBytes], after: Mapping[str, TensorBytes], granule: int
) -> Iterator[Change]:
    for name, tensor in after.items():
        old, new = (np.frombuffer(each.data, "<u2") for each in (before[name], tensor))
        runs = np.unique(np.flatnonzero(old != new) // granule)
        positions = (runs[:, None] * granule + np.arange(granule)).ravel()
        positions = positions[positions < new.size]
        if positions.size:
            yield Change(name, positions, new[positions])


def main() -> None:
    """Run the program."""
    folder, request = Path(sys.argv[1]), json.loads(sys.argv[2])
    try:
        with boundary(ConfigError, "trying the model"):
            say(gaps=try_model(folder, request["classes"], request["temperature"]))
    except EchoError as error:
        say(refused=error.what, advice=error.advice)


if __name__ == "__main__":
    main()
