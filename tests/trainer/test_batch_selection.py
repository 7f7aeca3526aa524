"""Choice of a batch where unverified groups and engine classes are both bounded."""

from __future__ import annotations

import dataclasses

from echo_node.rollouts.record import RolloutRecord
from echo_node.runs.engine_shares import ClassShares
from echo_node.runs.run import ENGINES
from echo_node.trainer.batch_selection import Entrance, Entry, choose
from protocol import open_sealed
from protocol.trajectory import TrajectoryGroup
from tests.crafting import SAMPLERS, open_run, sealed_group
from tests.records import record_of

RUN = open_run()
FEW, MANY = ENGINES[0].engine, ENGINES[1].engine
HALF = ClassShares([dataclasses.replace(ENGINES[0], share=0.5)])


class OneUnverified(Entry):
    """One unverified group a batch, even if the batch stays incomplete."""

    is_hard = True

    def __init__(self, *verified: bytes) -> None:
        self._verified = verified

    def entrance(self, group: RolloutRecord) -> Entrance:
        return Entrance.OPEN if group.id in self._verified else Entrance.BOUNDED

    def bound(self, _batch: int) -> int:
        return 1


def made(slot: int, engine: str) -> RolloutRecord:
    opened = open_sealed(
        sealed_group(RUN, bytes(32), SAMPLERS[0], slot, engine=engine), TrajectoryGroup, RUN.id
    )
    return record_of(opened, 0)


def test_verified_groups_go_first_where_unverified_ones_have_used_up_their_classs_room():
    first, second, third = made(0, FEW), made(1, FEW), made(2, MANY)
    assert choose([first, second, third], 2, OneUnverified(second.id), HALF) == [second, third]


def test_a_batch_that_no_order_completes_stays_incomplete():
    groups = [made(0, FEW), made(1, FEW), made(2, MANY)]
    assert choose(groups, 2, OneUnverified(), HALF) == [groups[0]]
