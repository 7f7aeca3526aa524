"""Where a trainer goes on after it ended, however it ended: the newest checkpoint, and what the journal says came after.

The batches that heads were published for are learnt from again, and give the bits that were published; then comes what had
been drawn and was not published. On another machine the bits may differ: then what was published counts, since
everybody samples from it. It knows no network.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import torch
import trio

from echo_node.engine.base import TensorBytes
from echo_node.errors import StoreError
from echo_node.trainer.checkpoint import newest_checkpoint, write_checkpoint
from echo_node.trainer.journal import Batch, KeptGroup, TrainingJournal
from echo_node.trainer.step import SampledCompletion, StepFigures, StepSettings, TrainingGroup, TrainStep
from echo_node.weights.publish import Publisher
from echo_node.weights.state import State, root_of
from protocol import Envelope, Opened, TrajectoryGroup, WeightsHead, merkle_root

log = logging.getLogger(__name__)
CHECKPOINT_EVERY: Final = 20
"""Steps between two checkpoints: what has to be computed again after a crash, at most."""
_NUMBER, _VERSION = "batch", "head_version"
"""Notes of a checkpoint: the last batch that it has learnt from, and the version that was published then."""


@dataclasses.dataclass(frozen=True, slots=True)
class StandStill:
    """Where a trainer stood when it ended."""

    number: int
    """Of the last batch that was drawn."""
    tip: Opened[WeightsHead] | None
    pending: tuple[Batch, ...]
    """Drawn, and in no head that was published: to be learnt from first."""
    replayed: int
    adopted: bool
    """Whether this machine came to other bits, and took those that were published."""


async def resume(
    step: TrainStep,
    publisher: Publisher,
    journal: TrainingJournal,
    folder: Path | None,
    *,
    learnt: Callable[[Batch, StepFigures], None] = lambda _batch, _figures: None,
) -> StandStill:
    """Bring a fresh `step` to where the one before it was. `folder` has its checkpoints; `learnt` hears of each replayed batch."""
    published = await trio.to_thread.run_sync(publisher.resume)
    tip = published.head if published else None
    done, covered = await trio.to_thread.run_sync(_restore, step, folder, tip)
    # Batches of others have numbers of this journal's own: it is the version that says which are in the checkpoint.
    batches = await journal.batches(after=min(done, await journal.last_number(covered)))
    if batches and tip is None:
        raise StoreError(
            "the journal has batches, and the store of weights is empty",
            advice="put the trainer's folder back as it was, or begin with an empty one",
        )
    last = max(done, await journal.last_number())
    heads = publisher.store.follower.heads
    committed, pending = await in_chain(journal, batches, heads)
    told = [batch for batch in committed if batch.version > covered]
    if not _lead_on(told, heads, covered):
        log.warning("the journal lacks what came after the checkpoint: what was published counts")
        told = []
    for batch in told:
        figures = await trio.to_thread.run_sync(learn, step, batch)
        learnt(batch, figures)
    adopted = tip is not None and await trio.to_thread.run_sync(_agree, step, publisher, tip)
    return StandStill(last, tip, pending, len(told), adopted)


async def in_chain(
    journal: TrainingJournal, batches: Sequence[Batch], heads: Sequence[Opened[WeightsHead]]
) -> tuple[list[Batch], tuple[Batch, ...]]:
    """Batches that heads of the chain commit to, and those that were drawn under its newest head and are in none.

    Others may have led in between: what else this trainer drew belongs to a branch that was left, and is disowned.
    """
    by_version: dict[int, list[bytes]] = {}
    for batch in batches:
        by_version.setdefault(batch.version, []).extend(group.id for group in batch.groups)
    committed = {
        head.message.version
        for head in heads
        if (ids := by_version.get(head.message.version)) and merkle_root(sorted(ids)) == head.message.groups
    }
    told = sorted(
        (batch for batch in batches if batch.version in committed),
        key=lambda batch: (batch.version, batch.number),
    )
    tip = heads[-1] if heads else None
    newest = tip.message.version if tip else -1
    drawn = (batch for batch in batches if tip and batch.version > newest and batch.tip == tip.id)
    # Another's, of a version that a grant has left, are here by its account; not all of their groups were overheard.
    pending = [*itertools.takewhile(lambda batch: batch.is_whole, drawn)]
    if left := [batch.number for batch in batches if batch not in told and batch not in pending]:
        log.warning("%d batches of a branch that was left are not used", len(left))
        await journal.disown(left)
    return told, tuple(pending)


def _lead_on(batches: Sequence[Batch], heads: Sequence[Opened[WeightsHead]], covered: int) -> bool:
    """Whether whole batches lead from a version to the newest, without a gap: another may have led unheard."""
    nothing, known = merkle_root([]), {batch.version for batch in batches}
    later = (head.message for head in reversed(heads) if head.message.version > covered)
    return all(batch.is_whole for batch in batches) and all(
        each.version in known or each.groups == nothing for each in later
    )


def learn(step: TrainStep, batch: Batch) -> StepFigures:
    """One optimiser step from a batch, by the rewards that stand in it. In a thread."""
    return step.step([_training_group(group, batch.policy_step, step.settings) for group in batch.groups])


def state_of(step: TrainStep) -> State:
    """What would be published now."""
    return {
        name: TensorBytes(
            "bf16", tuple(tensor.shape), tensor.contiguous().view(torch.uint8).numpy().tobytes()
        )
        for name, tensor in step.published().items()
    }


def keep_checkpoint(folder: Path, step: TrainStep, number: int, version: int) -> None:
    """Write down where training stands, right after a version was published. In a thread."""
    made = step.checkpoint()
    notes = {**made.notes, _NUMBER: str(number), _VERSION: str(version)}
    write_checkpoint(folder, dataclasses.replace(made, notes=notes))


def _restore(step: TrainStep, folder: Path | None, tip: Opened[WeightsHead] | None) -> tuple[int, int]:
    """Load the newest checkpoint; returns the number of the last batch that is in it, and its version."""
    found = newest_checkpoint(folder) if folder else None
    if found is None:
        return 0, -1
    version = int(found.notes.get(_VERSION, "-1"))
    if tip is None or version > tip.message.version:
        raise StoreError(
            f"the newest checkpoint is of version {version}, which the store of weights does not have",
            advice="put the trainer's folder back as it was; a chain that goes back would be taken for a lie",
        )
    step.restore(found)
    return int(found.notes.get(_NUMBER, "0")), version


def _agree(step: TrainStep, publisher: Publisher, tip: Opened[WeightsHead]) -> bool:
    """Hold the step against the head that everybody has; what was published counts. Whether it had to be adopted."""
    if step.version == tip.message.step and root_of(state_of(step)) == tip.message.root:
        return False
    with publisher.store.lease() as held:
        tensors = {
            name: torch.frombuffer(bytearray(tensor.data), dtype=torch.bfloat16).reshape(tensor.shape)
            for name, tensor in held.state.items()
        }
    changed = step.adopt(tensors, version=tip.message.step)
    log.warning(
        "the replay did not come to the bits of version %d: %d weights are taken from what was published. "
        "Another machine, or another number of threads, computes differently.",
        tip.message.version,
        changed,
    )
    return True


def _training_group(kept: KeptGroup, policy_step: int, settings: StepSettings) -> TrainingGroup:
    if kept.sealed is None or kept.rewards is None:
        raise StoreError(f"group {kept.id.hex()[:16]} of a batch is not in the journal any more")
    envelope = Envelope.parse(kept.sealed)
    group = envelope.claim(TrajectoryGroup, envelope.run)
    completions: Sequence[SampledCompletion] = [
        SampledCompletion(said.ids, said.logprobs, reward)
        for said, reward in zip(group.completions(), kept.rewards, strict=True)
    ]
    return TrainingGroup(
        group.prompt_ids(),
        completions,
        current=kept.step == policy_step,
        sigma=settings.spread_of(group.engine),
    )
