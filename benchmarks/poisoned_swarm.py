"""One swarm run in which some samplers cheat, with or without verification.

Half of the samplers have an engine that cheats; everything else of them is the node's own. One
cheats from its first group on, the other earns trust first. A follower measures published versions
on held-out prompts, since the reward of a batch with forged groups says nothing.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

import torch
import trio

from benchmarks.convergence_swarm import LONGEST_SECONDS, follow
from benchmarks.convergence_task import BATCH, GROUP, Curve, HeldOut, identity, luck, open_run
from benchmarks.poisoned_attacks import Attack, ForgingEngine, Sampler
from echo_node.credit.ledger import Entry, Ledger
from echo_node.engine.local import LocalEngine
from echo_node.engine.torch_decoder import TorchDecoder
from echo_node.net.memory import MemorySwarm
from echo_node.node import Node
from echo_node.runs.run import Run
from echo_node.telemetry.metrics import Records
from protocol import ZERO, Opened, Verdict, seal
from protocol.manifest import Verification

SAMPLERS: Final = 4
CHEATS: Final = 2
FORGERY: Final = Attack(honest_groups=(0, 64))
"""Forged groups in the open: one cheat begins at once, the other when it is trusted."""
SLOTS: Final = BATCH // SAMPLERS
STALENESS: Final = 4
EXTRA_STEPS: Final = 6
"""After the last step that is measured, so that its version can still be pulled."""
UNVOUCHED: Final = 0.1
"""The part of a batch that nobody vouches for, or that the trainer looks at itself."""

Policy = Literal["none", "self", "sampled", "quorum"]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Outcome of one run."""

    side: str
    seed: int
    curve: Curve
    seconds: float
    forged_made: int
    forged_trained: int
    last_forged_step: int
    """After which nothing forged was trained on; 0: nothing ever was."""
    made_before_verdict: tuple[int | None, ...]
    """Groups forged by each cheat before its first condemnation; None without one."""
    cheats_muted: int
    honest_condemned: int
    verdicts: dict[str, int]
    """Verdicts by reason."""
    trained: tuple[tuple[int, int, int], ...] = ()
    """Of each step: its number, the groups that were trained on, and those of them forged."""

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> Outcome:
        """Return the outcome that was written as JSON."""
        pairs = {"curve": [tuple(each) for each in told["curve"]]}
        triples = {"trained": tuple(tuple(each) for each in told["trained"])}
        return cls(**{**told, **pairs, **triples, "made_before_verdict": tuple(told["made_before_verdict"])})


def open_poisoned_run(seed: int, policy: Policy, verifiers: int) -> Run:
    """Return the run of a seed with this verification."""
    plain = open_run(seed, staleness=STALENESS)
    if policy == "none":
        return plain
    names = [f"verifier {number}" for number in range(verifiers)] if policy != "self" else []
    manifest = dataclasses.replace(
        plain.manifest,
        verification=Verification(policy=policy, quorum=max(1, len(names)), share=UNVOUCHED),
        verifiers=tuple(sorted(identity(seed, name).public for name in names)),
    )
    with closing(plain):
        return Run.open(seal(manifest, identity(seed, "trainer"), ZERO), plain.folder, jailed=False)


def play(
    side: str,
    seed: int,
    steps: int,
    *,
    cheats: int = CHEATS,
    policy: Policy = "none",
    verifiers: int = 1,
    attack: Attack = FORGERY,
    enough: float = math.inf,
) -> Outcome:
    """Let a swarm with so many cheats take so many steps, or until a reward is `enough`."""
    torch.set_num_threads(1)
    with closing(open_poisoned_run(seed, policy, verifiers)) as run, attack.during():
        return trio.run(_Swarm(run, side, seed, steps, cheats, attack, enough).play)


class _Accusations(Ledger):
    """Ledger of the verifiers; `forged_by` counts groups that a sampler has forged."""

    def __init__(self, path: Path, forged_by: Callable[[bytes], int]) -> None:
        super().__init__(path)
        self._forged_by = forged_by
        self.against: Counter[bytes] = Counter()
        self.first: dict[bytes, int] = {}

    def verdict(self, found: Opened[Verdict], group: Entry | None = None) -> bool:
        if group is not None and found.message.result == "dishonest":
            self.against[group.sampler] += 1
            self.first.setdefault(group.sampler, self._forged_by(group.sampler))
        return super().verdict(found, group)


