"""Heads are published beside the steps, and no weight changes while it is read."""

from __future__ import annotations

import dataclasses
import threading

import pytest
import trio

from echo_node.errors import StoreError
from echo_node.models import embedded
from echo_node.runs.algorithm import training_settings
from echo_node.trainer import loop as loop_room
from echo_node.trainer.head_publisher import HeadPublisher
from echo_node.trainer.step import TrainStep, state_of
from echo_node.weights.publisher import Publisher
from protocol.manifest import Sync
from tests.crafting import changed_run
from tests.trainer import crash_points
from tests.trainer.crash_points import RUN, Recording, heads_in, train

SECONDS = 60
"""Deadline for what must come while something else waits."""


class Moments:
    """Notes what a trainer does, in order; threads may wait for an entry."""

    def __init__(self):
        self.seen = []
        self._changed = threading.Condition()

    def note(self, *entry):
        with self._changed:
            self.seen.append(entry)
            self._changed.notify_all()

    def wait_for(self, *entry):
        with self._changed:
            assert self._changed.wait_for(lambda: entry in self.seen, SECONDS), f"{entry} does not come"

    def is_before(self, first, second):
        return self.seen.index(first) < self.seen.index(second)


def noted(patch, moments):
    """Note the parts of a step and of publishing, as they begin and end."""
    accumulate, update = loop_room.accumulate, TrainStep.update
    sign, activate = HeadPublisher._sign, HeadPublisher._activate

    def noted_accumulate(step, batch):
        moments.note("gradient of", batch.number)
        accumulate(step, batch)

    def noted_update(step):
        moments.note("update to", step.version + 1)
        return update(step)

    def noted_sign(heads, head):
        signed = sign(heads, head)
        moments.note("signed", head.version)
        return signed

    def noted_activate(heads, head):
        activate(heads, head)
        moments.note("active", head.version)

    patch.setattr(loop_room, "accumulate", noted_accumulate)
    patch.setattr(TrainStep, "update", noted_update)
    patch.setattr(HeadPublisher, "_sign", noted_sign)
    patch.setattr(HeadPublisher, "_activate", noted_activate)


async def test_the_gradient_of_the_next_batch_is_computed_while_a_head_is_signed_and_its_update_waits(
    tmp_path, monkeypatch
):
    moments = Moments()
    noted(monkeypatch, moments)
    sign = HeadPublisher._sign

    def waiting(heads, head):
        if head.version == 1:  # the second batch of the log is of an older head
            moments.wait_for("gradient of", 2)
        return sign(heads, head)

    monkeypatch.setattr(HeadPublisher, "_sign", waiting)
    await train(tmp_path / "run", Recording, 3)
    assert moments.is_before(("gradient of", 2), ("signed", 1))
    for version in range(1, 3):
        assert moments.is_before(("active", version), ("update to", version + 1))
    assert len(heads_in(tmp_path / "run")) == 4


async def test_in_sequential_mode_the_next_request_goes_out_as_soon_as_the_head_is_signed(
    tmp_path, monkeypatch
):
    sync = Sync(async_from=None, head_every=1, in_flight=False, staleness=2)
    monkeypatch.setattr(crash_points, "RUN", changed_run(RUN, sync=sync))
    moments = Moments()
    noted(monkeypatch, moments)
    activate = HeadPublisher._activate

    def waiting(heads, head):
        if head.version == 2:
            moments.wait_for("request", 3)
        activate(heads, head)

    monkeypatch.setattr(HeadPublisher, "_activate", waiting)

    class Requested(Recording):
        async def next_batch(self, request):
            assert request.head.message.version == request.number - 1, "of its own version"
            moments.note("request", request.number)
            return await super().next_batch(request)

    await train(tmp_path / "run", Requested, 4)
    for number in range(2, 5):
        assert moments.is_before(("signed", number - 1), ("request", number))
    assert moments.is_before(("request", 3), ("active", 2))
    assert moments.is_before(("active", 2), ("update to", 3))


async def test_a_trainer_whose_term_ended_before_it_signs_signs_nothing(tmp_path, monkeypatch):
    begin = HeadPublisher.begin
    with trio.CancelScope() as life:

        async def deposed(heads):
            head = await begin(heads)
            if head.version == 2:
                head.term -= 1  # the store's is a later one by now, and the trainer is told to end
                life.cancel()
            return head

        monkeypatch.setattr(HeadPublisher, "begin", deposed)
        await train(tmp_path / "run", Recording, 4)
    assert life.cancelled_caught
    assert len(heads_in(tmp_path / "run")) == 2


@pytest.mark.parametrize("part", ["sign", "activate"])
async def test_a_disk_that_fails_beside_a_step_ends_the_trainer_before_another_update(
    tmp_path, monkeypatch, part
):
    moments = Moments()
    noted(monkeypatch, moments)
    real = getattr(Publisher, part)

    def failing(publisher, *args, **options):
        step = options["step"] if part == "sign" else args[0].head.message.step
        if step == 1:
            moments.wait_for("gradient of", 2)
            raise StoreError("the disk is full")
        return real(publisher, *args, **options)

    monkeypatch.setattr(Publisher, part, failing)
    with (
        trio.fail_after(SECONDS),
        pytest.RaisesGroup(StoreError, flatten_subgroups=True, allow_unwrapped=True),
    ):
        await train(tmp_path / "run", Recording, 3)
    assert ("update to", 2) not in moments.seen
    assert len(heads_in(tmp_path / "run")) == (1 if part == "sign" else 2)


def test_weights_are_read_where_they_are_and_in_any_pieces():
    for copy in ("bf16", "f32"):
        settings = dataclasses.replace(training_settings(RUN.manifest).step, compute_copy=copy)
        step = TrainStep(embedded.folder(), settings, threads=1, device="cpu")
        wanted = state_of(step)
        readers = step.published_state()
        assert readers.keys() == wanted.keys()
        for name, reader in readers.items():
            whole = bytes(wanted[name].data)
            assert (reader.dtype, reader.shape, reader.size) == ("bf16", wanted[name].shape, len(whole))
            for start, end in ((0, len(whole)), (1, len(whole)), (3, 8), (2, 2), (0, 1)):
                assert bytes(reader.read(start, end)) == whole[start:end]
        if copy == "bf16":
            name = next(iter(readers))
            parameter = step._weights[name]
            read = readers[name].read(0, 8)
            assert read.__array_interface__["data"][0] == parameter.data_ptr(), "no copy"
