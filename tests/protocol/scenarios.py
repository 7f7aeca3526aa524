"""Heads, grants and lies for the chain, made by the trainers of the example run."""

from __future__ import annotations

import dataclasses
from typing import Any

from protocol import (
    Follower,
    Identity,
    Opened,
    Route,
    Rules,
    TermGrant,
    TermVote,
    WeightsHead,
    open_manifest,
    open_sealed,
    seal,
)
from protocol.digest import ZERO
from protocol.election import cast

from .examples import HEAD_ZERO, MANIFEST, OPENED_MANIFEST, RUN, STANDBY, TRAINER, VERIFIER, name

RULES = Rules.of(OPENED_MANIFEST)
_PAIR = tuple(sorted((TRAINER.public, STANDBY.public)))
TURNS = open_manifest(
    seal(
        dataclasses.replace(MANIFEST, terms=dataclasses.replace(MANIFEST.terms, electors=_PAIR)),
        TRAINER,
        ZERO,
    )
)
"""A run whose two trainers are its only electors."""
TURN_RULES = Rules.of(TURNS)
_ANCHOR = Route(base=None, codec="safetensors", size=19_447_936, table=name("anchor table"))


def opened(head: WeightsHead, signer: Identity = TRAINER, run: bytes = RUN) -> Opened[WeightsHead]:
    return open_sealed(seal(head, signer, run), WeightsHead, run)


ZERO_HEAD = opened(HEAD_ZERO)


def after(
    before: Opened[WeightsHead],
    luck: str = "",
    signer: Identity | None = None,
    run: bytes = RUN,
    **changes: Any,
) -> Opened[WeightsHead]:
    """A head that follows another one; `luck` tells twins apart."""
    told = before.message
    new_term = changes.get("term", told.term) != told.term
    fields: dict[str, Any] = {
        "version": told.version + 1,
        "step": told.step + 1,
        "previous": before.id,
        "luck": name(f"luck of {before.id.hex()} {luck}"),
        "root": name(f"root of {before.id.hex()} {luck}"),
        "routes": (_ANCHOR,) if new_term else (Route(before.id, "gap8-ulp8-zstd1", 1000, name("table")),),
    }
    signer = signer or (TRAINER if before.signer == TRAINER.public else STANDBY)
    return opened(dataclasses.replace(told, **(fields | changes)), signer, run)


def grant(
    base: bytes,
    leader: Identity = STANDBY,
    term: int = 2,
    voters: tuple[Identity, ...] = (STANDBY, VERIFIER),
    run: bytes = RUN,
) -> TermGrant:
    vote = TermVote(base=base, leader=leader.public, term=term)
    return TermGrant(
        tuple(sorted((cast(vote, who, run) for who in voters), key=lambda ballot: ballot.elector)), vote
    )


def follower(*heads: Opened[WeightsHead]) -> Follower:
    """A follower that was told these heads."""
    state = Follower.newcomer(RULES)
    for head in heads:
        state = state.accept(head)
    return state


def line(count: int, start: Opened[WeightsHead] = ZERO_HEAD, luck: str = "") -> list[Opened[WeightsHead]]:
    """A head and `count` that follow it."""
    heads = [start]
    for _ in range(count):
        heads.append(after(heads[-1], luck))
    return heads


__all__ = [
    "RULES",
    "TURNS",
    "TURN_RULES",
    "ZERO",
    "ZERO_HEAD",
    "after",
    "follower",
    "grant",
    "line",
    "opened",
]
