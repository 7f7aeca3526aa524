"""Catalogue of benchmarks: what each measures, and the bounds of its figures.

A figure without a bound is listed without a judgement.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal


@dataclass(frozen=True, slots=True)
class Bound:
    """Bound of one figure."""

    sign: Literal["≥", "≤", "="]
    value: float

    def holds(self, measured: float) -> bool:
        match self.sign:
            case "≥":
                return measured >= self.value
            case "≤":
                return measured <= self.value
        return measured == self.value

    def __str__(self) -> str:
        return f"{self.sign} {self.value:g}"


@dataclass(frozen=True, slots=True)
class Benchmark:
    """One benchmark, with bounds by figure name; a slash names a figure in a table."""

    what: str
    bounds: Mapping[str, Bound] = field(default_factory=dict)
    minutes: float = 1.0
    """Approximate minutes on two quiet cores."""


def _least(value: float) -> Bound:
    return Bound("≥", value)


def _most(value: float) -> Bound:
    return Bound("≤", value)


def _just(value: float) -> Bound:
    return Bound("=", value)


_ATTACKS: Final = ("equal_claims", "by_hand", "long_groups", "single_token_mu", "many_keys")
"""Attacks of the poisoned swarm, each a side of its own."""

BENCHMARKS: Final[Mapping[str, Benchmark]] = {
    "wire": Benchmark(
        "sealing and opening a 64 kB group over msgpack, BLAKE3 and Ed25519 alone, on the same bytes",
        {"seal_over_bare": _least(0.6), "open_over_bare": _least(0.6)},
        minutes=0.3,
    ),
    "stream": Benchmark(
        "one libp2p stream over a bare TLS 1.3 socket, between two processes",
        {"stream_over_tls": _least(0.25)},
        minutes=0.5,
    ),
    "bulk": Benchmark(
        "large blobs over a bare TLS 1.3 socket, and four throttled sources over one",
        {"bulk_over_tls": _least(0.75), "four_sources_over_one": _least(1.5)},
    ),
    "network": Benchmark(
        "streams and bulk again, then a swarm of ten processes: gossip, finding, and a quiet node's cost",
        {
            "stream_over_tls": _least(0.25),
            "bulk_over_tls": _least(0.75),
            "four_sources_over_one": _least(1.5),
            "gossip_lost": _just(0),
            "idle_cpu_percent": _most(3),
        },
        minutes=5,
    ),
    "delta": Benchmark(
        "the codec of weights on a real training step: bytes over other layouts, speed over memcpy",
        {
            "ratio_at_1pct": _least(140),
            "over_pulse": _least(2.0),
            "over_xor": _least(1.8),
            "apply_over_memcpy": _least(0.4),
        },
        minutes=3,
    ),
    "broadcast": Benchmark(
        "a new anchor from one trainer to eight followers, over the ideal pipeline and over one-to-many",
        {"over_one_to_many": _least(2.5), "over_ideal": _most(2.0)},
        minutes=3,
    ),
    "engines": Benchmark(
        "torch and llama.cpp over `transformers.generate`, bare decoding and static batching; new weights",
        {
            "torch_over_generate_g16": _least(1.25),
            "llama_over_generate_g16": _least(1.8),
            "llama_494m_over_generate_g16": _least(1.8),
            "llama_over_bare_decode": _least(0.85),
            "mixed_lengths_over_static": _least(1.5),
        },
        minutes=30,
    ),
    "turns": Benchmark(
        "episodes of four turns on SmolLM2-135M: rows that are extended over a fresh prefill at every turn",
        {"extend_over_prefill": _least(1.5), "waiting_share": _most(0.05)},
        minutes=5,
    ),
    "scoring": Benchmark("a cheap score in the jail, in batches and one by one, and in this process"),
    "verify": Benchmark(
        "the verifier against honest samplers and forgers: who is refused, who is caught, what it costs",
        {
            "honest_completions": _least(2000),
            "honest_refused": _just(0),
            "proof_bytes_per_token": _just(0),
            "verify_over_generate": _most(0.75),
            "policy_share_of_sampling": _most(0.1),
        },
        minutes=60,
    ),
    "verify_caps": Benchmark(
        "honest completions against the caps on single log-probabilities, resumably", minutes=60
    ),
    "poisoned": Benchmark(
        "learning with half of the samplers cheating: clean, verified, believed, and each attack",
        {
            "honest_condemned": _just(0),
            **{f"{name}/steps_over_clean": _most(1.15) for name in _ATTACKS},
            **{f"{name}/forged_trained_share": _most(0.02) for name in _ATTACKS},
        },
        minutes=40,
    ),
    "convergence": Benchmark(
        "learning over the swarm against TRL on one machine: steps, times, final reward",
        {
            "sequential_steps_over_trl": _most(1.10),
            "async_s4_steps_over_trl": _most(1.35),
            "final_reward_gap": _most(0.02),
            "step_time_over_trl": _most(0.8),
            "trainer_busy_async": _least(0.9),
            "async_wall_over_sequential": _most(0.75),
        },
        minutes=90,
    ),
    "smollm2": Benchmark(
        "SmolLM2-135M learns over real nodes and by TRL: held-out accuracy, steps, time, bytes; resumably",
        {
            "accuracy_gain": _least(0.5),
            "nth_word_gain": _least(0.25),
            "two_digit_gain": _least(0.25),
            "steps_over_trl": _most(1.1),
            "honest_refused": _just(0),
            "cycle_over_arithmetic": _most(1.5),
        },
        minutes=180,
    ),
    "size": Benchmark(
        "the trainer at 135 M and 494 M parameters: bytes a parameter, the head's peak, step and publishing",
        {
            "bytes_per_parameter_bf16": _most(14.5),
            "bytes_per_parameter_accumulating": _most(16.5),
            "bytes_per_parameter_f32": _most(18.5),
            "head_peak_over_nv": _most(0.05),
            "head_peak_over_trl": _most(0.25),
            "publish_stall": _most(0.1),
            "step_time_over_trl": _most(0.8),
        },
        minutes=60,
    ),
    "lora": Benchmark(
        "LoRA over full training: bytes of a version, memory, step over PEFT in TRL, sampling, swaps; resumably",
        {
            "bytes_over_adapter": _most(0.75),
            "bytes_per_base_parameter": _most(3.5),
            "step_over_peft_trl": _most(0.8),
            "llama_with_adapter": _least(0.80),
            "torch_with_adapter": _least(0.85),
            "swap_ms": _most(50),
        },
        minutes=60,
    ),
    "join": Benchmark("from the start of a new sampler to its first group that is accepted", minutes=5),
    "load": Benchmark(
        "groups a second that one trainer takes in for good, what gives first, and a flood beside it",
        {"bytes_per_group_overhead": _most(1.15), "honest_under_flood": _least(0.8)},
        minutes=5,
    ),
}
"""Benchmarks in the order in which they run."""

PARTS: Final[Mapping[str, str]] = {
    "broadcast_node": "broadcast",
    "load_hostile": "load",
    "load_samplers": "load",
    "load_trainer": "load",
}
"""Modules that a benchmark starts as processes of its own; they measure nothing by themselves."""
