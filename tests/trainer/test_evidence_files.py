"""A verdict that comes while a batch is scored still leaves its group out."""

from __future__ import annotations

import pytest

from echo_node.trainer.journal import Finding, open_journal
from tests.trainer.crash_points import RUN, Recording, train

VERIFIER = b"v" * 32


class Overtaken(Recording):
    """A journal in which groups are condemned after their batch was drawn."""

    def __init__(self, store, choose):
        super().__init__(store)
        self._choose, self._draws = choose, 0
        self.condemned = []

    async def next_batch(self, request):
        drawn = await super().next_batch(request)
        self._draws += 1
        bad = [*self._choose(self._draws, drawn)]
        self.condemned += [each.id for each in bad]
        findings = [Finding(each.id, each.sampler, VERIFIER, "dishonest", "own-luck", 0.0) for each in bad]
        await self.judge.__self__._enforcer._journal.find(findings)
        return drawn


@pytest.mark.parametrize(
    ("choose", "sizes"),
    [
        (lambda number, drawn: drawn[number : number + 1], [3, 3]),
        (lambda number, drawn: drawn if number == 1 else (), [4, 4]),
    ],
    ids=["one of each", "all of the first"],
)
async def test_what_a_verdict_condemns_after_the_draw_is_left_out_and_the_rest_is_learnt_from(
    tmp_path, choose, sizes
):
    loop, source = await train(tmp_path / "run", lambda store: Overtaken(store, choose), 2)
    async with open_journal(tmp_path / "run" / "journal.sqlite", RUN.id) as journal:
        batches = await journal.batches()
    assert [len(batch.groups) for batch in batches] == sizes
    assert not {group.id for batch in batches for group in batch.groups} & set(source.condemned)
    assert loop.status()["dropped"] == {"condemned": len(source.condemned)}
    assert len(source.condemned) in {2, 4}
