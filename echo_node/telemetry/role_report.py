"""Report of a running role: its figures, its mute rules, and the peers of the run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from echo_node.net.base import Mute, Network
from echo_node.runtime.reputation import PeerReputation, Reputations
from echo_node.telemetry.metrics import Rate
from protocol import Manifest, peer_id

MOST_PEERS: Final = 500
"""Peers that one report of the swarm lists."""


@dataclass(frozen=True, slots=True)
class RoleReport:
    """Figures of a running role."""

    role: str = "peer"
    status: Callable[[], Mapping[str, Any]] = dict
    """Current figures as plain values."""
    tokens: Rate = field(default_factory=Rate)
    """Tokens sampled or admitted per second."""
    verdicts: Counter[str] = field(default_factory=Counter)
    """A verifier's verdicts, by result."""
    reputation: PeerReputation = field(default_factory=Reputations)
    """The role's mute rules, beside those of the network."""
    members: Callable[[], Mapping[bytes, Mapping[str, Any]]] = dict
    """The samplers in the roster, with what is known of each."""

    def mutes(self, network: Network) -> Mapping[bytes, Mute]:
        """Return all peers that are muted now, by the role or by the network."""
        return {**self.reputation.mutes(), **network.mutes()}

    def peers(self, own_key: bytes, manifest: Manifest, network: Network) -> list[dict[str, Any]]:
        """List the run's peers: this node, manifest keys, samplers, connections."""
        members, connected, mutes = self.members(), network.peers(), self.mutes(network)
        roles = dict.fromkeys(members, "sampler") | {own_key: self.role}
        roles |= dict.fromkeys(manifest.verifiers, "verifier") | dict.fromkeys(manifest.trainers, "trainer")
        return [
            {
                "peer_id": peer_id(key),
                "role": roles.get(key, "peer"),
                "me": key == own_key,
                "connected": key in connected or key == own_key,
                "muted": ", ".join(sorted(mutes[key].reasons)) if key in mutes else None,
                **members.get(key, {}),
            }
            for key in sorted({own_key, *roles, *connected, *mutes})[:MOST_PEERS]
        ]
