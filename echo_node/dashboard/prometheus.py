"""Prometheus metrics of a snapshot, without figures that a role lacks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, get_args

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)

from echo_node.dashboard.aggregates import Aggregates
from echo_node.dashboard.sanitize import line
from echo_node.dashboard.view import complete_peers
from echo_node.telemetry.snapshot import Phase

MOST_LABELS: Final = 64
"""Values of one label: a peer may invent reasons, and each would be a series for ever."""
AGES: Final = (0, 1, 2, 3, 4, 6, 8, 16, 32)

_GAUGES: Final = {
    "step": "Optimiser steps of the newest policy that this node knows",
    "version": "The newest version of the weights that this node holds",
    "reward": "Mean reward of the last steps",
    "peers": "Peers that this node is connected to",
    "samplers": "Samplers in the roster",
    "waiting": "Groups that wait, to be trained on or to be delivered",
    "tokens_per_second": "Tokens generated or admitted a second",
    "joined": "Whether this sampler is in the roster",
    "leading": "Whether this trainer leads the run",
    "leader_is_silent": "Whether the leader's lease is over",
}
_OF_THE_LAST_STEP: Final = {
    "reward": ("step_reward", "Mean reward"),
    "spread": ("step_reward_spread", "Spread of the rewards"),
    "loss": ("step_loss", "Loss"),
    "kl": ("step_kl", "Divergence from the reference policy"),
    "entropy": ("step_entropy", "Entropy of the policy"),
    "clip_share": ("step_clip_share", "Share of the tokens that were clipped"),
    "mask_share": ("step_mask_share", "Share of the tokens that were masked out"),
    "veto_share": ("step_veto_share", "Share of the completions that were left out"),
    "mismatch_kl": ("step_mismatch_kl", "Divergence of the policy from what samplers claim"),
    "effective_sample_share": ("step_effective_sample_share", "Effective share of the sample"),
    "gradient_norm": ("step_gradient_norm", "Norm of the gradient"),
    "learning_rate": ("step_learning_rate", "Learning rate"),
    "tokens": ("step_tokens", "Tokens that it learnt from"),
    "bytes_in": ("step_received_bytes", "Bytes of groups that came since the step before"),
    "bytes_out": ("step_sent_bytes", "Bytes of the version that went out"),
    "waited_seconds": ("step_waited_seconds", "Seconds of waiting for groups"),
    "step_seconds": ("step_seconds", "Seconds of computing"),
    "condemned_used": ("step_condemned_used", "Groups found dishonest after they were used, so far"),
}
_EVALUATION: Final = {
    "reward": ("held_out_reward", "Mean reward of the last version that was evaluated, on held-out prompts"),
    "version": ("held_out_version", "The last version that was evaluated"),
    "seconds": ("held_out_seconds", "Seconds that its evaluation took"),
    "best_reward": ("held_out_best_reward", "Highest mean reward on held-out prompts so far"),
    "best_version": ("held_out_best_version", "The version that had it, which is kept"),
}
_BY_REASON: Final = {
    "refused": ("groups_refused", "reason", "Groups of this sampler that were refused"),
    "dropped": ("groups_dropped", "reason", "Groups that this trainer refused or let go"),
    "verdicts": ("verdicts", "result", "What groups were found to be by this verifier"),
}


def exposition(snapshot: Mapping[str, Any], totals: Aggregates) -> tuple[str, bytes]:
    """Return the content type and the text of the metrics."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Figures(snapshot, totals))
    return CONTENT_TYPE_LATEST, generate_latest(registry)


