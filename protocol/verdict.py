"""Verdict of a verifier on a group, with its figures, reason and lot."""

from __future__ import annotations

import dataclasses
from typing import Annotated, ClassVar, Final

from blake3 import blake3

from protocol import limits
from protocol.digest import context
from protocol.fields import Digest, Ext, Signature, Slug, choice, number, optional, text, uint
from protocol.identity import Identity, verify
from protocol.sampling import FARTHEST
from protocol.wire import record

RESULTS: Final = ("honest", "dishonest", "undecided")

_Distance = Annotated[float, number(0.0, 1.0)]
_Scaled = Annotated[float, number(0.0, FARTHEST)]


@record
class Figures:
    """Measurements: replay distances, temperature contrast, log-prob gap.

    The gap is that of log-probabilities.
    """

    contrast: Annotated[float, number(-1.0, 1.0)]
    d_mean: _Distance
    d_most: _Distance
    logprob_gap: Annotated[float, number(0.0, 1e6)]
    reward: Annotated[float | None, optional(number(-limits.REWARD, limits.REWARD))]
    tokens: Annotated[int, uint(limits.COMPLETIONS * limits.TOKENS)]
    z_mean: _Scaled
    z_most: _Scaled


@record
class Verdict:
    """One verdict on one group.

    `draw` proves that the verifier did not choose the group.
    """

    KIND: ClassVar[str] = "verdict"
    LIMIT: ClassVar[int] = limits.SMALL_BYTES

    draw: Signature
    figures: Figures
    group: Digest
    note: Annotated[str, text(limits.TEXT_BYTES)]
    reason: Slug
    result: Annotated[str, choice(*RESULTS)]
    ext: Ext = dataclasses.field(default_factory=dict)


def sign_draw(verifier: Identity, run: bytes, group: bytes) -> bytes:
    """Return the verifier's lot for a group: secret before, checkable afterwards."""
    return verifier.sign(_draw_bytes(run, group))


def check_draw(verifier: bytes, run: bytes, group: bytes, draw: bytes) -> None:
    """Raise unless the lot is this verifier's for this group."""
    verify(verifier, draw, _draw_bytes(run, group))


def drawn(draw: bytes, rate: float) -> bool:
    """Return whether a lot selects a group at this rate of verification."""
    lot = int.from_bytes(blake3(draw, derive_key_context=context("lot")).digest(length=8), "little")
    return (lot >> 11) * 2.0**-53 < rate


def _draw_bytes(run: bytes, group: bytes) -> bytes:
    return context("draw").encode() + b"\0" + run + group
