"""Status of the demo's nodes, from their events, and derived figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from echo_node.config import DemoConfig
from echo_node.demo.held_out import HeldOut
from echo_node.demo.task import DemoTask
from echo_node.telemetry.metrics import Records

REASONS: Final = {
    "token-out-of-reach": "it sent tokens that the slot's seed cannot have drawn",
    "luck-not-its-own": "it did not draw with the slot's seed",
    "wrong-temperature": "it drew at another temperature",
    "wrong-logprobs": "its log-probabilities are made up",
    "wrong-reward": "it claimed rewards that are wrong",
    "skipped-slots": "it left out slots with low rewards",
}
"""Reasons of verdicts, as sentences."""


@dataclass(slots=True)
class NodeStatus:
    """Status of one node of the demo.

    `engine` is a sampler's class, `cheat` its way of cheating, if any.
    """

    name: str
    role: str
    public: bytes
    peer_id: str
    engine: str = ""
    cheat: str = ""
    addresses: tuple[str, ...] = ()
    version: int | None = None
    peers: int = 0
    tokens_per_second: float = 0.0
    joined: bool = False
    finished: bool = False
    steps: int = 0
    verdicts: dict[str, int] = field(default_factory=dict)
    muted: dict[str, str] = field(default_factory=dict)
    """Reason by the peer id of a muted sampler."""
    held_out: tuple[tuple[int, float], ...] = ()
    """A trainer's evaluations: step and mean reward on held-out prompts."""

    def update(self, event: Mapping[str, Any]) -> None:
        """Apply an event of the node."""
        match event["event"]:
            case "listening":
                self.addresses = tuple(event["addresses"])
            case "joined":
                self.joined = True
            case "step":
                self.steps += 1
            case "progress":
                version = event.get("version")
                self.version = self.version if version is None else version
                self.peers = event.get("peers", 0)
                self.tokens_per_second = event.get("tokens_per_second", 0.0)
                self.verdicts = event.get("verdicts", {})
                self.muted |= event.get("muted", {})
                curve = (event.get("evaluation") or {}).get("curve", ())
                self.held_out = tuple((step, reward) for step, reward in curve)
            case "stopped":
                self.finished = bool(event.get("finished"))

    @property
    def is_up(self) -> bool:
        """Return whether it is in the swarm; for a sampler, whether it is in the roster."""
        return self.joined if self.role == "sampler" else bool(self.addresses)


class DemoState(Protocol):
    """State of a demo, as views read it."""

    @property
    def config(self) -> DemoConfig: ...

    @property
    def records(self) -> Records: ...

    @property
    def seconds(self) -> float: ...

    @property
    def tokens_per_second(self) -> float: ...

    @property
    def members(self) -> Sequence[NodeStatus]:
        """Nodes that are processes of their own; none if the demo is one process."""

    @property
    def model_bytes(self) -> int: ...

    @property
    def task(self) -> DemoTask: ...

    @property
    def first(self) -> HeldOut | None:
        """Answers to held-out prompts before the first step; None if there are none yet."""

    @property
    def last(self) -> HeldOut | None:
        """Answers to the same prompts at the end."""

    @property
    def page(self) -> str:
        """Address of the trainer's page; empty if there is none."""


@dataclass(frozen=True, slots=True)
class Caught:
    """A muted sampler."""

    member: NodeStatus | None
    """The demo's node, unless it is a stranger."""
    peer_id: str
    reason: str
    trained: int
    """Groups of it that were trained on before."""

    @property
    def words(self) -> str:
        return REASONS.get(self.reason, self.reason)


def caught(demo: DemoState) -> list[Caught]:
    """Return the samplers that the trainer has muted, sorted by name."""
    by_id = {member.peer_id: member for member in demo.members}
    muted = {peer: why for member in demo.members for peer, why in member.muted.items()}
    trained: Counter[bytes] = Counter()
    for record in demo.records.steps:
        trained += record.by_sampler
    found = [
        Caught(by_id.get(peer), peer, why, trained[by_id[peer].public] if peer in by_id else 0)
        for peer, why in muted.items()
    ]
    return sorted(found, key=lambda each: each.member.name if each.member else each.peer_id)


def verdicts(demo: DemoState) -> Counter[str]:
    """Count the groups by verdict, over all verifiers."""
    total: Counter[str] = Counter()
    for member in demo.members:
        total.update(member.verdicts)
    return total


def held_out_curve(demo: DemoState) -> tuple[tuple[int, float], ...]:
    """Return the trainer's evaluations so far: step and mean held-out reward."""
    return next((member.held_out for member in demo.members if member.held_out), ())


def bytes_out(demo: DemoState) -> tuple[int, int]:
    """Return the bytes of the published versions, sent and as whole weights."""
    versions = [record.bytes_out for record in demo.records.steps if record.bytes_out]
    return sum(versions), len(versions) * demo.model_bytes
