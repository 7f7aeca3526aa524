"""Events of a node: text for people, JSON lines for programs, snapshot."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import trio

from echo_node.net.base import Mute, Network
from echo_node.net.libp2p import Libp2pNetwork
from echo_node.telemetry.evaluations import Evaluation
from echo_node.telemetry.metrics import StepRecord
from echo_node.telemetry.snapshot import Snapshot
from protocol import peer_id

PROGRESS_SECONDS: Final = 1.0
"""Seconds between two polls of a node's status."""
WORDS_EVERY: Final = 10
"""Polls per printed progress line."""
NOBODY: Final = "no peer can be reached: is a seed of the run's swarm up? name it by --seed"
UNHELPED: Final = 10
"""Polls without a sampler after which a leading trainer reports it."""
MOST_MUTES: Final = 20
"""Newly muted peers reported per poll, so that strangers cannot fill a log."""
ALONE: Final = 15
"""Polls without a peer after which a node reports it."""


@dataclass(frozen=True, slots=True)
class Events:
    """Sink of a node's events: the terminal, as text or JSON, and the snapshot."""

    as_json: bool
    write: Callable[[str], None] = field(repr=False)
    board: Snapshot = field(default_factory=Snapshot, repr=False)
    aside: Callable[[str], None] = field(default=lambda _words: None, repr=False)
    """Prints text that is for a person alone, and not an event."""

    def emit(self, event: str, words: str, /, **more: Any) -> None:
        """Emit an event with its text and figures; without text it is for programs alone."""
        self.board.record(event, words, more)
        if self.as_json:
            self.write(json.dumps({"event": event, "at": round(time.time(), 3), **more}))
        elif words:
            self.write(words)


@dataclass(frozen=True, slots=True)
class StepEvents:
    """A writer of step records that emits each step as an event."""

    events: Events

    def write(self, record: StepRecord) -> None:
        ages = {str(age): count for age, count in sorted(record.staleness.items())}
        self.events.emit(
            "step",
            f"step {record.step}: reward {record.reward:.3f}, version {record.version}",
            step=record.step,
            version=record.version,
            head=record.head.hex(),
            reward=record.reward,
            spread=record.spread,
            loss=record.loss,
            kl=record.kl,
            entropy=record.entropy,
            clip_share=record.clip_share,
            mask_share=record.mask_share,
            veto_share=record.veto_share,
            mismatch_kl=record.mismatch_kl,
            effective_sample_share=record.effective_sample_share,
            gradient_norm=record.gradient_norm,
            learning_rate=record.learning_rate,
            condemned_used=record.condemned_used,
            tokens=record.tokens,
            bytes_in=record.bytes_in,
            bytes_out=record.bytes_out,
            dropped=record.dropped,
            staleness=ages,
            samplers={peer_id(key): count for key, count in sorted(record.by_sampler.items())},
            heads=sorted({group.head.hex() for group in record.groups}),
            waited_seconds=round(record.waited_seconds, 3),
            step_seconds=round(record.step_seconds, 3),
        )

    def write_evaluation(self, found: Evaluation) -> None:
        self.events.emit(
            "evaluation",
            f"version {found.version} (step {found.step}): held-out reward {found.reward:.3f} ± {found.error:.3f}"
            f" on {found.prompts} prompts, in {found.seconds:.1f} s",
            **found.plain(),
        )

    def close(self) -> None:
        return


async def warn_if_alone(network: Libp2pNetwork, events: Events) -> None:
    """Emit an event if no peer is connected after a while."""
    await trio.sleep(ALONE * PROGRESS_SECONDS)
    if not network.peers():
        events.emit("alone", NOBODY)


async def report_mutes(muted: Callable[[], Mapping[bytes, Mute]], events: Events) -> None:
    """Emit one event per mute of a peer by this node."""
    before: frozenset[bytes] = frozenset()
    while True:
        await trio.sleep(PROGRESS_SECONDS)
        mutes = muted()
        for key in sorted(mutes.keys() - before)[:MOST_MUTES]:
            seconds, reasons = round(mutes[key].seconds), dict(sorted(mutes[key].reasons.items()))
            words = f"{peer_id(key)} is muted for {seconds} s: {', '.join(reasons)}"
            events.emit("muted", words, peer_id=peer_id(key), seconds=seconds, reasons=reasons)
        before = frozenset(mutes)


class Reporting(Protocol):
    """A node whose progress is reported."""

    def status(self) -> Mapping[str, Any]:
        """Return the role's figures as plain values."""

    def swarm(self, network: Network) -> list[dict[str, Any]]:
        """List the peers of the run that this node knows."""


async def report_progress(node: Reporting, network: Libp2pNetwork, events: Events) -> None:
    """Emit progress when it changes, and once that the node has joined.

    As text it comes less often.
    """
    before: dict[str, Any] = {}
    joined = too_slow = unhelped = failing = False
    alone = 0
    for second in itertools.count(1):
        await trio.sleep(PROGRESS_SECONDS)
        now = {"peers": len(network.peers()), **node.status()}
        events.board.describe_swarm(node.swarm(network), network.reachability.one_line())
        alone = 0 if now["peers"] else alone + 1
        if alone == ALONE:
            events.emit("alone", NOBODY)
        if second >= UNHELPED and now.get("leading") and not now.get("samplers") and not unhelped:
            unhelped = True
            events.emit(
                "unhelped", "no sampler has joined yet: volunteers need the link of `echo-node run link`"
            )
        if now.get("joined") and not joined:
            joined = True
            events.emit("joined", "this node is in the roster and samples", version=now["version"])
        if (behind := now.get("too_slow")) and not too_slow:
            too_slow = True
            events.emit("too_slow", behind)
        if bool(now.get("failing")) != failing:
            failing = not failing
            events.emit("failing", f"failing: {now['failing']}" if failing else "no longer failing")
        if now != before:
            events.emit("progress", _in_words(now) if second % WORDS_EVERY == 0 else "", **now)
        before = now


def _in_words(now: Mapping[str, Any]) -> str:
    """Format the figures that have a value."""
    return ", ".join(
        name.replace("_", " ") if value is True else f"{name.replace('_', ' ')} {_plain(value)}"
        for name, value in now.items()
        if value not in (None, False, {}, [])
    )


def _plain(value: Any) -> str:
    if isinstance(value, dict):  # nested values are for programs, and for `status`
        shown = {name: inner for name, inner in value.items() if not isinstance(inner, dict | list)}
        return "(" + ", ".join(f"{inner} {name}" for name, inner in shown.items()) + ")"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return str(value)
