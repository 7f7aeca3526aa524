"""Announcements of slots: what they commit to, holes, and what holes cost."""

from __future__ import annotations

import random

import pytest

from echo_node.rollouts.announced_slots import AHEAD, OVER, PRIOR, SAMPLERS, AnnouncedSlots
from protocol import SlotAnnouncement, limits

HEAD, LATER, ANN, BOB = (letter * 32 for letter in (b"h", b"l", b"a", b"b"))


def announce(slots, first, count, head=HEAD, sampler=ANN, message_id=None):
    message = SlotAnnouncement(count=count, first=first, head=head)
    return slots.announce(sampler, message, message_id or bytes([first % 251, count % 251]) + head)


def test_a_slot_is_announced_only_if_it_was_before_it_came():
    slots = AnnouncedSlots()
    assert not slots.arrived(HEAD, ANN, 0)
    assert announce(slots, 0, 4) is None
    assert [slots.arrived(HEAD, ANN, slot) for slot in (1, 3, 4)] == [True, True, False]
    assert not slots.arrived(HEAD, BOB, 1), "nobody announces for another"
    assert not slots.arrived(LATER, ANN, 1), "nor under another head"


def test_an_announcement_commits_to_every_slot_below_its_end():
    """Else a sampler would announce just those slots that it has drawn and likes."""
    slots = AnnouncedSlots()
    assert announce(slots, 17, 4) is None
    for slot in range(17, 21):
        assert slots.arrived(HEAD, ANN, slot)
    assert slots.holes(HEAD, ANN) == list(range(17))
    assert slots.until(HEAD, ANN) == 21
    slots.settle([LATER])
    assert slots.kept_share(ANN) == pytest.approx((PRIOR + 4) / (PRIOR + 21))


def test_an_announcement_of_a_huge_block_is_refused():
    slots = AnnouncedSlots()
    assert announce(slots, 0, limits.ANNOUNCED) is None
    assert announce(slots, AHEAD - 1, 1) is None
    assert announce(slots, AHEAD, 1) == "over-limit"
    assert announce(slots, limits.SAFE_INTEGER, 1) == "over-limit"
    slots.arrived(HEAD, ANN, 0)
    assert announce(slots, AHEAD, 1) is None


def test_a_replayed_announcement_changes_nothing_and_one_without_news_is_refused():
    slots = AnnouncedSlots()
    assert announce(slots, 0, 8) is None
    assert announce(slots, 0, 8) is None, "its receipt was lost"
    assert announce(slots, 0, 4) == "duplicate"
    assert slots.until(HEAD, ANN) == 8


def test_holes_cut_what_is_trusted_in_proportion():
    slots = AnnouncedSlots()
    for number in range(40):
        head = bytes([number]) * 32
        announce(slots, 0, 8, head)
        for slot in range(4):
            slots.arrived(head, ANN, slot)
        slots.settle([])
    assert slots.kept_share(ANN) == pytest.approx(0.5, abs=0.03)
    assert sum(slots.trusts_next(ANN) for _ in range(1000)) == pytest.approx(510, abs=30)
    assert all(slots.trusts_next(BOB) for _ in range(100)), "whoever left none is trusted whole"


def test_whoever_keeps_its_word_again_is_trusted_again():
    slots, luck = AnnouncedSlots(), random.Random(1)
    shares = []
    for number in range(200):
        head = number.to_bytes(32)
        announce(slots, 0, 8, head)
        dies = number < 20 and luck.random() < 0.5
        for slot in range(0 if dies else 8):
            slots.arrived(head, ANN, slot)
        slots.settle([])
        shares.append(slots.kept_share(ANN))
    assert min(shares) < 0.75
    assert shares[-1] > 0.97


def test_a_group_that_came_too_late_is_no_hole():
    slots = AnnouncedSlots()
    announce(slots, 0, 80)
    for slot in range(8, 80):
        slots.arrived(HEAD, ANN, slot)
    slots.settle([LATER])
    before = slots.kept_share(ANN)
    for _ in range(2):  # twice is once
        for slot in range(8):
            slots.was_late(HEAD, ANN, slot)
    assert before < slots.kept_share(ANN) == 1.0
    slots.was_late(HEAD, ANN, 99)
    slots.was_late(LATER, BOB, 0)


def test_whoever_sends_the_worse_half_late_has_holes_all_the_same():
    slots = AnnouncedSlots()
    for number in range(40):
        head = bytes([number]) * 32
        announce(slots, 0, 8, head)
        for slot in range(4):
            slots.arrived(head, ANN, slot)
        slots.settle([])
        for slot in range(4, 8):
            slots.was_late(head, ANN, slot)
    assert slots.kept_share(ANN) == pytest.approx(0.6, abs=0.04)


def test_what_a_leader_asked_for_and_did_not_get_is_a_hole():
    slots = AnnouncedSlots()
    for number in range(40):
        head = bytes([number]) * 32
        slots.requested(head, ANN, 4)
        if number % 2:
            assert all(slots.arrived(head, ANN, slot) for slot in range(4))
        slots.settle([])
    assert slots.kept_share(ANN) == pytest.approx(0.5, abs=0.04)


def test_heads_of_before_this_process_need_no_announcement():
    """A new leader cannot know what was announced to the last one."""
    slots = AnnouncedSlots()
    slots.exempt([HEAD])
    assert slots.arrived(HEAD, ANN, 5)
    assert not slots.arrived(LATER, ANN, 5)
    announce(slots, 0, 64)
    slots.settle([])
    assert slots.kept_share(ANN) == 1.0


def test_memory_is_bounded_whoever_announces():
    slots = AnnouncedSlots()
    for number in range(SAMPLERS + 100):
        announce(slots, 0, 8, sampler=number.to_bytes(32))
    slots.settle([])
    assert len(slots._kept) == SAMPLERS
    assert len(slots._over) == OVER
    assert not slots._blocks
