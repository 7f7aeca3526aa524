"""Recovery of a trainer: newest checkpoint, and the journal's batches after it.

The batches that heads were published for are learnt from again, and give the bits that were
published; then come those that had been drawn and were not published. On another machine the bits
may differ: then the published weights count, since everybody samples from them.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import torch
import trio

from echo_node.errors import DefectError, StoreError
from echo_node.rollouts.admission import Admission, GroupFilter, Refused
from echo_node.storage.blob_dir import DamagedBlobError
from echo_node.telemetry.metrics import Records
from echo_node.trainer.checkpoint import HEAD_VERSION, newest_checkpoint, write_checkpoint
from echo_node.trainer.journal import Batch, TrainingJournal
from echo_node.trainer.receipts import Receipts
from echo_node.trainer.replay_buffer import ReplayBuffer
from echo_node.trainer.step import StepFigures, TrainStep, learn, state_of
from echo_node.trainer.step_record import StepContext, step_record
from echo_node.trainer.verdict_policy import VerdictPolicy
from echo_node.weights.publisher import Publisher
from echo_node.weights.store import WeightsStore
from echo_node.weights.tensors import root_of
from protocol import Envelope, Opened, Roster, WeightsHead, decode, limits, merkle_root

log = logging.getLogger(__name__)
CHECKPOINT_EVERY: Final = 20
"""Steps between two checkpoints: the most that is recomputed after a crash."""
_NUMBER: Final = "batch"
"""Notes of a checkpoint: its last batch, and the version that was published then."""


@dataclasses.dataclass(frozen=True, slots=True)
class RecoveredState:
    """The state of a trainer when it ended."""

    number: int
    """Number of the last batch that was drawn."""
    tip: Opened[WeightsHead] | None
    pending: tuple[Batch, ...]
    """Batches that were drawn and are in no published head: to be learnt from first."""
    replayed: int
    adopted: bool
    """Whether this machine computed other bits, and took the published ones."""


async def resume(
    step: TrainStep,
    publisher: Publisher,
    journal: TrainingJournal,
    folder: Path | None,
    records: Records | None = None,
) -> RecoveredState:
    """Restore a fresh `step` to where training was, from the checkpoints in `folder`.

    Batches that are replayed and that `records` lack are recorded there.
    """
    published = await trio.to_thread.run_sync(publisher.resume)
    tip = published.head if published else None
    done, covered = await trio.to_thread.run_sync(_restore, step, folder, tip)
    # Batches of other trainers have this journal's numbers: the version tells which are covered.
    batches = await journal.batches(after=min(done, await journal.last_number(covered)))
    if batches and tip is None:
        raise StoreError(
            "the journal has batches, and the store of weights is empty",
            advice="put the trainer's folder back as it was, or begin with an empty one",
        )
    last = max(done, await journal.last_number())
    heads = publisher.store.follower.heads
    committed, pending = await in_chain(journal, batches, heads)
    replayable = [batch for batch in committed if batch.version > covered]
    if not _reach_tip(replayable, heads, covered):
        log.warning("the journal lacks what came after the checkpoint: what was published counts")
        replayable = []
    for batch in replayable:
        figures = await trio.to_thread.run_sync(learn, step, batch)
        if records is not None:
            _record_replayed(records, batch, figures, heads)
    adopted = tip is not None and await trio.to_thread.run_sync(_adopt_published, step, publisher, tip)
    return RecoveredState(last, tip, pending, len(replayable), adopted)


def _record_replayed(
    records: Records, batch: Batch, figures: StepFigures, heads: Sequence[Opened[WeightsHead]]
) -> None:
    """Record a replayed step, unless it was recorded before the crash."""
    if all(batch.number != record.number for record in records.steps):
        head = next((each.id for each in heads if each.message.version == batch.version), b"")
        records.add(step_record(batch, figures, head, StepContext()))


async def in_chain(
    journal: TrainingJournal, batches: Sequence[Batch], heads: Sequence[Opened[WeightsHead]]
) -> tuple[list[Batch], tuple[Batch, ...]]:
    """Return the batches that the chain commits to, and those pending on its tip.

    Others may have led in between: what else this trainer drew belongs to a branch that was left,
    and is disowned.
    """
    by_version: dict[int, list[bytes]] = {}
    for batch in batches:
        by_version.setdefault(batch.version, []).extend(group.id for group in batch.groups)
    committed = {
        head.message.version
        for head in heads
        if (ids := by_version.get(head.message.version)) and merkle_root(sorted(ids)) == head.message.groups
    }
    committed_batches = sorted(
        (batch for batch in batches if batch.version in committed),
        key=lambda batch: (batch.version, batch.number),
    )
    tip = heads[-1] if heads else None
    uncommitted = [batch for batch in batches if tip and await _is_pending(journal, batch, tip)]
    # Another leader's batches of a branch that was left may lack the bytes of some groups.
    pending = [*itertools.takewhile(lambda batch: batch.is_whole, uncommitted)]
    if left := [batch.number for batch in batches if batch not in committed_batches and batch not in pending]:
        log.warning("%d batches of a branch that was left are not used", len(left))
        await journal.disown(left)
    return committed_batches, tuple(pending)


async def _is_pending(journal: TrainingJournal, batch: Batch, tip: Opened[WeightsHead]) -> bool:
    """Return whether a batch was drawn after those of a head, on the same branch.

    It was drawn when that head was there; or while it was published, after its own batches.
    """
    message = tip.message
    if batch.version <= message.version or batch.tip not in {tip.id, message.previous}:
        return False
    if batch.tip == tip.id:
        return True
    earlier = [each for each in await journal.batches(version=message.version) if each.number < batch.number]
    return merkle_root(sorted(group.id for each in earlier for group in each.groups)) == message.groups


def _reach_tip(batches: Sequence[Batch], heads: Sequence[Opened[WeightsHead]], covered: int) -> bool:
    """Return whether whole batches lead from a version to the newest, without a gap.

    There is one where another trainer led and its records are not here.
    """
    nothing, known = merkle_root([]), {batch.version for batch in batches}
    later = (head.message for head in reversed(heads) if head.message.version > covered)
    return all(batch.is_whole for batch in batches) and all(
        each.version in known or each.groups == nothing for each in later
    )


def keep_checkpoint(folder: Path, step: TrainStep, number: int, version: int) -> None:
    """Write a checkpoint right after a version was published.

    Blocks: call it in a thread.
    """
    made = step.checkpoint()
    notes = {**made.notes, _NUMBER: str(number), HEAD_VERSION: str(version)}
    write_checkpoint(folder, dataclasses.replace(made, notes=notes))


def _restore(step: TrainStep, folder: Path | None, tip: Opened[WeightsHead] | None) -> tuple[int, int]:
    """Load the newest checkpoint; return its last batch's number, and its version."""
    found = newest_checkpoint(folder) if folder else None
    if found is None:
        return 0, -1
    version = int(found.notes.get(HEAD_VERSION, "-1"))
    if tip is None or version > tip.message.version:
        raise StoreError(
            f"the newest checkpoint is of version {version}, which the store of weights does not have",
            advice="put the trainer's folder back as it was; a chain that goes back would be taken for a lie",
        )
    step.restore(found)
    return int(found.notes.get(_NUMBER, "0")), version


