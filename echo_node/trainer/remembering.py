"""What a trainer that comes back must know again before it hears anybody: heads, slots, verdicts, and groups that wait.

Every check of a group that waits is made again, as if it had just come. Weights and batches are `resuming`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

from echo_node.admission import Admission, Admitted, Refused
from echo_node.errors import DefectError
from echo_node.trainer.journal import TrainingJournal
from echo_node.trainer.receipts import Receipts
from echo_node.trainer.replay import ReplayBuffer
from echo_node.trainer.verdicts import VerdictPolicy
from echo_node.weights.blobfolder import DamagedBlobError
from echo_node.weights.store import WeightsStore
from protocol import Envelope, Opened, Roster, WeightsHead, decode, limits, merkle_root


async def accounted_since(journal: TrainingJournal, heads: Sequence[Opened[WeightsHead]], bound: int) -> int:
    """The first version under which no group can have been used that this journal does not know of.

    Where another trainer led in between, samplers send again what it has acknowledged, and it cannot be asked which of these
    the chain was trained on already. A group is only ever used for a later version than the one that it was drawn under.
    """
    nothing = merkle_root([])
    for head in reversed(heads):
        told = head.message
        if heads[-1].message.step - told.step > bound:
            break
        batches = await journal.batches(version=told.version) if told.groups != nothing else []
        ids = [group.id for batch in batches if batch.tip == told.previous for group in batch.groups]
        if merkle_root(sorted(ids)) != told.groups:
            return told.version
    return 0


def know_heads(
    admission: Admission, store: WeightsStore, tip: Opened[WeightsHead], bound: int, since: int = 0
) -> tuple[list[bytes], Roster]:
    """Heads of the last so many steps, from a version on, whose rosters may sample under them; and the newest's roster."""
    known, roster = [], Roster(())
    for head in store.follower.heads:
        is_fresh = tip.message.step - head.message.step <= bound and head.message.version >= since
        if not is_fresh or not store.blobs.has(head.message.roster):
            continue
        with suppress(DamagedBlobError):  # the next head has a roster of its own
            roster = decode(Roster, store.blobs.read(head.message.roster, limits.ROSTER_BYTES))
            admission.published(head, roster)
            known.append(head.id)
    return known, roster


async def know_groups(
    journal: TrainingJournal,
    heads: Sequence[bytes],
    *,
    admission: Admission,
    policy: VerdictPolicy,
    receipts: Receipts,
    buffer: ReplayBuffer,
    judge: Callable[[Envelope], Admitted | Refused],
) -> None:
    """Slots that were filled under these heads, what verifiers have said, and the groups that wait."""
    for kept in await journal.filled(heads):
        admission.remember(kept.head, kept.sampler, kept.slot)
        policy.saw(kept.id, kept.sampler)
        if kept.rewards is not None:
            policy.used((kept.id,))
            receipts.remember((kept.id,))
    for found in await journal.findings():
        policy.take(found)
    gone = {}
    for kept in await journal.waiting():
        if kept.sealed is None:
            raise DefectError("a group that waits has no bytes")
        judged = judge(Envelope.parse(kept.sealed))
        if isinstance(judged, Refused):
            gone[kept.id] = judged.reason
        else:
            buffer.put(judged)
            receipts.remember((kept.id,))
    await journal.drop(gone)
