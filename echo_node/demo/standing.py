"""What the nodes of the demo have said of themselves so far: the newest of each, in numbers that views show.

It reads events, and knows neither processes nor terminals.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from echo_node.config import DemoConfig
from echo_node.metrics import Records

REASONS: Final = {
    "token-out-of-reach": "it sent tokens that its luck cannot have drawn",
    "luck-not-its-own": "it drew with luck of its own choosing",
    "wrong-temperature": "it drew at another temperature",
    "wrong-logprobs": "its log-probabilities are made up",
    "wrong-reward": "it claimed rewards that are wrong",
    "skipped-slots": "it left out what was worth less",
}
"""What verifiers find, in words."""


@dataclass(slots=True)
class Member:
    """One node of the demo, by what it has told. `engine` is a sampler's; `cheat` says how it cheats, if it does."""

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
    """By peer id, what for."""

    def hear(self, event: Mapping[str, Any]) -> None:
        """Take in what it tells."""
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
            case "stopped":
                self.finished = bool(event.get("finished"))

    @property
    def is_up(self) -> bool:
        """Whether it has a place in the swarm; for a sampler, whether it is in the roster."""
        return self.joined if self.role == "sampler" else bool(self.addresses)


class Shown(Protocol):
    """A demo as views read it."""

    @property
    def config(self) -> DemoConfig: ...

    @property
    def records(self) -> Records: ...

    @property
    def seconds(self) -> float: ...

    @property
    def tokens_per_second(self) -> float: ...

    @property
    def members(self) -> Sequence[Member]:
        """Those that are processes of their own; none, if all is one."""

    @property
    def model_bytes(self) -> int: ...

    @property
    def page(self) -> str:
        """Where a page about it is; nothing, if there is none."""


@dataclass(frozen=True, slots=True)
class Caught:
    """A sampler that is no longer heard."""

    member: Member | None
    """Who it is, if it is one of ours."""
    peer_id: str
    reason: str
    trained: int
    """Groups of it that were learnt from before."""

    @property
    def words(self) -> str:
        return REASONS.get(self.reason, self.reason)


def caught(shown: Shown) -> list[Caught]:
    """Whom the trainer has muted, in the order of their names."""
    by_id = {member.peer_id: member for member in shown.members}
    muted = {peer: why for member in shown.members for peer, why in member.muted.items()}
    trained: Counter[bytes] = Counter()
    for record in shown.records.steps:
        trained += record.by_sampler
    found = [
        Caught(by_id.get(peer), peer, why, trained[by_id[peer].public] if peer in by_id else 0)
        for peer, why in muted.items()
    ]
    return sorted(found, key=lambda each: each.member.name if each.member else each.peer_id)


def verdicts(shown: Shown) -> Counter[str]:
    """What was found of groups, by all verifiers together."""
    total: Counter[str] = Counter()
    for member in shown.members:
        total.update(member.verdicts)
    return total


def bytes_out(shown: Shown) -> tuple[int, int]:
    """What the versions took that were published for steps, and what they would take as whole weights."""
    versions = [record.bytes_out for record in shown.records.steps if record.bytes_out]
    return sum(versions), len(versions) * shown.model_bytes
