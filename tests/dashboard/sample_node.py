"""A node's snapshot as each role fills it, by the same events as a real node's."""

from __future__ import annotations

import math
import random
import time

from echo_node.telemetry.snapshot import Snapshot
from protocol import Identity


def name_of(number: int) -> str:
    return Identity(number.to_bytes(32, "big")).peer_id


ME, TRAINER, VERIFIERS = name_of(1), name_of(2), [name_of(3), name_of(4)]
SAMPLERS = [name_of(10 + number) for number in range(9)]
ENGINES = ("llama/f16", "torch/f32", "llama/f16", "torch/bf16")
RUN = {
    "id": "5e0f3c77a1b2" * 5 + "aa00",
    "name": "reverse-digits",
    "author": name_of(5),
    "contract": "digits-reverse 1",
    "mode": "async",
    "staleness": 4,
    "group_size": 8,
    "model_bytes": 724_032,
}


HAPPENINGS = (
    (17, "note", "step {number}: the weights are on disk, and another peer has them too"),
    (53, "paused", "paused: this machine is on battery"),
    (54, "resumed", "the battery charges again: it goes on"),
    (71, "muted", "a peer is muted: wrong-temperature, two verifiers say so"),
)


class Story:
    """A board, and a node of this role that goes on with each `turn`."""

    def __init__(self, role: str, *, began: float = 0.0, **run: object) -> None:
        self.board = Snapshot()
        self.role = role
        self.luck = random.Random(7)
        self.number = 0
        self.counts: dict[str, dict[str, int]] = {"refused": {}, "dropped": {}, "verdicts": {}}
        self.accepted = 0
        self.board._node["began"] -= began
        ident = (
            f"{role} of {RUN['name']}: this node is {ME}, its state is in /home/ada/.local/state/echo-node"
        )
        self.board.record(
            "started", ident, {"role": role, "peer_id": ME, "state": "/home/ada/.local/state/echo-node"}
        )
        self.board.describe_run({**RUN, **run})
        address = f"/ip4/192.0.2.17/tcp/4001/p2p/{ME}"
        self.board.record("listening", f"others reach it at {address}", {"addresses": [address]})
        if role == "sampler":
            self.board.record("joined", "this node is in the roster and samples", {"version": 0})

    def swarm(self, **more: object) -> None:
        """Whom it knows. What samplers have is known to the trainer alone."""
        trainer = ME if self.role == "trainer" else TRAINER
        named = {trainer: "trainer", **dict.fromkeys(VERIFIERS, "verifier"), ME: self.role}
        peers = [_peer(name, role) for name, role in named.items()]
        for index, name in enumerate(SAMPLERS):
            peer = _peer(name, "sampler")
            if self.role == "trainer":
                lag = (0, 1, 0, 2, 1, 0, 4, 1, 3)[index]
                peer |= {
                    "engine": ENGINES[index % 4],
                    "groups": self.number * (9 - index),
                    "step": max(0, self.number - lag),
                }
            peers.append(peer)
        peers[-1] |= {"muted": "wrong-temperature"}
        peers[-2] |= {"connected": False}
        peers += [_peer(name_of(40 + number), "peer") for number in range(4)]
        self.board.describe_swarm([{**peer, **more} for peer in peers], "Other nodes can dial this machine.")

    def turn(self, at: float | None = None) -> None:
        """One more step of the run, as this role sees it."""
        self.number += 1
        number, luck = self.number, self.luck
        mean = 0.3 + 0.58 / (1 + math.exp(-(number - 95) / 28))
        if self.role == "trainer":
            self._count("dropped", {"full": 0.5, "stale": 0.3, "condemned": 0.06, "wrong-prompt": 0.02})
            self._step(min(1.0, max(0.0, luck.gauss(mean, 0.045))), at)
        elif self.role == "verifier":
            self._count(
                "verdicts",
                {"honest": 1.0, "not looked at": 0.4, "wrong-temperature": 0.05, "luck-not-its-own": 0.03},
            )
        else:
            self.accepted += luck.randrange(2, 5)
            self._count("refused", {"full": 0.2, "stale": 0.12, "not-in-roster": 0.01})
        self.board.record("progress", "", self._progress(mean))

    def _step(self, reward: float, at: float | None) -> None:
        luck, number = self.luck, self.number
        ages = {
            "0": luck.randrange(12, 20),
            "1": luck.randrange(6, 12),
            "2": luck.randrange(2, 6),
            "3": luck.randrange(3),
            "4": luck.randrange(2),
        }
        told = {
            "step": number,
            "version": number,
            "head": f"{luck.getrandbits(256):064x}",
            "reward": reward,
            "spread": 0.4,
            "loss": luck.gauss(0.0, 0.02),
            "kl": 0.0,
            "entropy": 0.7,
            "clip_share": 0.02,
            "mask_share": 0.0,
            "veto_share": 0.0,
            "mismatch_kl": 0.001,
            "effective_sample_share": 0.97,
            "gradient_norm": 0.3,
            "learning_rate": 1.5e-4,
            "condemned_used": 0,
            "tokens": luck.randrange(1400, 1536),
            "bytes_in": luck.randrange(24_000, 38_000),
            "bytes_out": luck.randrange(9_000, 26_000),
            "dropped": dict(self.counts["dropped"]),
            "staleness": {age: count for age, count in ages.items() if count},
            "samplers": {name: luck.randrange(1, 5) for name in SAMPLERS[:6]},
            "heads": [],
            "waited_seconds": 0.1,
            "step_seconds": 0.4,
        }
        self.board.record("step", f"step {number}: reward {reward:.3f}", told)
        if at is not None:
            self.board._steps[-1]["at"] = at

    def _count(self, what: str, rates: dict[str, float]) -> None:
        counts = self.counts[what]
        for name, rate in rates.items():
            if self.luck.random() < rate:
                counts[name] = counts.get(name, 0) + self.luck.randrange(1, 4)

    def _progress(self, mean: float) -> dict[str, object]:
        speed = round(930 + 60 * math.sin(self.number / 40) + self.luck.gauss(0, 20), 1)
        told: dict[str, object] = {"peers": 13, "version": self.number}
        if self.role == "trainer":
            told |= {"step": self.number, "batches": self.number, "reward": round(mean, 4), "samplers": 9}
            told |= {
                "waiting": 71,
                "dropped": dict(self.counts["dropped"]),
                "tokens_per_second": speed,
                "leading": True,
            }
        elif self.role == "verifier":
            told |= {"verdicts": dict(self.counts["verdicts"])}
        else:
            told |= {"joined": True, "leader_is_silent": False, "accepted": self.accepted, "waiting": 3}
            told |= {"credit": {"tokens": 40 * self.accepted, "groups": self.accepted, "admitted": 2}}
            told |= {"refused": dict(self.counts["refused"]), "tokens_per_second": speed}
        return told


def a_long_story(role: str, turns: int = 180) -> Story:
    """A node that has been at it for some minutes."""
    story = Story(role, began=turns * 3.0 + 20)
    now = time.time()
    for line in story.board._log:
        line["at"] = round(now - turns * 3.0 - 15, 3)
    for number in range(turns):
        at = now - 3.0 * (turns - number)
        story.turn(at)
        for every, event, words in HAPPENINGS:
            if number % every == every - 1:
                story.board.record(event, words.format(number=number), {})
                story.board._log[-1]["at"] = round(at, 3)
    story.swarm()
    return story


def _peer(name: str, role: str) -> dict[str, object]:
    return {"peer_id": name, "role": role, "me": name == ME, "connected": True, "muted": None}
