"""A verifier's auditor, by its own account of heads and announcements, finds chosen heads."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from echo_node.engine.base import never
from echo_node.rollouts.admission import Admission
from echo_node.verifier.selection_audit import SlotFigures
from echo_node.verifier.slot_auditor import SlotAuditor
from protocol import Envelope, SlotAnnouncement, seal
from tests.crafting import SAMPLERS, Chain, open_run, roster

SAMPLER = SAMPLERS[0]
AMONG = 5
"""Heads of which a cheat posts one."""
SLOTS = 4
SIZE = 8
"""Completions of a group."""


class World(SlotAuditor):
    """A verifier's auditor in a run whose draws are made up, and better from head to head.

    Heads, rosters, announcements and plans are those of the product; only the engine is not.
    """

    def __init__(self, seed: int) -> None:
        self.run = open_run(staleness=AMONG)
        self.admission = Admission(self.run)
        super().__init__(self.run, self.admission, lambda _head: None)
        self.chain = Chain(self.run)
        self.rng = np.random.default_rng(seed)
        self.heads: list[bytes] = []
        self._groups: dict[tuple[bytes, int], tuple[list[float], list[int]]] = {}

    def publish(self) -> None:
        head = self.chain.next(SAMPLER)
        self.admission.published(head, roster(SAMPLER))
        self.heads.append(head.id)
        self.settle()

    def group(self, head: bytes, slot: int) -> tuple[list[float], list[int]]:
        """Return rewards and lengths; the same slot always gives the same."""
        if (head, slot) not in self._groups:
            right = self.rng.random(SIZE) < 0.2 + 0.6 * min(1.0, self.heads.index(head) / 400)
            self._groups[head, slot] = ([*right.astype(float)], [*self.rng.integers(3, 9, SIZE)])
        return self._groups[head, slot]

    def worth(self, head: bytes) -> float:
        return float(np.mean([self.group(head, slot)[0] for slot in range(SLOTS)]))

    def _generate(self, head, _sampler, slots, _stop):
        return {slot: SlotFigures.of(*self.group(head, slot)) for slot in slots}

    def post(self, head: bytes) -> str | None:
        """Announce and send the first slots of a head; return what the verifier finds."""
        announced = SlotAnnouncement(count=SLOTS, first=0, head=head)
        self.announce(Envelope.parse(seal(announced, SAMPLER, self.run.id)))
        for slot in range(SLOTS):
            rewards, lengths = self.group(head, slot)
            message = SimpleNamespace(heads=(head,), lengths=lengths)
            sent = SimpleNamespace(head=head, sampler=SAMPLER.public, slot=slot, message=message)
            self.came(sent)
            if (breach := self.audit(sent, rewards, self.plan(sent), never)) is not None:
                return breach.reason
        return None


def heads_until_found(world: World, heads: int, chooses) -> int | None:
    for _ in range(heads // AMONG):
        for _ in range(AMONG):
            world.publish()
        if world.post(chooses(world, world.heads[-AMONG:])) is not None:
            return len(world.heads)
    return None


def best(world, heads):
    return max(heads, key=world.worth)


def any_of_them(world, heads):
    return heads[int(world.rng.integers(AMONG))]


@pytest.mark.parametrize("seed", range(3))
def test_the_best_of_five_heads_is_found_by_a_verifiers_own_account(seed):
    found = heads_until_found(World(seed), 3000, best)
    assert found is not None


def test_a_volunteer_that_posts_under_one_head_in_five_is_not_found():
    assert [heads_until_found(World(seed), 600, any_of_them) for seed in range(8)] == [None] * 8
