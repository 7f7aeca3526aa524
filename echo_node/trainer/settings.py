"""The numbers of a run's algorithm, from the manifest's parameters to those of the step. Unknown names are refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from echo_node.errors import ConfigError
from echo_node.ranges import CHANGE
from echo_node.trainer.grpo import GrpoSettings
from echo_node.trainer.step import StepSettings
from protocol import Manifest

DEFAULT_BATCH = 32
_FROM_ELSEWHERE = {"temperature", "vocab_size", "spreads", "grpo"}
"""Fields of the step that the manifest says in other places."""
SPREAD = 16.0
"""The spread of log-probabilities that goes with a class's mean distance: their mean gap was five to thirteen times that in
honest classes, and a normal spread is 1.25 times a mean gap. At the top of it, since nobody honest should be masked out."""


@dataclasses.dataclass(frozen=True, slots=True)
class TrainingSettings:
    """What a trainer needs to know of its run."""

    batch_groups: int
    step: StepSettings


def training_settings(manifest: Manifest) -> TrainingSettings:
    """Read the algorithm of a manifest."""
    if (manifest.algorithm.name, manifest.algorithm.version) != ("grpo", "1"):
        told = f"{manifest.algorithm.name} {manifest.algorithm.version}"
        raise ConfigError(f"the run's algorithm is {told}; this node has grpo 1", advice="upgrade this node")
    params = dict(manifest.algorithm.params)
    batch = params.pop("batch_groups", DEFAULT_BATCH)
    if type(batch) is not int or not 1 <= batch <= 4096:
        raise ConfigError(f"batch_groups is {batch!r}, not a whole number from 1 to 4096", advice=CHANGE)
    grpo = _take(params, GrpoSettings, set())
    step = _take(params, StepSettings, _FROM_ELSEWHERE)
    if params:
        raise ConfigError(f"the algorithm has no number called {', '.join(sorted(params))}", advice=_known())
    try:
        return TrainingSettings(
            batch_groups=batch,
            step=StepSettings(
                **step,
                temperature=manifest.sampling.temperature,
                vocab_size=manifest.model.vocab_size,
                spreads=tuple((each.engine, SPREAD * each.d_mean) for each in manifest.engines),
                grpo=GrpoSettings(**grpo),
            ),
        )
    except ValueError as error:
        raise ConfigError(f"the numbers of the algorithm: {error}", advice=CHANGE) from error


def _known() -> str:
    names = {field.name for cls in (GrpoSettings, StepSettings) for field in dataclasses.fields(cls)}
    return f"it has {', '.join(sorted({'batch_groups', *names} - _FROM_ELSEWHERE))}"


def _take(params: dict[str, Any], cls: type, leave: set[str]) -> dict[str, Any]:
    """The parameters that belong to a class, of the types that its defaults have."""
    taken = {}
    fields: Mapping[str, Any] = {field.name: field for field in dataclasses.fields(cls)}
    for name in sorted((fields.keys() - leave) & params.keys()):
        value, default = params.pop(name), fields[name].default
        taken[name] = value = _like(default, value)
        if type(value) is not type(default):
            raise ConfigError(
                f"{name} is {value!r}, not of the type of its default {default!r}", advice=CHANGE
            )
    return taken


def _like(default: Any, value: Any) -> Any:
    """The value as its default is written: whole numbers become real ones, arrays tuples. What cannot, stays."""
    if isinstance(default, float) and type(value) is int:
        return float(value)
    if isinstance(default, tuple) and isinstance(value, list | tuple):
        items = tuple(map(_like, default, value))
        alike = len(value) == len(default) and all(
            type(a) is type(b) for a, b in zip(items, default, strict=True)
        )
        return items if alike else list(value)
    return value
