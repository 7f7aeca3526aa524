"""Recovery of a trainer: same bits; no group lost, used twice or too stale."""

from __future__ import annotations

import dataclasses
import logging
import shutil
import sqlite3
import subprocess
import sys

import pytest
import trio

from echo_node.errors import StoreError
from echo_node.trainer import loop as loop_room
from echo_node.trainer.head_publisher import HeadPublisher
from echo_node.trainer.journal import Batch, open_journal
from echo_node.trainer.recovery import in_chain
from echo_node.weights.store import WeightsStore
from protocol import TrajectoryGroup, open_sealed
from tests.crafting import SAMPLERS, Chain, changed_run, sealed_group
from tests.records import record_of
from tests.trainer import crash_points
from tests.trainer.crash_points import LAYOUT, ROOT, RUN, STEPS, Recording, Replaying, heads_in, train


def kill(folder, kills, seed, head_every=1):
    numbers = map(str, (kills, seed, head_every))
    command = [sys.executable, "-m", "tests.trainer.crash_points", str(folder), *numbers]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"{kills} kills" in done.stdout


def test_a_trainer_that_is_killed_comes_to_the_same_heads_as_one_that_never_was(tmp_path):
    kill(tmp_path, 5, seed=5)


def test_a_trainer_that_is_killed_while_a_head_is_published_beside_a_step_comes_to_the_same_heads(tmp_path):
    command = [sys.executable, "-m", "tests.trainer.crash_points", str(tmp_path), "beside"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "4 kills beside a step" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("head_every", [1, 2])
def test_a_trainer_that_is_killed_at_twenty_moments_comes_to_the_same_heads(head_every, tmp_path):
    kill(tmp_path, 20, seed=2, head_every=head_every)


@pytest.fixture(scope="module")
def half(tmp_path_factory):
    """Return a finished run of eight steps, its log, and the heads of one of twelve."""
    folder = tmp_path_factory.mktemp("resuming")
    _, source = trio.run(train, folder / "whole", Recording)
    trio.run(train, folder / "half", lambda _: Replaying(source.batches), 8)
    return folder / "half", source.batches, heads_in(folder / "whole")


@pytest.fixture
def begun(half, tmp_path):
    folder, batches, expected = half
    shutil.copytree(folder, tmp_path / "trainer")
    return tmp_path / "trainer", batches, expected


async def test_a_run_that_ended_well_goes_on_from_its_last_checkpoint_with_nothing_to_repeat(begun):
    folder, batches, expected = begun
    assert heads_in(folder) == expected[:9]
    loop, _ = await train(folder, lambda _: Replaying(batches))
    assert (loop.recovered.number, loop.recovered.replayed, loop.recovered.adopted) == (8, 0, False)
    assert heads_in(folder) == expected


async def test_a_run_that_is_over_takes_no_further_step(begun):
    folder, batches, expected = begun
    loop, _ = await train(folder, lambda _: Replaying(batches), steps=8)
    assert heads_in(folder) == expected[:9]
    assert len(loop._records.steps) == 8, "and its records are all there"


async def test_a_torn_checkpoint_is_passed_over_for_the_one_before(begun):
    """The journal's batches in between are gone by then: the published weights count."""
    folder, batches, expected = begun
    newest = max((folder / "checkpoints").iterdir())
    newest.write_bytes(newest.read_bytes()[:-1])
    loop, _ = await train(folder, lambda _: Replaying(batches), steps=9)
    assert loop.recovered.adopted
    assert heads_in(folder)[:9] == expected[:9]
    assert len(heads_in(folder)) == 10


async def test_where_the_bits_come_out_otherwise_what_was_published_counts(begun, caplog):
    """One master is off, as in a checkpoint of another machine."""
    folder, batches, expected = begun
    from echo_node.trainer.checkpoint import newest_checkpoint, write_checkpoint

    kept = newest_checkpoint(folder / "checkpoints")
    name = next(name for name in kept.tensors if name.startswith("master."))
    kept.tensors[name].view(-1)[0] += 1.0
    write_checkpoint(folder / "checkpoints", kept)
    with caplog.at_level(logging.WARNING):
        loop, _ = await train(folder, lambda _: Replaying(batches), steps=8)
    assert loop.recovered.adopted
    assert "1 weights are taken from what was published" in caplog.text
    assert heads_in(folder) == expected[:9]
    assert loop._step.version == 8


async def test_a_batch_that_was_drawn_and_not_published_is_learnt_from_first_and_once(begun, monkeypatch):
    folder, batches, expected = begun

    class DiedError(Exception):
        pass

    def die(*_args):
        raise DiedError

    with (
        monkeypatch.context() as patch,
        pytest.RaisesGroup(DiedError, flatten_subgroups=True, allow_unwrapped=True),
    ):
        patch.setattr("echo_node.trainer.loop.accumulate", die)
        await train(folder, lambda _: Replaying(batches))
    assert heads_in(folder) == expected[:9]
    asked = []

    class Noting(Replaying):
        async def next_batch(self, request):
            asked.append(request.number)
            return await super().next_batch(request)

    loop, _ = await train(folder, lambda _: Noting(batches))
    assert [batch.number for batch in loop.recovered.pending] == [9]
    assert asked == [10, 11, 12], "the ninth was not asked for again"
    assert heads_in(folder) == expected
    crash_points.check(folder, expected, batches)


async def test_who_takes_over_with_weights_and_a_checkpoint_alone_goes_on_with_the_same_bits(begun):
    """A standby that has not seen the batches goes on with the newest head's roster."""
    folder, batches, expected = begun
    for name in ("journal.sqlite", "records.sqlite"):
        (folder / name).unlink()
    loop, _ = await train(folder, lambda _: Replaying(batches))
    assert (loop.recovered.number, loop.recovered.replayed, loop.recovered.adopted) == (8, 0, False)
    assert heads_in(folder) == expected


async def test_batches_of_a_branch_that_was_left_are_not_learnt_from(begun):
    """One is of a head that left the chain, one of a head that commits to others."""
    folder, batches, expected = begun
    opened = [open_sealed(sealed, TrajectoryGroup, RUN.id) for sealed in batches[8] + batches[9]]
    groups = [record_of(each, 8, rewards=[1.0] * 4) for each in opened]
    async with open_journal(folder / "journal.sqlite", RUN.id) as journal:
        await journal.draw(Batch(9, 8, 9, tuple(groups[:4]), tip=b"x" * 32))
        await journal.draw(Batch(10, 6, 7, tuple(groups[4:]), tip=expected[6]))
    loop, _ = await train(folder, lambda _: Replaying(batches), steps=8)
    assert (loop.recovered.pending, loop.recovered.replayed, loop.recovered.number) == ((), 0, 10)
    assert heads_in(folder) == expected[:9]
    async with open_journal(folder / "journal.sqlite", RUN.id) as journal:
        states = await journal.states()
        assert [batch.number for batch in await journal.batches()] == list(range(1, 9))
    assert {states.get(group.id, "pruned") for group in groups} <= {"forked-head", "pruned"}


async def test_a_folder_without_its_weights_is_not_begun_anew(begun):
    """A second chain from version 0 by the same key would be taken for a lie."""
    folder, batches, _ = begun
    shutil.rmtree(folder / "weights")
    with pytest.raises(StoreError, match="does not have"):
        await train(folder, lambda _: Replaying(batches))
    shutil.rmtree(folder / "checkpoints")
    with pytest.raises(StoreError, match="store of weights is empty"):
        await train(folder, lambda _: Replaying(batches))


async def test_after_a_restart_a_slot_that_was_filled_is_still_filled(begun):
    from echo_node.rollouts.admission import Refused
    from protocol import Envelope

    folder, batches, _ = begun
    loop, _ = await train(folder, lambda _: Replaying(batches), steps=8)
    with WeightsStore.open(folder / "weights", RUN.rules, LAYOUT) as store:
        steps = {head.id: head.message.step for head in store.follower.heads}
    reasons = set()
    for sealed in (each for batch in batches[:8] for each in batch):
        envelope = Envelope.parse(sealed)
        age = 8 - steps[envelope.claim(TrajectoryGroup, RUN.id).heads[0]]
        judged = loop.groups.admission.judge(envelope)
        assert isinstance(judged, Refused)
        assert judged.reason == ("duplicate" if age <= RUN.manifest.sync.staleness else "stale")
        reasons.add(judged.reason)
    assert reasons == {"duplicate", "stale"}


def test_the_journal_keeps_only_facts_of_what_a_checkpoint_covers(half):
    folder, batches, _ = half
    with sqlite3.connect(folder / "journal.sqlite") as file:
        whole, known = file.execute("SELECT count(sealed), count(*) FROM groups").fetchone()
    file.close()
    assert (whole, known) == (0, 8 * len(batches[0]))
    assert STEPS > 8


class Ending(Replaying):
    """A source at which a trainer waits for a batch of this number when it is told to end."""

    def __init__(self, batches, number, scope):
        super().__init__(batches)
        self._number, self._scope = number, scope

    async def next_batch(self, request):
        if request.number == self._number:
            self._scope.cancel()
            await trio.sleep_forever()
        return await super().next_batch(request)


@pytest.mark.parametrize("number", [10, 11])
async def test_a_trainer_that_is_told_to_end_goes_on_with_nothing_to_repeat(begun, number):
    folder, batches, expected = begun
    with trio.CancelScope() as life:
        await train(folder, lambda _: Ending(batches, number, life))
    assert life.cancelled_caught
    loop, _ = await train(folder, lambda _: Replaying(batches))
    assert (loop.recovered.number, loop.recovered.replayed, loop.recovered.adopted) == (number - 1, 0, False)
    assert loop.recovered.pending == ()
    crash_points.check(folder, expected, batches)


@pytest.mark.parametrize("moment", ["accumulate", "_sign"])
async def test_a_trainer_that_is_told_to_end_in_the_middle_of_a_step_keeps_nothing_half_done(
    begun, monkeypatch, moment
):
    """What is not in the weights yet is learnt again; what is being signed is signed and saved.

    The batch after it may be drawn already, since heads are signed beside the steps: it is pending.
    """
    folder, batches, expected = begun
    place = loop_room if moment == "accumulate" else HeadPublisher
    real = getattr(place, moment)
    with trio.CancelScope() as life, monkeypatch.context() as patch:

        def cancelled_meanwhile(*args):
            trio.from_thread.run_sync(life.cancel)
            return real(*args)

        patch.setattr(place, moment, cancelled_meanwhile)
        await train(folder, lambda _: Replaying(batches))
    assert life.cancelled_caught
    loop, _ = await train(folder, lambda _: Replaying(batches))
    learnt = 8 if moment == "accumulate" else 9
    assert (loop.recovered.replayed, loop.recovered.adopted) == (0, False)
    assert [batch.number for batch in loop.recovered.pending] == [
        *range(learnt + 1, loop.recovered.number + 1)
    ]
    assert loop.recovered.number in ({9} if moment == "accumulate" else {9, 10})
    crash_points.check(folder, expected, batches)


async def test_a_trainer_that_is_told_to_end_between_two_heads_loses_no_batch(tmp_path, monkeypatch):
    """A batch in no head is in no checkpoint: the next head must commit to it."""
    sync = dataclasses.replace(RUN.manifest.sync, head_every=2)
    monkeypatch.setattr(crash_points, "RUN", changed_run(RUN, sync=sync))
    _, source = await train(tmp_path / "whole", Recording, 4)
    with trio.CancelScope() as life:
        await train(tmp_path / "ended", lambda _: Ending(source.batches, 4, life), 4)
    assert life.cancelled_caught
    loop, _ = await train(tmp_path / "ended", lambda _: Replaying(source.batches), 4)
    assert [batch.number for batch in loop.recovered.pending] == [3]
    assert not loop.recovered.adopted
    assert heads_in(tmp_path / "ended") == heads_in(tmp_path / "whole")


@pytest.mark.parametrize("overheard", [2, 1, 0])
async def test_a_version_that_a_grant_left_is_learnt_again_if_all_its_groups_are_here_and_else_disowned(
    overheard,
):
    """The leader's record was here before its weights, and not all of its groups."""
    head = Chain(RUN).next(*SAMPLERS[:2])
    groups = []
    for slot in range(2):
        opened = open_sealed(sealed_group(RUN, head.id, SAMPLERS[0], slot), TrajectoryGroup, RUN.id)
        kept = record_of(opened, 0, rewards=opened.message.rewards)
        missing = dataclasses.replace(kept, sealed=None, stored_signature=opened.sealed[-64:])
        groups.append(kept if slot < overheard else missing)
    async with open_journal(None, RUN.id) as journal:
        await journal.follow([Batch(1, 0, head.message.version + 1, tuple(groups), head.id)])
        committed, pending = await in_chain(journal, await journal.batches(), [head])
        assert committed == []
        assert [len(batch.groups) for batch in pending] == ([2] if overheard == 2 else [])
        assert len(await journal.batches()) == len(pending)
        states = set((await journal.states()).values())
        assert states == ({"drawn"} if pending else {"forked-head"})
