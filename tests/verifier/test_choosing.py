"""Which groups are looked at, and by whose lot."""

from __future__ import annotations

from echo_node.admission import Admitted
from echo_node.contract import Prompt
from echo_node.trust import NEWCOMER, Trust
from echo_node.verifier.choosing import Choosing
from protocol import TrajectoryGroup, open_sealed
from protocol.verdict import check_draw
from tests.crafting import SAMPLERS, identity, open_run, sealed_group

RUN = open_run()
VERIFIER = identity("verifier")
ANN = SAMPLERS[0]


def group(slot: int) -> Admitted:
    opened = open_sealed(sealed_group(RUN, b"h" * 32, ANN, slot), TrajectoryGroup, RUN.id)
    return Admitted(opened, 0, Prompt("r12345="))


def taken(*, every: bool, honest: int) -> int:
    trust = Trust()
    for _ in range(honest):
        trust.honest(ANN.public, 0.0)
    choosing = Choosing(RUN.id, VERIFIER, trust, every=every)
    return sum(choosing.offer(group(slot), 0.0) for slot in range(60))


def test_where_a_quorum_must_speak_all_groups_are_looked_at_whoever_made_them_and_whatever_they_claim():
    assert taken(every=True, honest=0) == 60
    assert taken(every=True, honest=100 * NEWCOMER) == 60


def test_elsewhere_a_trusted_peer_is_looked_at_now_and_then():
    few = taken(every=False, honest=100 * NEWCOMER)
    assert few < 30


def test_a_lot_can_be_checked_by_everybody():
    choosing = Choosing(RUN.id, VERIFIER, Trust(), every=True)
    choosing.offer(group(0), 0.0)
    admitted, lot = choosing.next()
    check_draw(VERIFIER.public, RUN.id, admitted.group.id, lot)
