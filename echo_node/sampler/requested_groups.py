"""Groups requested by the leader in sequential mode, served in parts.

There is one request at a time: a new one replaces the last. Draws are fixed by the slots, so a
request that was lost in a restart is filled again, without the slots that the leader has.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import trio

from echo_node.errors import EchoError, PeerError
from echo_node.rollouts.group_refs import refer_to
from echo_node.rollouts.record import RolloutRecord
from echo_node.runtime.change_signal import ChangeSignal
from echo_node.storage import files
from echo_node.storage.blob_dir import BlobDir
from protocol import Identity, Opened, ProtocolError, RolloutRequest, WeightsHead, canonical, limits

HOLD_SECONDS: Final = 20.0
"""Longest time in seconds before a question for a part is answered, with or without groups."""
FORGOTTEN_SECONDS: Final = 120.0
"""Seconds without a question after which a request is given up: the leader has no use for it."""
_HEADER: Final = 5
"""Most bytes that an array adds to itself and to each of its items."""
INLINE_BYTES: Final = limits.ANSWER_BYTES - 2 * _HEADER
"""Longest group that stands in a part; longer ones go by reference."""

Fill = Callable[
    [Opened[WeightsHead], Sequence[int], Callable[[RolloutRecord], Awaitable[None]]], Awaitable[None]
]
"""Fills slots under a head, and hands out each group as it ends."""


@dataclass(slots=True, eq=False)
class _Job:
    """One request: its slots, and ended groups that were not delivered yet."""

    head: Opened[WeightsHead]
    request: RolloutRequest
    parts: dict[int, bytes] = field(default_factory=dict)
    """What is sent for each slot: a sealed group, or a reference."""
    blobs: dict[int, bytes] = field(default_factory=dict)
    """Blobs of the groups that go by reference, by slot."""
    error: EchoError | ProtocolError | None = None
    changed: ChangeSignal = field(default_factory=ChangeSignal)
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    """Cancelled, by its deadline too, when the leader has no use for the request any more."""

    @property
    def key(self) -> tuple[bytes, int, int]:
        return self.head.id, self.request.first, self.request.count


class RequestedGroups:
    """The request that a sampler works on. `fill` draws; long groups lie in `blobs`."""

    def __init__(self, run: bytes, identity: Identity, blobs: BlobDir, fill: Fill) -> None:
        self._run = run
        self._identity = identity
        self._blobs = blobs
        self._fill = fill
        self._job: _Job | None = None
        self._news = ChangeSignal()

    @property
    def progress(self) -> str | None:
        """Return what is being worked on, in words."""
        job = self._job
        if job is None:
            return None
        left = len(job.request.slots)
        return f"{left} of {job.request.count} requested groups are not delivered, {len(job.parts)} of them are drawn"

    async def answer(self, head: Opened[WeightsHead], request: RolloutRequest) -> bytes:
        """Return the next part: groups that have ended, or none if none does for a while."""
        job = self._job
        if job is None or job.key != (head.id, request.first, request.count):
            job = _Job(head, request)
            self._replace(job)
        job.request = request
        job.scope.deadline = trio.current_time() + FORGOTTEN_SECONDS
        await self._drop(job, set(job.parts) - set(request.slots))
        with trio.move_on_after(HOLD_SECONDS):
            while not job.parts and job.error is None:
                await job.changed.wait()
        if job.error is not None and not job.parts:
            if self._job is job:
                self._replace(None)
            raise job.error
        return canonical.pack(_fitting(job))

    async def work(self) -> None:
        """Fill requests, until cancelled."""
        while True:
            seen = self._news.count
            if (job := self._job) is None:
                await self._news.wait(since=seen)
                continue
            await self._work_on(job)
            if self._job is job:
                self._replace(None)
            await self._drop(job, set(job.parts))

    def new_head(self, head: bytes) -> None:
        """Give up a request for another head than the newest."""
        if self._job is not None and self._job.head.id != head:
            self._replace(None)

    async def _work_on(self, job: _Job) -> None:
        async def take(group: RolloutRecord) -> None:
            job.parts[group.slot] = await self._as_sent(job, group)
            job.changed.notify()

        with job.scope:
            try:
                await self._fill(job.head, job.request.slots, take)
            except (EchoError, ProtocolError) as error:
                job.error = error
                job.changed.notify()
            while self._job is job:  # what is drawn stays here until it is delivered
                await self._news.wait()
        job.error = PeerError("this request was given up")
        job.changed.notify()

    def _replace(self, job: _Job | None) -> None:
        if self._job is not None:
            self._job.scope.cancel()
        self._job = job
        self._news.notify()

    async def _as_sent(self, job: _Job, group: RolloutRecord) -> bytes:
        """Return the group's bytes, or a reference to its blob if too long."""
        sealed = group.sealed or b""
        if len(sealed) <= INLINE_BYTES:
            return sealed
        job.blobs[group.slot] = await trio.to_thread.run_sync(self._blobs.put, sealed)
        return refer_to(group, self._identity, self._run)

    async def _drop(self, job: _Job, slots: set[int]) -> None:
        """Forget groups that were delivered, or are not wanted any more."""
        for slot in slots:
            job.parts.pop(slot, None)
        paths = [self._blobs.path(job.blobs.pop(slot)) for slot in slots if slot in job.blobs]

        def remove() -> None:
            for path in paths:
                files.remove(path)

        if paths:
            await trio.to_thread.run_sync(remove)


def _fitting(job: _Job) -> list[bytes]:
    """Return as many groups of a job as fit in one part, lowest slots first."""
    found: list[bytes] = []
    size = _HEADER
    for slot in sorted(job.parts):
        size += len(job.parts[slot]) + _HEADER
        if size > limits.ANSWER_BYTES:
            break
        found.append(job.parts[slot])
    return found
