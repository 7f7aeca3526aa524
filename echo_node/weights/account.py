"""The account of a version: a blob, named in its head's `ext`, with the groups that it was trained on, batch by batch.

A head commits to the ids of its groups by one root; an account says which ids these are, and the facts of each. It is for
other trainers, who may have to lead, and for whoever asks where a version comes from. Whether it is true, `accounting` finds out.
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
"""Of one head: the manifest's largest `head_every`."""
_GROUPS: Final = 4_096
"""Of one batch."""


@row
class UsedGroup:
    """A group that was learnt from. `rewards` are those of its completions, as the trainer computed them, in float64."""

    id: Digest
    sampler: Key
    slot: Counter
    head: Digest
    rewards: Annotated[bytes, blob(_REWARD_BYTES * limits.COMPLETIONS, 0, _REWARD_BYTES)]
    signature: Signature


@row
class UsedBatch:
    """What one step learnt from, in order. `policy_step` is where the policy stood: a batch that teaches nothing does not move it."""

    policy_step: Counter
    groups: Annotated[tuple[UsedGroup, ...], array(of(UsedGroup), _GROUPS, 1)]


@record
class Account:
    """The batches of one version, in the order in which they were learnt from."""

    LIMIT: ClassVar[int] = limits.READ_BYTES
    ITEMS: ClassVar[int] = limits.MANY_ITEMS

    batches: Annotated[tuple[UsedBatch, ...], array(of(UsedBatch), _BATCHES, 1)]


def naming(account: bytes) -> Mapping[str, Any]:
    """What stands in the `ext` of a head that has this account."""
    return {_EXT: account}


def account_of(head: WeightsHead) -> bytes | None:
    """The blob that a head names as its account; none, if what stands there is no blob."""
    told = head.ext.get(_EXT)
    return told if isinstance(told, bytes) and len(told) == DIGEST_BYTES else None