class _Swarm:
    def __init__(
        self, run: Run, side: str, seed: int, steps: int, cheats: int, attack: Attack, enough: float
    ) -> None:
        self._run = run
        self._side = side
        self._seed = seed
        self._steps = steps
        self._enough = enough
        self._honest = SAMPLERS - cheats
        self._nodes_in_all = self._honest + cheats * attack.keys
        self._attack = attack
        self._cheats: dict[bytes, ForgingEngine] = {}
        """Cheating samplers by public key."""
        self._nodes: list[Node] = []
        self._records = Records()
        self._verifiers: list[Node] = []

    async def play(self) -> Outcome:
        run, seed, begun = self._run, self._seed, time.monotonic()
        curve: Curve = []
        held_out = HeldOut(run)
        heads = itertools.count()
        with tempfile.TemporaryDirectory(prefix="echo-poisoned-") as passing, ExitStack() as engines:
            ledger = engines.enter_context(_Accusations(Path(passing) / "ledger.sqlite", self._forged_by))
            with trio.fail_after(LONGEST_SECONDS):
                async with MemorySwarm(seed) as swarm, trio.open_nursery() as nursery:
                    for number in range(self._nodes_in_all):
                        sampler = self._sampler(number, Sampler(run, swarm.join))
                        node = Node(sampler.run, identity(seed, f"sampler {number}"), sampler.join)
                        engine = engines.enter_context(closing(self._engine(number)))
                        self._nodes.append(node)
                        slots = self._slots(number)
                        nursery.start_soon(partial(node.sample, slots_per_call=slots, engine=engine))
                    for number in range(len(run.manifest.verifiers)):
                        node = Node(run, identity(seed, f"verifier {number}"), swarm.join)
                        engine = engines.enter_context(closing(self._plain_engine(GROUP)))
                        self._verifiers.append(node)
                        nursery.start_soon(
                            lambda node=node, engine=engine: node.verify(engine=engine, ledger=ledger)
                        )
                    nursery.start_soon(self._measure, swarm, held_out, curve, nursery.cancel_scope)
                    trainer = Node(
                        run,
                        identity(seed, "trainer"),
                        swarm.join,
                        luck=lambda: luck(seed, f"head {next(heads)}"),
                    )
                    await trainer.train(
                        self._steps + EXTRA_STEPS, records=self._records, first_samplers=self._nodes_in_all
                    )
                    nursery.cancel_scope.cancel()
            return self._outcome(curve, time.monotonic() - begun, ledger)

    async def _measure(
        self, swarm: MemorySwarm, held_out: HeldOut, curve: Curve, everything: trio.CancelScope
    ) -> None:
        """Measure published versions, and end the run once the reward is enough."""
        await follow(self._run, swarm, self._seed, self._steps, held_out, curve, self._enough)
        if curve[-1][1] >= self._enough:
            everything.cancel()

    def _engine(self, number: int) -> LocalEngine:
        if number < self._honest:
            return self._plain_engine(self._slots(number) * GROUP)
        honest_groups = self._attack.honest_groups
        first = honest_groups[(number - self._honest) % len(honest_groups)]
        cheat = self._attack.engine(self._run, self._slots(number) * GROUP, first)
        self._cheats[identity(self._seed, f"sampler {number}").public] = cheat
        return cheat

    def _slots(self, number: int) -> int:
        """Return the groups of one call; the keys of a cheat share its slots."""
        return SLOTS if number < self._honest else max(1, SLOTS // self._attack.keys)

    def _sampler(self, number: int, sampler: Sampler) -> Sampler:
        """Return what a sampler's node is made with: as all have it, and changed if it cheats."""
        sampler = self._attack.everybody(sampler)
        return sampler if number < self._honest else self._attack.cheats(sampler)

    def _forged_by(self, sampler: bytes) -> int:
        return len(self._cheats[sampler].forged) if sampler in self._cheats else 0

    def _plain_engine(self, rows: int) -> LocalEngine:
        return LocalEngine(TorchDecoder(self._run.folder, device="cpu", dtype="f32", threads=1), rows=rows)

    def _outcome(self, curve: Curve, seconds: float, ledger: _Accusations) -> Outcome:
        forged = {key for cheat in self._cheats.values() for key in cheat.forged}
        trained = tuple(
            (
                record.step,
                len(record.groups),
                sum(
                    self._run.slot_key(group.head, group.sampler, group.slot) in forged
                    for group in record.groups
                ),
            )
            for record in self._records.steps
        )
        muted = ["muted" in node.status()["refused"] for node in self._nodes]
        honest = [identity(self._seed, f"sampler {number}").public for number in range(self._honest)]
        found: Counter[str] = Counter()
        for node in self._verifiers:
            found += node.verdicts
        return Outcome(
            side=self._side,
            seed=self._seed,
            curve=[(step, reward) for step, reward in curve if step <= self._steps],
            seconds=seconds,
            forged_made=len(forged),
            forged_trained=sum(count for _, _, count in trained),
            last_forged_step=max((step for step, _, count in trained if count), default=0),
            made_before_verdict=tuple(ledger.first.get(key) for key in self._cheats),
            cheats_muted=sum(muted[self._honest :]),
            honest_condemned=sum(muted[: self._honest]) + sum(ledger.against[key] for key in honest),
            verdicts=dict(found),
            trained=trained,
        )