def _adopt_published(step: TrainStep, publisher: Publisher, tip: Opened[WeightsHead]) -> bool:
    """Adopt the published weights if the step's differ; return whether they did."""
    if step.version == tip.message.step and root_of(state_of(step)) == tip.message.root:
        return False
    with publisher.store.lease() as held:
        tensors = {
            name: torch.frombuffer(bytearray(tensor.data), dtype=torch.bfloat16).reshape(tensor.shape)
            for name, tensor in held.state.items()
        }
    changed = step.adopt(tensors, version=tip.message.step)
    log.warning(
        "the replay differs from version %d: %d weights are taken from what was published. "
        "Another machine, or another number of threads, computes differently.",
        tip.message.version,
        changed,
    )
    return True


async def accounted_since(journal: TrainingJournal, heads: Sequence[Opened[WeightsHead]], bound: int) -> int:
    """Return the version from which this journal knows every group that was used.

    Where another trainer led in between, samplers send again what it has acknowledged, and it
    cannot be asked which of these the chain was trained on already. A group is only ever used for a
    later version than the one that it was sampled under.
    """
    nothing = merkle_root([])
    previous = {head.id: head.message.previous for head in heads}
    for head in reversed(heads):
        message = head.message
        # A batch is drawn when the head before its own is there, or is being published.
        tips = {message.previous, previous.get(message.previous)}
        if heads[-1].message.step - message.step > bound:
            break
        batches = await journal.batches(version=message.version) if message.groups != nothing else []
        ids = [group.id for batch in batches if batch.tip in tips for group in batch.groups]
        if merkle_root(sorted(ids)) != message.groups:
            return message.version
    return 0


def restore_heads(
    admission: Admission, store: WeightsStore, tip: Opened[WeightsHead], bound: int, since: int = 0
) -> tuple[list[bytes], Roster]:
    """Publish the fresh heads of the store to the admission, from a version on.

    Return their ids, and the newest one's roster.
    """
    known, roster = [], Roster(())
    for head in store.follower.heads:
        is_fresh = tip.message.step - head.message.step <= bound and head.message.version >= since
        if not is_fresh or not store.blobs.has(head.message.roster):
            continue
        with suppress(DamagedBlobError):  # the next head has its own roster
            roster = decode(Roster, store.blobs.read(head.message.roster, limits.ROSTER_BYTES))
            admission.published(head, roster)
            known.append(head.id)
    return known, roster


async def restore_groups(
    journal: TrainingJournal,
    heads: Sequence[bytes],
    *,
    checks: Admission,
    policy: VerdictPolicy,
    receipts: Receipts,
    buffer: ReplayBuffer,
    admission: GroupFilter,
) -> None:
    """Restore filled slots under these heads, verdicts, and the waiting groups."""
    for kept in await journal.filled(heads):
        checks.remember(kept.head, kept.sampler, kept.slot)
        policy.saw(kept.id, kept.sampler, kept.head)
        if kept.rewards is not None:
            policy.used((kept.id,))
            receipts.remember((kept.id,))
    receipts.remember(await journal.passed_over(heads))
    for found in await journal.findings():
        policy.take(found)
    gone = {}
    for kept in await journal.waiting():
        if kept.sealed is None:
            raise DefectError("a group that waits has no bytes")
        judged = admission.judge(Envelope.parse(kept.sealed))
        if isinstance(judged, Refused):
            gone[kept.id] = judged.reason
        else:
            buffer.put(judged)
            receipts.remember((kept.id,))
    await journal.drop(gone)
