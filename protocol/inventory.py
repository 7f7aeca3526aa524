"""Inventory: groups that a leader took, listed for verifiers before trust.

Whatever door a group came through, its id is in an inventory of the leader. A verifier fetches what
it lacks, draws its lots, and acknowledges the inventory; until then no group of it is used on the
strength of its sampler's standing. The acknowledgement names the groups that it drew, for which
verdicts follow: a group that was drawn, and its sampler's later ones, wait for them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Annotated, ClassVar

from protocol import limits
from protocol.digest import DIGEST_BYTES
from protocol.errors import InconsistentError
from protocol.fields import Digest, Ext, blob, uint
from protocol.receipt import split_ids
from protocol.wire import record


@record
class Inventory:
    """Ids of groups that the leader took.

    `number` counts its inventories of a term from 1.
    """

    KIND: ClassVar[str] = "inventory"
    LIMIT: ClassVar[int] = limits.INVENTORY_BYTES

    groups: Annotated[bytes, blob(limits.INVENTORY_IDS * DIGEST_BYTES, DIGEST_BYTES, DIGEST_BYTES)]
    head: Digest
    number: Annotated[int, uint(limits.SAFE_INTEGER, 1)]
    term: Annotated[int, uint(limits.SAFE_INTEGER, 1)]
    ext: Ext = dataclasses.field(default_factory=dict)

    def check(self) -> None:
        _check_distinct(self.groups, "groups")

    def ids(self) -> Iterator[bytes]:
        return split_ids(self.groups)


@record
class InventoryAck:
    """Acknowledgement: a verifier drew lots over an inventory, except `lacking`.

    `drawn` are those that it looks at: a verdict on each follows, or has been given.
    """

    KIND: ClassVar[str] = "inventory-ack"
    LIMIT: ClassVar[int] = limits.INVENTORY_BYTES

    drawn: Annotated[bytes, blob(limits.INVENTORY_IDS * DIGEST_BYTES, 0, DIGEST_BYTES)]
    inventory: Digest
    lacking: Annotated[bytes, blob(limits.INVENTORY_IDS * DIGEST_BYTES, 0, DIGEST_BYTES)]
    ext: Ext = dataclasses.field(default_factory=dict)

    def check(self) -> None:
        _check_distinct(self.lacking, "lacking")
        _check_distinct(self.drawn, "drawn")
        if {*self.drawn_ids()} & {*self.lacking_ids()}:
            raise InconsistentError("a group that is lacking and was drawn", "drawn")

    def drawn_ids(self) -> Iterator[bytes]:
        return split_ids(self.drawn)

    def lacking_ids(self) -> Iterator[bytes]:
        return split_ids(self.lacking)


@record
class GroupsQuestion:
    """Groups of a run that the asker wants from who took them, by id."""

    LIMIT: ClassVar[int] = limits.GROUPS_QUESTION_BYTES

    groups: Annotated[bytes, blob(limits.ASKED_GROUPS * DIGEST_BYTES, DIGEST_BYTES, DIGEST_BYTES)]
    run: Digest

    def check(self) -> None:
        _check_distinct(self.groups, "groups")

    def ids(self) -> Iterator[bytes]:
        return split_ids(self.groups)


def _check_distinct(joined: bytes, where: str) -> None:
    ids = list(split_ids(joined))
    if len(set(ids)) != len(ids):
        raise InconsistentError("one group named twice", where)
