"""Algorithm settings of a run: names, defaults, ranges, manifest mapping.

The ranges are wide: they keep out slips, such as a lost sign, and leave room to switch something
off. No torch here, so that every machine can check a run before it is sealed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from echo_node.errors import ConfigError
from echo_node.runs.evaluation_settings import EVALUATION
from protocol import Manifest

DEFAULT_BATCH = 32
_FROM_ELSEWHERE = {
    "temperature",
    "vocab_size",
    "spreads",
    "gap_caps",
    "grpo",
    "completion_limit",
    "adapter_norm",
}
"""Fields of the settings that come from other parts of the manifest."""
SPREAD = 16.0
"""Spread of log-probabilities per mean distance that the manifest allows an engine class.

In honest classes their mean gap was five to thirteen times the mean distance, and a normal spread
is 1.25 times a mean gap. The upper end is taken, so that nobody honest is masked out.
"""
CHANGE: Final = "change it under [algorithm] in the run's file, or leave it out for its default"
_OFF: Final = 1e10
"""A bound beyond every ratio: it binds nothing."""
RANGES: Final[Mapping[str, tuple[float, float]]] = {
    "batch_groups": (1, 4096),
    "learning_rate": (1e-12, 1),
    "warm_up": (0, 1_000_000),
    "decay_steps": (0, 1_000_000_000),
    "final_rate": (0, 1),
    "betas": (0, 0.9999999),
    "epsilon": (1e-20, 1),
    "weight_decay": (0, 10),
    "gradient_norm": (1e-6, 1e6),
    "row_tokens": (1, 2**24),
    "micro_batch_tokens": (1, 2**24),
    "clip_low": (0, 1),
    "clip_high": (1, _OFF),
    "dual_clip": (1, _OFF),
    "tis_cap": (1, _OFF),
    "icepop_low": (1e-10, 1),
    "icepop_high": (1, _OFF),
    "geometric_floor": (0, _OFF),
    "geometric_sigmas": (0, _OFF),
    "veto": (0, 0.9999999),
    "entropy": (-10, 10),
    "kl": (0, 1000),
    "overlong_buffer": (0, 2**24),
    "overlong_penalty": (0, 1000),
    "dynamic_sampling": (0, 64),
}


@dataclass(frozen=True, slots=True)
class GrpoSettings:
    """Settings of the GRPO loss, fixed by the manifest. w is π_old/μ.

    importance           "direct": the clip is on π_θ/μ; "decoupled": it is on π_θ/π_old, and each
                         token is weighted by min(w, tis_cap)
    ratio                "token": each token has its ratio; "sequence": all tokens of a completion
                         have the geometric mean of their ratios (GSPO, arXiv 2507.18071)
    clip                 "ppo": the ratio has no gradient outside of clip_low to clip_high;
                         "cispo": every token keeps its gradient, weighted by the ratio up to
                         clip_high (arXiv 2506.13585); clip_low and dual_clip do not act
    clip_low, clip_high  bounds of the ratio
    dual_clip            largest ratio where the advantage is negative: μ is a claim, and one
                         near zero would else let one completion own the gradient
    tis_cap              largest weight, if decoupled
    icepop               whether tokens with w outside of icepop_low to icepop_high are masked out
    geometric            whether completions of the current version are masked out when |mean log w|
                         is above max(geometric_floor, geometric_sigmas · σ/√T), with σ the spread
                         of their engine class and T their length; never those of older versions,
                         since policy lag is no mismatch of engines. σ follows from the mean
                         distance that the manifest allows the class (`SPREAD`); for narrow classes
                         it is so small that the floor decides
    veto                 a completion with any token's w below this is dropped and counted
    advantage            "mean": reward − the group's mean; "normalised": that, divided by the
                         group's standard deviation
    zero_advantage       groups of equal rewards: "keep" them, for entropy and kl act on them; or
                         "skip" them
    entropy              weight of the entropy bonus
    kl                   weight of the divergence from the run's first policy; 0: not measured
    overlong_buffer      tokens before the run's longest completion over which a penalty rises from
                         0, taken off the reward before advantages (DAPO, arXiv 2503.14476); 0: none
    overlong_penalty     the penalty of the longest completion
    overlong_filter      whether completions that the limit has cut are left out of the loss; their
                         rewards count in their group's mean
    normalise            "token": every token weighs the same; "sequence": every completion does;
                         "limit": tokens are summed, and divided by the number of completions times
                         the run's longest completion (Dr. GRPO, arXiv 2503.20783)
    completion_limit     tokens of the longest completion that the run allows

    Masked, dropped and skipped tokens count neither in a term nor in the divisor of the sum.
    """

    clip_low: float = 0.8
    clip_high: float = 1.28
    dual_clip: float = 3.0
    entropy: float = 0.01
    advantage: Literal["mean", "normalised"] = "mean"
    normalise: Literal["token", "sequence", "limit"] = "token"
    ratio: Literal["token", "sequence"] = "token"
    clip: Literal["ppo", "cispo"] = "ppo"
    completion_limit: int = 0
    veto: float = 1e-4
    kl: float = 0.0
    importance: Literal["direct", "decoupled"] = "direct"
    tis_cap: float = 2.0
    icepop: bool = False
    icepop_low: float = 0.5
    icepop_high: float = 5.0
    geometric: bool = False
    geometric_floor: float = 0.01
    geometric_sigmas: float = 4.0
    zero_advantage: Literal["keep", "skip"] = "keep"
    overlong_buffer: int = 0
    overlong_penalty: float = 1.0
    overlong_filter: bool = False

    def __post_init__(self) -> None:
        for name, words in _WORDS.items():
            if getattr(self, name) not in words:
                raise ValueError(f"{name} is {' or '.join(map(repr, words))}, not {getattr(self, name)!r}")
        self._check_clips()
        for name, end in (("veto", 1.0), ("kl", math.inf), *dict.fromkeys(_GEOMETRIC, math.inf).items()):
            if not 0.0 <= getattr(self, name) < end:  # a veto at 1 would drop everything
                raise ValueError(f"{name} is {getattr(self, name)}, and must be from 0 to below {end:g}")
        if self.normalise == "limit" and self.completion_limit < 1:
            raise ValueError("normalise is 'limit', so the run's longest completion is needed")
        if not math.isfinite(self.entropy):
            raise ValueError(f"entropy is {self.entropy}, and must be a number")
        if not (0.0 <= self.overlong_penalty < math.inf and self.overlong_buffer >= 0):
            raise ValueError("overlong_buffer and overlong_penalty must not be negative")
        if self.overlong_buffer > self.completion_limit:
            raise ValueError(
                f"overlong_buffer is {self.overlong_buffer}, and the run's longest completion has"
                f" {self.completion_limit} tokens (sampling.max_tokens)"
            )

    def _check_clips(self) -> None:
        if not 0.0 <= self.clip_low <= 1.0 <= self.clip_high < math.inf:
            raise ValueError(f"the clip [{self.clip_low}, {self.clip_high}] must hold the ratio 1")
        if not self.clip_high <= self.dual_clip:
            raise ValueError(f"dual_clip {self.dual_clip} must not be below clip_high {self.clip_high}")
        if not 0.0 < self.icepop_low <= 1.0 <= self.icepop_high:
            raise ValueError(
                f"the icepop band [{self.icepop_low}, {self.icepop_high}] must hold the weight 1"
            )
        if not self.tis_cap >= 1.0:
            raise ValueError(f"tis_cap {self.tis_cap} must not be below 1")


_GEOMETRIC = ("geometric_floor", "geometric_sigmas")
_WORDS = {
    "importance": ("direct", "decoupled"),
    "advantage": ("mean", "normalised"),
    "normalise": ("token", "sequence", "limit"),
    "ratio": ("token", "sequence"),
    "clip": ("ppo", "cispo"),
    "zero_advantage": ("keep", "skip"),
}

DEFAULT_LOSS: Final = "echo"
LOSSES: Final[Mapping[str, Mapping[str, Any]]] = {
    DEFAULT_LOSS: {},
    "grpo": {"advantage": "normalised", "normalise": "sequence", "clip_high": 1.2, "entropy": 0.0},
    "dr-grpo": {"advantage": "mean", "normalise": "limit", "clip_high": 1.2, "entropy": 0.0},
    "dapo": {"advantage": "normalised", "normalise": "token", "zero_advantage": "skip", "entropy": 0.0},
    "gspo": {
        "advantage": "normalised",
        "normalise": "sequence",
        "ratio": "sequence",
        "clip_low": 1 - 3e-4,
        "clip_high": 1 + 4e-4,
        "entropy": 0.0,
    },
    "cispo": {
        "advantage": "normalised",
        "normalise": "token",
        "clip": "cispo",
        "clip_low": 0.0,
        "clip_high": 5.0,
        "dual_clip": 5.0,
        "entropy": 0.0,
    },
}
"""Settings by the name of a published loss; what a run sets itself stands above them."""


@dataclass(frozen=True, slots=True)
class StepSettings:
    """Settings of the optimiser step.

    learning_rate       after a linear warm-up
    warm_up             steps
    schedule            after the warm-up: "constant", or a "linear" or "cosine" decay
    decay_steps         step at which the decay ends, the warm-up counted
    final_rate          share of the learning rate that is left from then on
    betas, epsilon      of AdamW
    weight_decay        of AdamW
    gradient_norm       longest gradient; a longer one is scaled down to it
    temperature         of the samplers: log-probabilities are of the distribution at it
    vocab_size          the softmax is over this many first ids; 0: over all of the model's
    row_tokens          completions of a group, and groups whose prompts begin alike, share a row,
                        and what they have in common in it, up to this length
    micro_batch_tokens  rows run together up to this many tokens, padding included
    gradient_checkpointing  keep only the inputs of each block, and recompute the rest backward
    compute_copy        "bf16": the weights are held in bf16, and upcast layer by layer; "f32":
                        they are held in float32, at two more bytes a parameter, never upcast
    gradient_dtype      "f32", or "bf16" for a batch that is one micro-batch: two bytes less a
                        parameter, with a compute_copy of "bf16"; several are added up in float32
    mixed_precision     "auto": bf16 products where the device supports them; "off": float32
    spreads             by engine class, spread of its log-probabilities around the trainer's; see
                    `GrpoSettings`
    gap_caps            by engine class, largest gap of one of its log-probabilities from the
                        trainer's; beyond it a current group's is clamped (see `grpo.clamp_mu`)
    adapter_norm        longest norm of each tensor of an adapter; None: the whole model is trained
    """

    learning_rate: float = 2e-4
    warm_up: int = 20
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    decay_steps: int = 0
    final_rate: float = 0.0
    betas: tuple[float, float] = (0.9, 0.99)
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    gradient_norm: float = 1.0
    temperature: float = 1.0
    vocab_size: int = 0
    row_tokens: int = 256
    micro_batch_tokens: int = 1024
    gradient_checkpointing: bool = False
    compute_copy: Literal["bf16", "f32"] = "bf16"
    gradient_dtype: Literal["f32", "bf16"] = "f32"
    mixed_precision: Literal["auto", "off"] = "auto"
    spreads: tuple[tuple[str, float], ...] = ()
    gap_caps: tuple[tuple[str, float], ...] = ()
    adapter_norm: float | None = None
    grpo: GrpoSettings = field(default_factory=GrpoSettings)

    def __post_init__(self) -> None:
        for name in ("learning_rate", "gradient_norm", "temperature", "epsilon"):
            if not (math.isfinite(value := getattr(self, name)) and value > 0.0):
                raise ValueError(f"{name} is {value}, and must be above 0")
        if min(self.warm_up, self.weight_decay, self.vocab_size) < 0:
            raise ValueError("warm_up, weight_decay and vocab_size must not be negative")
        if min(self.row_tokens, self.micro_batch_tokens) < 1:
            raise ValueError("row_tokens and micro_batch_tokens must be at least 1")
        if not all(0.0 <= beta < 1.0 for beta in self.betas):
            raise ValueError(f"betas are {self.betas}, and must be from 0 to below 1")
        if self.schedule not in {"constant", "linear", "cosine"}:
            raise ValueError(f"schedule is 'constant', 'linear' or 'cosine', not {self.schedule!r}")
        if self.schedule != "constant" and self.decay_steps <= self.warm_up:
            raise ValueError(
                f"schedule is {self.schedule!r}: decay_steps {self.decay_steps} must be above warm_up {self.warm_up}"
            )
        if not 0.0 <= self.final_rate <= 1.0:
            raise ValueError(f"final_rate is {self.final_rate}, and must be from 0 to 1")
        self._check_precision()

    def _check_precision(self) -> None:
        if not {self.compute_copy, self.gradient_dtype} <= {"bf16", "f32"}:
            raise ValueError("compute_copy and gradient_dtype must be 'bf16' or 'f32'")
        if (self.compute_copy, self.gradient_dtype) == ("f32", "bf16"):
            raise ValueError("gradient_dtype is 'bf16', which needs a compute_copy of 'bf16'")
        if self.mixed_precision not in {"auto", "off"}:
            raise ValueError(f"mixed_precision is 'auto' or 'off', not {self.mixed_precision!r}")

    def spread_of(self, engine: str) -> float:
        return dict(self.spreads).get(engine, 0.0)

    def gap_cap_of(self, engine: str) -> float:
        return dict(self.gap_caps).get(engine, math.inf)


@dataclasses.dataclass(frozen=True, slots=True)
class TrainingSettings:
    """Training settings of a run: batch size and step.

    `dynamic_sampling` is how many times a batch is drawn at most, to replace groups without
    advantage; 0: they stay.
    """

    batch_groups: int
    step: StepSettings
    dynamic_sampling: int = 0


def layout_for(parameters: int) -> dict[str, Any]:
    """Return the batch layout settings of a new run, by the model's size.

    Large models have whole groups in a row, so that a prompt is computed once, and recompute their
    blocks. They are sealed with a run: other cuts round otherwise, and a run keeps its own.
    """
    if parameters >= 300e6:
        return {"row_tokens": 4096, "micro_batch_tokens": 4096, "gradient_checkpointing": True}
    if parameters >= 50e6:
        return {"row_tokens": 2048, "micro_batch_tokens": 2048}
    return {}


def training_settings(manifest: Manifest) -> TrainingSettings:
    """Read the training settings of a manifest."""
    if (manifest.algorithm.name, manifest.algorithm.version) != ("grpo", "1"):
        named = f"{manifest.algorithm.name} {manifest.algorithm.version}"
        raise ConfigError(f"the run's algorithm is {named}; this node has grpo 1", advice="upgrade this node")
    params = dict(manifest.algorithm.params)
    params.pop(EVALUATION, None)
    batch = params.pop("batch_groups", DEFAULT_BATCH)
    if type(batch) is not int or not 1 <= batch <= 4096:
        raise ConfigError(f"batch_groups is {batch!r}, not a whole number from 1 to 4096", advice=CHANGE)
    draws = params.pop("dynamic_sampling", 0)
    if type(draws) is not int or not 0 <= draws <= 64 or draws == 1:
        raise ConfigError(
            f"dynamic_sampling is {draws!r}, not a whole number from 2 to 64, nor 0 to switch it off",
            advice=CHANGE,
        )
    loss = params.pop("loss", DEFAULT_LOSS)
    if loss not in LOSSES:
        raise ConfigError(f"loss is {loss!r}, and must be one of {', '.join(LOSSES)}", advice=CHANGE)
    params = {**LOSSES[loss], **params}
    grpo = _take(params, GrpoSettings, _FROM_ELSEWHERE)
    step = _take(params, StepSettings, _FROM_ELSEWHERE)
    if params:
        raise ConfigError(f"the algorithm has no setting {', '.join(sorted(params))}", advice=_known())
    try:
        return TrainingSettings(
            batch_groups=batch,
            dynamic_sampling=draws,
            step=StepSettings(
                **step,
                temperature=manifest.sampling.temperature,
                vocab_size=manifest.model.vocab_size,
                spreads=tuple((each.engine, SPREAD * each.d_mean) for each in manifest.engines),
                gap_caps=tuple((each.engine, each.gap_most) for each in manifest.engines),
                adapter_norm=manifest.model.adapter.norm if manifest.model.adapter else None,
                grpo=GrpoSettings(**grpo, completion_limit=manifest.sampling.max_tokens),
            ),
        )
    except ValueError as error:
        raise ConfigError(f"settings of the algorithm: {error}", advice=CHANGE) from error


def _known() -> str:
    names = {field.name for cls in (GrpoSettings, StepSettings) for field in dataclasses.fields(cls)}
    return (
        f"it has {', '.join(sorted({'batch_groups', 'dynamic_sampling', 'loss', *names} - _FROM_ELSEWHERE))}"
    )


def _take(params: dict[str, Any], cls: type, leave: set[str]) -> dict[str, Any]:
    """Take out the parameters of a class, converted to the types of its defaults."""
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
    """Convert a value to its default's type: ints to floats, arrays to tuples.

    A value that cannot be converted is returned unchanged.
    """
    if isinstance(default, float) and type(value) is int:
        return float(value)
    if isinstance(default, tuple) and isinstance(value, list | tuple):
        items = tuple(map(_like, default, value))
        alike = len(value) == len(default) and all(
            type(a) is type(b) for a, b in zip(items, default, strict=True)
        )
        return items if alike else list(value)
    return value


def check_ranges(numbers: Mapping[str, Any]) -> None:
    """Refuse numbers out of range or not finite; names and types are not checked here."""
    for name, value in numbers.items():
        if name not in RANGES:
            continue
        low, high = RANGES[name]
        for each in value if isinstance(value, list | tuple) else (value,):
            if isinstance(each, int | float) and not low <= each <= high:
                raise ConfigError(
                    f"algorithm.{name} is {value!r}, and must be from {low:g} to {high:.10g}", advice=CHANGE
                )