@dataclass(frozen=True, slots=True, eq=False)  # a registry keeps its collectors by identity
class _Figures:
    """A collector of one snapshot."""

    snapshot: Mapping[str, Any]
    totals: Aggregates

    def collect(self) -> Iterator[Metric]:
        yield from self._node()
        yield from self._progress()
        yield from self._swarm()
        yield from self._sums()

    def _node(self) -> Iterator[Metric]:
        node, run = self.snapshot["node"], self.snapshot["run"] or {}
        facts = {
            "program": self.snapshot["program"],
            "role": node.get("role", ""),
            "peer_id": node.get("peer_id", ""),
            "run": run.get("id", ""),
            "name": run.get("name", ""),
            "mode": run.get("mode", ""),
        }
        who = InfoMetricFamily("echo_node", "Who this node is, and in which run")
        who.add_metric([], {name: line(str(fact)) for name, fact in facts.items()})
        yield who
        phase = GaugeMetricFamily("echo_node_phase", "1 for what this node is doing", labels=["phase"])
        for each in get_args(Phase):
            phase.add_metric([each], float(each == self.snapshot["phase"]))
        yield phase
        yield GaugeMetricFamily("echo_node_start_time_seconds", "When it began", float(node.get("began", 0)))

    def _progress(self) -> Iterator[Metric]:
        progress = self.snapshot["progress"]
        for name, words in _GAUGES.items():
            if (value := _number(progress.get(name))) is not None:
                yield GaugeMetricFamily(f"echo_node_{name}", words, value)
        evaluation = progress.get("evaluation") or {}
        for name, (known, words) in _EVALUATION.items():
            if (value := _number(evaluation.get(name))) is not None:
                yield GaugeMetricFamily(f"echo_node_{known}", words, value)
        last = self.snapshot["steps"][-1] if self.snapshot["steps"] else {}
        for name, (known, words) in _OF_THE_LAST_STEP.items():
            if (value := _number(last.get(name))) is not None:
                yield GaugeMetricFamily(f"echo_node_{known}", f"{words}, at the last step", value)
        if (accepted := _number(progress.get("accepted"))) is not None:
            words = "Groups of this sampler that were accepted"
            yield CounterMetricFamily("echo_node_groups_accepted", words, accepted)
        for name, (known, label, words) in _BY_REASON.items():
            if isinstance(counts := progress.get(name), Mapping):
                yield _by_label(CounterMetricFamily(f"echo_node_{known}", words, labels=[label]), counts)

    def _swarm(self) -> Iterator[Metric]:
        counts: dict[tuple[str, str], int] = {}
        for peer in complete_peers(self.snapshot):
            state = "muted" if peer.get("muted") else "connected" if peer.get("connected") else "away"
            key = (line(str(peer.get("role", "peer"))), state)
            counts[key] = counts.get(key, 0) + 1
        known = GaugeMetricFamily(
            "echo_node_known_peers", "Whom this node knows of the run", labels=["role", "state"]
        )
        for labels, count in sorted(counts.items())[:MOST_LABELS]:
            known.add_metric(labels, count)
        yield known

    def _sums(self) -> Iterator[Metric]:
        sums, run = self.totals, self.snapshot["run"] or {}
        whole = (_number(run.get("model_bytes")) or 0.0) * sums.versions
        for name, words, value in (
            ("steps", "Steps that this node took", sums.steps),
            ("versions_published", "Versions that it sent out", sums.versions),
            ("groups_trained", "Groups that it learnt from", sums.groups),
            ("tokens_trained", "Tokens that it learnt from", sums.tokens),
            ("received_bytes", "Bytes of groups that came in", sums.bytes_in),
            ("sent_bytes", "Bytes of versions that went out", sums.bytes_out),
            ("full_weights_bytes", "Bytes that the same versions have as whole weights", whole),
        ):
            yield CounterMetricFamily(f"echo_node_{name}", words, float(value))
        yield _ages(sums.ages)


def _ages(found: Mapping[int, int]) -> Metric:
    below = [(str(float(age)), sum(n for each, n in found.items() if each <= age)) for age in AGES]
    family = HistogramMetricFamily("echo_node_staleness_steps", "Steps between a group's policy and the step")
    family.add_metric(
        [], [*below, ("+Inf", sum(found.values()))], sum_value=sum(age * n for age, n in found.items())
    )
    return family


def _by_label(family: CounterMetricFamily, counts: Mapping[Any, Any]) -> Metric:
    for name, count in _largest(counts):
        family.add_metric([line(name)], count)
    return family


def _largest(counts: Mapping[Any, Any]) -> Iterable[tuple[str, float]]:
    numbers = [(str(name), value) for name, count in counts.items() if (value := _number(count)) is not None]
    return sorted(numbers, key=lambda each: (-each[1], each[0]))[:MOST_LABELS]


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) else None
