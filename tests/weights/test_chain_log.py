"""The chain on disk: taken again, it ends where it was; damaged, it says so."""

from __future__ import annotations

import dataclasses
from contextlib import suppress

import pytest

from echo_node.errors import StoreError
from echo_node.weights.chain_log import ChainLog
from protocol import ChainError, Equivocation, TermGrant, TermVote, WeightsHead, canonical, open_sealed, seal
from protocol.election import cast
from tests.weights.chains import publish, rules
from tests.weights.disk_faults import failing
from tests.weights.keys import LEADER, RUN, STRANGER

CHAIN = [made.head for made in publish(6)]
RULES = dataclasses.replace(rules(), trainers=(LEADER.public, STRANGER.public))


def journal(folder, floor=None, of=RULES) -> ChainLog:
    return ChainLog(folder, of, floor, durable=True)


def told(head, **changes):
    message = dataclasses.replace(head.message, **changes)
    return open_sealed(seal(message, LEADER, RUN), WeightsHead, RUN)


def entry(*told) -> bytes:
    return canonical.encode(list(told))


def grant(base, term=2) -> TermGrant:
    vote = TermVote(base=base.id, leader=STRANGER.public, term=term)
    return TermGrant((cast(vote, LEADER, RUN),), vote)


def test_heads_grants_and_proofs_are_taken_again_in_their_order(tmp_path):
    kept = journal(tmp_path)
    for head in CHAIN[:5]:
        assert kept.keep_head(head)
    kept.keep_grant(grant(CHAIN[2]))
    again = journal(tmp_path)
    assert again.follower == kept.follower
    assert (again.follower.term, again.follower.tip) == (2, CHAIN[2])
    assert again.known.keys() == {head.id for head in CHAIN[:5]}, "those of the branch that was left too"
    with pytest.raises(ChainError):
        again.keep_head(CHAIN[5])
    assert journal(tmp_path).follower == kept.follower


def test_a_leader_that_was_caught_stays_caught(tmp_path):
    kept = journal(tmp_path)
    for head in CHAIN[:3]:
        kept.keep_head(head)
    assert kept.keep_head(told(CHAIN[2], luck=b"?" * 32)), "it convicts"
    assert kept.follower.holding
    assert journal(tmp_path).follower == kept.follower

    other = tmp_path / "by-hearsay"
    other.mkdir()
    kept = journal(other)
    for head in CHAIN[:2]:
        kept.keep_head(head)
    proof = Equivocation(CHAIN[2], told(CHAIN[2], luck=b"?" * 32))
    assert kept.keep_proof(proof)
    assert not kept.keep_proof(proof)
    assert kept.follower.revoked == {LEADER.public}
    assert journal(other).follower == kept.follower


def test_a_branch_that_a_grant_came_with_is_taken_again(tmp_path):
    kept = journal(tmp_path)
    kept.keep_head(CHAIN[0])
    kept.keep_grant(grant(CHAIN[3]), CHAIN[1:4])
    again = journal(tmp_path)
    assert again.follower == kept.follower
    assert again.follower.heads == tuple(CHAIN[:4])


def test_a_chain_that_began_at_a_link_begins_there_again_whatever_the_caller_says(tmp_path):
    kept = journal(tmp_path, (1, 3, CHAIN[3].id))
    for head in CHAIN[3:]:
        kept.keep_head(head)
    for floor in (None, (1, 3, CHAIN[3].id), (1, 0, CHAIN[0].id)):
        assert journal(tmp_path, floor).follower == kept.follower


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "000000000001").unlink(),
        lambda folder: (folder / "000000000001").write_bytes(b""),
        lambda folder: (folder / "000000000001").write_bytes(entry("head", CHAIN[1].sealed[:-1] + b"?")),
        lambda folder: (folder / "000000000001").write_bytes(entry("head", CHAIN[2].sealed)),
        lambda folder: (folder / "000000000001").write_bytes(bytes(32 * 1024**2)),
        lambda folder: (folder / "000000000003").write_bytes(entry("riddle")),
        lambda folder: (folder / "000000000003").write_bytes(entry("head")),
        lambda folder: (folder / "000000000003").write_bytes(entry("head", 1)),
        lambda folder: (folder / "000000000003").write_bytes(entry("grant", b"x", [])),
        lambda folder: (folder / "000000000003").write_bytes(entry("proof", b"x")),
        lambda folder: (folder / "000000000003").write_bytes(canonical.encode({"head": 1})),
    ],
)
def test_a_damaged_chain_is_said_so_and_not_used(tmp_path, damage):
    kept = journal(tmp_path)
    for head in CHAIN[:3]:
        kept.keep_head(head)
    damage(tmp_path)
    with pytest.raises(StoreError):
        journal(tmp_path)


def test_another_runs_chain_is_not_taken_for_ours(tmp_path):
    journal(tmp_path).keep_head(CHAIN[0])
    with pytest.raises(StoreError, match="another run's"):
        journal(tmp_path, of=dataclasses.replace(RULES, run=b"q" * 32))


def test_an_entry_that_the_disk_failed_to_keep_is_not_taken_and_another_can_stand_in_its_place(tmp_path):
    """It may be there after a crash, or not; either way one chain is there, and nobody has heard of
    the other.
    """
    kept = journal(tmp_path)
    kept.keep_head(CHAIN[0])
    touch, failures = 0, [""]
    while failures:
        touch += 1
        before = kept.follower
        with failing(touch) as failures, suppress(StoreError):
            kept.keep_head(CHAIN[1])
        if failures:
            assert kept.follower is before
            assert journal(tmp_path).follower == before
    assert touch > 4
    with failing(touch - 1) as failures, suppress(StoreError):
        kept.keep_head(CHAIN[2])
    assert failures == ["sync"], "of the folder"
    # a power cut may bring it back
    (tmp_path / "000000000002").write_bytes(entry("head", CHAIN[2].sealed))
    kept.keep_grant(grant(CHAIN[1]))
    again = journal(tmp_path)
    assert again.follower == kept.follower
    assert (again.follower.term, again.follower.heads) == (2, (CHAIN[0], CHAIN[1]))
