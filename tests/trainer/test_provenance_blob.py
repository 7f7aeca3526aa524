"""Provenance records of versions, and when a trainer believes one."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import trio

from echo_node.errors import PeerError
from echo_node.rollouts.record import RolloutRecord
from echo_node.trainer import provenance
from echo_node.trainer.journal import Batch, open_journal
from echo_node.trainer.provenance import ProvenanceReader, batches_of, provenance_record_of
from echo_node.trainer.recovery import accounted_since
from echo_node.weights.provenance_record import ProvenanceRecord, provenance_blob, provenance_ext
from protocol import (
    TrajectoryGroup,
    WeightsHead,
    decode,
    derive,
    encode,
    merkle_root,
    open_sealed,
    seal,
)
from tests.crafting import SAMPLERS, TRAINER, Chain, open_run, sealed_group
from tests.records import record_of

RUN = open_run()
ANN, BOB = SAMPLERS[:2]
BOUND = 2


def kept(head, sampler, slot) -> RolloutRecord:
    opened = open_sealed(sealed_group(RUN, head.id, sampler, slot), TrajectoryGroup, RUN.id)
    return record_of(opened, head.message.step, rewards=(0.25, 1 / 3))


def trained(chain, *batches):
    """The next head, which commits to these batches and names an account."""
    head = chain.next(ANN, BOB, step=batches[-1].policy_step + 1)
    ids = sorted(group.id for batch in batches for group in batch.groups)
    message = replace(head.message, groups=merkle_root(ids), ext=provenance_ext(derive("any")))
    return open_sealed(seal(message, TRAINER, RUN.id), WeightsHead, RUN.id)


@pytest.fixture(scope="module")
def history():
    """Return five heads a step apart, the three batches of a sixth, and its record.

    One of the batches taught nothing.
    """
    chain = Chain(RUN)
    heads = [chain.next(ANN, BOB) for _ in range(5)]
    batches = [
        Batch(number, step, 5, groups, heads[4].id)
        for number, step, groups in (
            (5, 4, (kept(heads[2], ANN, 0), kept(heads[3], BOB, 0))),
            (5, 4, (kept(heads[4], ANN, 1),)),
            (6, 5, (kept(heads[4], BOB, 1),)),
        )
    ]
    return [*heads, trained(chain, *batches)], batches, provenance_record_of(batches)


def changed(batches, **changes):
    """The batches of an account, with something changed in every group."""
    return tuple(
        replace(batch, groups=tuple(replace(group, **changes) for group in batch.groups)) for batch in batches
    )


def moved(batches, *steps):
    return tuple(replace(batch, policy_step=step) for batch, step in zip(batches, steps, strict=True))


def test_an_account_gives_back_the_batches_with_their_order_steps_and_rewards(history):
    heads, batches, account = history
    found = batches_of(account, heads, BOUND)
    without_bytes = [
        replace(
            batch,
            groups=tuple(
                replace(each, sealed=None, stored_signature=each.sealed[-64:]) for each in batch.groups
            ),
        )
        for batch in batches
    ]
    assert found == without_bytes
    assert provenance_blob(heads[-1].message) == derive("any")
    assert provenance_blob(heads[0].message) is None


LIES = {
    "a batch is left out": lambda batches, _: batches[:-1],
    "a batch stands twice": lambda batches, _: (batches[0], *batches),
    "a group that nobody has": lambda batches, _: (*batches[:-1], *changed(batches[-1:], id=derive("other"))),
    "steps that were never taken": lambda batches, _: moved(batches, 4, 5, 7),
    "steps backwards": lambda batches, _: moved(batches, 4, 5, 4),
    "a beginning elsewhere": lambda batches, _: moved(batches, 5, 5, 5),
    "an end elsewhere": lambda batches, _: moved(batches, 4, 4, 4),
    "another sampler": lambda batches, _: changed(batches, sampler=SAMPLERS[2].public),
    "a forged signature": lambda batches, _: changed(batches, signature=bytes(64)),
    "a head that is too old": lambda batches, heads: changed(batches, head=heads[1].id),
    "a head of another chain": lambda batches, _: changed(batches, head=derive("unheard")),
    "the head itself": lambda batches, heads: changed(batches, head=heads[-1].id),
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_an_account_that_was_manipulated_is_not_believed(history, lie):
    heads, _, account = history
    forged = lie(decode(ProvenanceRecord, account).batches, heads)
    with pytest.raises(PeerError):
        batches_of(encode(ProvenanceRecord(forged)), heads, BOUND)


@pytest.mark.parametrize("cut", [0, 1, 200, -1])
def test_bytes_that_are_no_account_are_refused(history, cut):
    heads, _, account = history
    with pytest.raises(PeerError):
        batches_of(account[:cut], heads, BOUND)


async def test_what_this_trainer_drew_for_a_branch_that_was_left_contradicts_nothing(history):
    """It led, was cut off, and follows whoever has used the same groups since."""
    heads, batches, account = history

    async def named(_head, _blob, most):
        await trio.lowlevel.checkpoint()
        return account[:most]

    chain = SimpleNamespace(follower=SimpleNamespace(heads=tuple(heads)))
    async with open_journal(None, RUN.id) as journal:
        await journal.draw(Batch(4, 3, 4, batches[0].groups, derive("left")))
        await journal.draw(Batch(5, 4, 5, batches[1].groups, heads[4].id))
        await ProvenanceReader(SimpleNamespace(store=chain, named=named), journal, BOUND).keep_up()
        assert await accounted_since(journal, heads, BOUND) == 0
        followed = await journal.batches()
        assert [batch.version for batch in followed] == [5, 5, 5]
        assert [[each.id for each in batch.groups] for batch in followed] == [
            [each.id for each in batch.groups] for batch in batches
        ]


def test_an_account_of_groups_that_were_too_stale_is_not_believed(history):
    heads, _, account = history
    with pytest.raises(PeerError, match="no head of the newest"):
        batches_of(account, heads, BOUND - 1)


def test_an_account_of_a_version_whose_parent_is_not_known_is_not_believed(history):
    heads, _, account = history
    with pytest.raises(PeerError, match="other steps"):
        batches_of(account, [*heads[:4], heads[5]], BOUND)


def test_a_version_that_has_too_much_to_account_for_goes_without(history, monkeypatch):
    _, batches, account = history
    monkeypatch.setattr(provenance.ProvenanceRecord, "LIMIT", len(account) - 1)
    assert provenance_record_of(batches) is None
    assert provenance_record_of([]) is None
