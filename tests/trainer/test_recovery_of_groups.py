"""Groups after a failover: none is accepted that another trainer may have used."""

from __future__ import annotations

from dataclasses import replace

import pytest

from echo_node.rollouts.record import RolloutRecord
from echo_node.trainer.journal import Batch, open_journal
from echo_node.trainer.recovery import accounted_since
from protocol import WeightsHead, merkle_root, open_sealed, seal
from tests.crafting import TRAINER, Chain, open_run

RUN = open_run()
BOUND = 4


def groups_of(version: int) -> tuple[RolloutRecord, ...]:
    return tuple(
        RolloutRecord(bytes([version, n]) * 16, b"s" * 32, n, b"h" * 32, version - 1, b"sealed", (0.5,))
        for n in range(2)
    )


def chain_of(*versions: int, length: int = 8):
    """Heads one after the other, of which these versions commit to groups."""
    chain, heads = Chain(RUN), []
    for version in range(length):
        head = chain.next()
        if version in versions:
            ids = sorted(group.id for group in groups_of(version))
            message = replace(head.message, groups=merkle_root(ids))
            head = chain._tip = open_sealed(seal(message, TRAINER, RUN.id), WeightsHead, RUN.id)
        heads.append(head)
    return heads


@pytest.mark.parametrize(
    ("trained", "journalled", "since"),
    [
        ((), (), 0),
        ((4, 5, 6, 7), (4, 5, 6, 7), 0),
        ((4, 5, 6, 7), (6, 7), 5),
        ((4, 5, 6, 7), (4, 5, 6), 7),
        ((1, 6, 7), (6, 7), 0),
    ],
    ids=["nothing was trained on", "all is its own", "another led before", "another led last", "long ago"],
)
async def test_heads_before_a_version_whose_groups_are_not_known_are_not_sampled_under(
    trained, journalled, since
):
    heads = chain_of(*trained)
    async with open_journal(None, RUN.id) as journal:
        for version in journalled:
            batch = Batch(version, version - 1, version, groups_of(version), heads[version - 1].id)
            await journal.draw(batch)
        assert await accounted_since(journal, heads, BOUND) == since


async def test_a_batch_of_a_branch_that_was_left_does_not_account_for_a_version():
    heads = chain_of(7)
    async with open_journal(None, RUN.id) as journal:
        await journal.draw(Batch(7, 6, 7, groups_of(7), b"another head"))
        assert await accounted_since(journal, heads, BOUND) == 7


async def test_a_run_that_begins_has_nothing_to_account_for():
    async with open_journal(None, RUN.id) as journal:
        assert await accounted_since(journal, (), BOUND) == 0
