"""Participation: a sampler's join, and the roster in a head."""

from __future__ import annotations

import dataclasses
from typing import Annotated, ClassVar

from protocol import limits
from protocol.fields import Digest, EngineClass, Ext, Key, array, check_ascending, text
from protocol.wire import of, record, row


@record
class Join:
    """A sampler enters a run with one engine class. `head` is the newest one it knows."""

    KIND: ClassVar[str] = "join"
    LIMIT: ClassVar[int] = limits.SMALL_BYTES

    agent: Annotated[str, text(limits.NAME_BYTES)]
    engine: EngineClass
    head: Digest
    name: Annotated[str, text(limits.NAME_BYTES)]
    ext: Ext = dataclasses.field(default_factory=dict)


@row
class Member:
    """One sampler of a roster, with the id of its join."""

    key: Key
    engine: EngineClass
    join: Digest


@record
class Roster:
    """Samplers that may sample under a head: a blob, named in the head. Sorted by key."""

    LIMIT: ClassVar[int] = limits.ROSTER_BYTES
    ITEMS: ClassVar[int] = limits.MANY_ITEMS

    members: Annotated[tuple[Member, ...], array(of(Member), limits.ROSTER)]

    def check(self) -> None:
        check_ascending((member.key for member in self.members), "members")

    def find(self, key: bytes) -> Member | None:
        return next((member for member in self.members if member.key == key), None)
