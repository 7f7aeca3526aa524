"""Which groups are looked at, and by whose lot."""

from __future__ import annotations

from echo_node.contract import Prompt
from echo_node.rollouts.record import RolloutRecord
from echo_node.runtime.reputation import NEWCOMER, Trust
from echo_node.verifier import selection
from echo_node.verifier.selection import CLOSE_LOOKS, OVERTURNS, Selection
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


def trusting() -> Selection:
    trust = Trust()
    for _ in range(100 * NEWCOMER):
        trust.honest(ANN.public, 0.0)
    return Selection(RUN.id, VERIFIER, trust)


def test_a_sampler_that_another_verifier_condemns_is_looked_at_closer_until_it_was_found_honest():
    choosing, other = trusting(), identity("another verifier").public
    passed_over = next(each for each in map(group, range(60)) if not choosing.offer(each, 0.0))
    while choosing.next():
        pass
    assert choosing.accuse(passed_over.id, other, 0.0)
    again, lot = choosing.next()
    assert again is passed_over, "the condemned group itself"
    check_draw(VERIFIER.public, RUN.id, again.id, lot)
    assert not choosing.accuse(passed_over.id, other, 0.0), "once"
    assert all(choosing.offer(group(slot), 0.0) for slot in range(100, 140))
    for slot in range(CLOSE_LOOKS):
        choosing.acquit(group(100 + slot))
    assert not all(choosing.offer(group(slot), 0.0) for slot in range(200, 240))


def test_a_verifier_that_condemns_what_is_found_honest_here_is_no_longer_followed():
    choosing, liar = trusting(), identity("another verifier").public
    groups = [group(slot) for slot in range(60 + OVERTURNS)]
    for each in groups:
        choosing.offer(each, 0.0)
    for each in groups[:OVERTURNS]:
        assert choosing.accuse(each.id, liar, 0.0)
        choosing.acquit(each)
    assert not choosing.accuse(groups[-1].id, liar, 0.0)
    assert choosing.accuse(groups[-1].id, identity("a third verifier").public, 0.0)


def test_what_is_kept_for_a_closer_look_is_bounded(monkeypatch):
    monkeypatch.setattr(selection, "RECENT", 8)
    choosing = trusting()
    for slot in range(30):
        choosing.offer(group(slot), 0.0)
    assert len(choosing._recent) == 8
    monkeypatch.setattr(selection, "RECENT_BYTES", 3 * len(group(0).sealed))
    choosing.offer(group(40), 0.0)
    assert 1 <= len(choosing._recent) <= 3
    assert not choosing.accuse(group(0).id, b"somebody" * 4, 0.0), "it is not here any more"
