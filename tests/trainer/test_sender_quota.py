"""Quota of useless groups: its size, whom it counts against, how it refills."""

from __future__ import annotations

import logging

from echo_node.trainer.sender_quota import GROUPS, LITTLE, PATIENCE, PEERS, PER_SECOND, SenderQuota
from protocol import peer_id

ANN, BOB, VERA = b"a" * 32, b"b" * 32, b"v" * 32


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def waste_of(*named, clock=None):
    return SenderQuota(named, clock or Clock())


def test_patience_with_one_is_used_up_by_that_one_alone():
    waste = waste_of()
    waste.handed(ANN, "over-limit", int(PATIENCE) - 1)
    assert not waste.is_muted(ANN)
    waste.handed(ANN, "over-limit")
    assert waste.is_muted(ANN)
    assert not waste.is_muted(BOB)


def test_who_has_used_it_up_is_looked_at_once_half_of_it_is_back():
    clock = Clock()
    waste = waste_of(clock=clock)
    waste.handed(ANN, "over-limit", int(PATIENCE))
    clock.now += PATIENCE / 2 / PER_SECOND - 0.1
    assert waste.is_muted(ANN), "else it would be spent and heard a dozen times a second"
    clock.now += 0.1
    assert not waste.is_muted(ANN)
    waste.handed(ANN, "over-limit", int(PATIENCE / 2))
    assert waste.is_muted(ANN)
    clock.now += 1e6
    waste.handed(ANN, "over-limit", int(PATIENCE))
    assert waste.is_muted(ANN), "a long good time is no credit"


def test_it_is_told_who_has_used_it_up_for_how_long_and_why(caplog):
    clock = Clock()
    waste = waste_of(clock=clock)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            waste.handed(ANN, "over-limit", int(PATIENCE))
    waste.handed(BOB, "stale")
    ((who, mute),) = waste.mutes().items()
    assert (who, mute.seconds) == (ANN, 2.5 * PATIENCE / PER_SECOND)
    assert mute.reasons == {"over-limit": 3 * PATIENCE}
    assert [peer_id(ANN) in line and "256 over-limit" in line for line in caplog.messages] == [True], "once"
    clock.now += mute.seconds
    assert waste.mutes() == {}


def test_strangers_without_number_do_not_fill_the_memory():
    waste = waste_of()
    for number in range(3 * PEERS):
        waste.handed(number.to_bytes(32), "stale")
    for number in range(2 * GROUPS):
        waste.refused(number.to_bytes(32), "stale", sender=BOB, signer=ANN)
    assert len(waste._accounts) == PEERS
    assert len(waste._counted) == GROUPS


def test_what_happens_to_the_best_counts_for_little():
    waste = waste_of()
    waste.handed(ANN, "stale", int(PATIENCE))
    waste.handed(ANN, "duplicate", int(PATIENCE))
    assert not waste.is_muted(ANN)
    waste.handed(ANN, "stale", int(PATIENCE / LITTLE))
    assert waste.is_muted(ANN)


def test_what_is_signed_counts_once_against_its_signer_and_all_else_against_who_handed_it_over():
    waste = waste_of(VERA)
    for sender in (VERA, VERA, BOB):
        waste.refused(b"group", "over-limit", sender=sender, signer=ANN)
    waste.refused(b"other", "malformed", sender=BOB, signer=None)
    waste.refused(b"third", "malformed", sender=VERA, signer=None)
    assert {who: account.wasted for who, account in waste._accounts.items()} == {ANN: 1, BOB: 2}
