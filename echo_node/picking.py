"""What a sampler works with, from what fits: a class of engines, and how many groups at a time.

It reckons with a model's own numbers, on the safe side; what does not fit after all is refused when it is tried. It loads
no engine.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any, Final

from echo_node.allowance import Allowance
from echo_node.engine.fitting import SPARE
from echo_node.engine.kinds import ready_classes, torch_device
from echo_node.engine.machine import available_memory
from echo_node.errors import ConfigError, boundary
from echo_node.run import Run, read_model
from echo_node.weights.state import layout_of

MOST_SLOTS: Final = 16
_WEIGHT_BYTES: Final = {"f32": 4.0, "f16": 2.0, "bf16": 2.0, "q8_0": 34 / 32, "q4_0": 18 / 32}
_LIBRARY_BYTES: Final = {"torch": 500_000_000, "llama": 100_000_000}
"""What is taken before there is a single weight."""


@dataclass(frozen=True, slots=True)
class Needs:
    """What a run takes of memory, in numbers that no engine changes: parameters, and what is kept of a group while it is made."""

    parameters: int
    group_values: int

    @classmethod
    def of(cls, run: Run) -> Needs:
        """From the model's files. What its configuration does not say is taken for nothing."""
        with boundary(ConfigError, f"reading the model in {run.folder}"):
            told: dict[str, Any] = json.loads((run.folder / "config.json").read_bytes())
            heads = told.get("num_attention_heads") or 1
            head = told.get("head_dim") or told.get("hidden_size", 0) // heads
            token = 2 * told.get("num_hidden_layers", 0) * (told.get("num_key_value_heads") or heads) * head
        sampling = run.told.sampling
        tensors = layout_of(read_model(run.folder)).tensors
        return cls(
            sum(math.prod(tensor.shape) for tensor in tensors),
            token * sampling.group_size * (sampling.max_prompt + sampling.max_tokens),
        )

    def weights(self, engine_class: str) -> float:
        medium, _, arithmetic = engine_class.partition("/")
        return _LIBRARY_BYTES[medium] + _WEIGHT_BYTES[arithmetic] * self.parameters

    def group(self, engine_class: str) -> float:
        return (4 if engine_class.endswith("/f32") else 2) * self.group_values


@dataclass(frozen=True, slots=True)
class Pick:
    """What was picked, and why, for a person."""

    engine_class: str
    slots: int
    why: str


def pick(run: Run, allowance: Allowance, engine_class: str | None = None, slots: int | None = None) -> Pick:
    """The best class of engines that fits, with as many groups as fit beside its weights; or what the person says."""
    allowed = {each.engine for each in run.told.engines}
    classes = [engine_class] if engine_class else ready_classes(allowed, allowance.device)
    if allowance.memory is None and "cpu" not in {allowance.device, torch_device()}:
        return Pick(classes[0], slots or MOST_SLOTS, "the memory of a GPU is found out as it fills")
    room = available_memory() if allowance.memory is None else allowance.memory
    if room is None:
        return Pick(classes[0], slots or MOST_SLOTS, "how much memory is free, this machine does not say")
    whose = "are free" if allowance.memory is None else "--max-memory allows"
    return pick_within(SPARE * room, whose, classes, Needs.of(run), slots)


def pick_within(room: float, whose: str, classes: list[str], needs: Needs, slots: int | None = None) -> Pick:
    """The first of these classes that fits into so many bytes, for at least one group; if none does, the smallest."""
    smallest = min(classes, key=needs.weights)
    fitting = [each for each in classes if needs.weights(each) + needs.group(each) <= room]
    found = (fitting or [smallest])[0]
    left = room - needs.weights(found)
    fit = max(1, min(MOST_SLOTS, int(left // max(1.0, needs.group(found)))))
    taken = needs.weights(found) + (slots or fit) * needs.group(found)
    why = f"about {taken / 1e9:.2f} GB of the {room / 1e9:.2f} GB that {whose}"
    if larger := classes[: classes.index(found)]:
        why += f"; {', '.join(larger)} would take more"
    return Pick(found, slots or fit, why)
