"""Provenance record: a blob, named in a head's `ext`, of the groups trained on.

A head commits to the ids of its groups by one Merkle root; the record lists the ids and the facts
of each group, batch by batch. It is for trainers that may have to lead, and for whoever asks where
a version comes from. `trainer/provenance.py` checks it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final

from protocol import WeightsHead, limits
from protocol.digest import DIGEST_BYTES
from protocol.fields import Counter, Digest, Key, Signature, array, blob
from protocol.wire import of, record, row

_EXT: Final = "account"
_REWARD_BYTES: Final = 8
_BATCHES: Final = 1_024
"""Most batches of one head: the manifest's largest `head_every`."""
_GROUPS: Final = 4_096
"""Most groups of one batch."""


@row
class UsedGroup:
    """A group that was trained on.

    `rewards` are the trainer's, in float64, per completion.
    """

    id: Digest
    sampler: Key
    slot: Counter
    head: Digest
    rewards: Annotated[bytes, blob(_REWARD_BYTES * limits.COMPLETIONS, 0, _REWARD_BYTES)]
    signature: Signature


@row
class UsedBatch:
    """Groups of one step, in order.

    `policy_step` is the policy's step before it: a batch that teaches nothing does not move it.
    """

    policy_step: Counter
    groups: Annotated[tuple[UsedGroup, ...], array(of(UsedGroup), _GROUPS, 1)]


@record
class ProvenanceRecord:
    """Batches of one version, in the order of training."""

    LIMIT: ClassVar[int] = limits.READ_BYTES
    ITEMS: ClassVar[int] = limits.MANY_ITEMS

    batches: Annotated[tuple[UsedBatch, ...], array(of(UsedBatch), _BATCHES, 1)]


def provenance_ext(account: bytes) -> Mapping[str, Any]:
    """Return the entry for the `ext` of a head that has this record."""
    return {_EXT: account}


def provenance_blob(head: WeightsHead) -> bytes | None:
    """Return the provenance blob that a head names; None if it is no blob id."""
    blob_id = head.ext.get(_EXT)
    return blob_id if isinstance(blob_id, bytes) and len(blob_id) == DIGEST_BYTES else None
