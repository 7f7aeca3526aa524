"""Which groups are looked at, and by whose lot."""

from __future__ import annotations

from echo_node.contract import Prompt
from echo_node.rollouts.record import RolloutRecord
from echo_node.runtime.reputation import NEWCOMER, Trust
from echo_node.verifier.selection import Selection
from protocol import TrajectoryGroup, open_sealed
from protocol.verdict import check_draw
from tests.crafting import SAMPLERS, identity, open_run, sealed_group
from tests.records import record_of

RUN = open_run()
VERIFIER = identity("verifier")
ANN = SAMPLERS[0]


SIZE = RUN.manifest.sampling.group_size


def group(slot: int, *, teaches: bool = True) -> RolloutRecord:
    rewards = tuple(float(teaches and place == 0) for place in range(SIZE))
    sealed = sealed_group(RUN, b"h" * 32, ANN, slot, rewards=rewards)
    return record_of(open_sealed(sealed, TrajectoryGroup, RUN.id), 0, Prompt("r12345="))


def taken(*, every: bool, honest: int, teaches: bool = True) -> int:
    trust = Trust()
    for _ in range(honest):
        trust.honest(ANN.public, 0.0)
    choosing = Selection(RUN.id, VERIFIER, trust, every=every)
    return sum(choosing.offer(group(slot, teaches=teaches), 0.0) for slot in range(60))


def test_where_a_quorum_must_speak_all_groups_are_looked_at_whoever_made_them_and_whatever_they_claim():
    assert taken(every=True, honest=0) == 60
    assert taken(every=True, honest=100 * NEWCOMER) == 60
    assert taken(every=True, honest=0, teaches=False) == 60


def test_elsewhere_a_trusted_peer_is_looked_at_now_and_then():
    assert 0 < taken(every=False, honest=100 * NEWCOMER) < 30
    assert taken(every=False, honest=0) == 60, "all of a newcomer's"
    assert taken(every=False, honest=0, teaches=False) == 60, "equal claims spare nothing"


def test_a_lot_can_be_checked_by_everybody():
    choosing = Selection(RUN.id, VERIFIER, Trust(), every=True)
    choosing.offer(group(0), 0.0)
    admitted, lot = choosing.next()
    check_draw(VERIFIER.public, RUN.id, admitted.id, lot)


def test_what_a_condemned_peer_has_waiting_takes_nobodys_time():
    choosing = Selection(RUN.id, VERIFIER, Trust(), every=True)
    other = open_sealed(sealed_group(RUN, b"h" * 32, SAMPLERS[1], 0), TrajectoryGroup, RUN.id)
    for admitted in (group(0), record_of(other, 0, Prompt("r12345=")), group(1)):
        choosing.offer(admitted, 0.0)
    choosing.forget(ANN.public)
    admitted, _ = choosing.next()
    assert admitted.sampler == SAMPLERS[1].public
    assert choosing.next() is None
