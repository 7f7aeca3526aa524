"""What a verifier or a trainer tells a sampler of that sampler's own account: signed, on demand, and to nobody else.

Who asks is known by its connection, so nobody can ask about another. An answer is good for a while and is repeated, so
that to ask again and again costs nothing. It keeps no account: `Look` is how one is looked into.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import trio

from echo_node.errors import PeerError, StoreError
from echo_node.ledger import Ledger
from echo_node.net.base import BusyError, Network
from protocol import CreditRefusal, CreditStatement, Identity, ProtocolError, fields, limits, seal, topics

log = logging.getLogger(__name__)
SAME_SECONDS: Final = 10.0
"""For so long a sampler gets the same answer."""
REMEMBERED: Final = 1_024
"""Samplers whose answer is kept for that."""
WAITING: Final = 16
"""Samplers whose accounts wait to be looked into, one after the other: more come again later."""


@dataclass(frozen=True, slots=True)
class Sums:
    """What is kept under a sampler's key, in the words of `protocol.credit`. `since` is Unix time; none: nothing is kept."""

    tokens: int = 0
    verified: int = 0
    condemned: int = 0
    learnt: int = 0
    refused: Mapping[str, int] = field(default_factory=dict)
    since: float | None = None


Look: TypeAlias = Callable[[bytes], Awaitable[Sums]]
"""From a sampler's key to what is kept under it. What goes wrong on the way is a `StoreError`."""


def into_ledger(ledger: Ledger, verifier: bytes, run: bytes) -> Look:
    """How a verifier's own findings are looked into."""

    async def look(sampler: bytes) -> Sums:
        found = await trio.to_thread.run_sync(ledger.found_by, verifier, sampler, run)
        return Sums(found.tokens, found.honest, found.dishonest, since=found.since)

    return look


@contextmanager
def attest(
    network: Network, identity: Identity, run: bytes, look: Look, *, clock: Callable[[], float] = time.time
) -> Generator[None]:
    """Tell every sampler of the run that asks for it what its account is here, until the context is left."""
    told: OrderedDict[bytes, tuple[float, bytes]] = OrderedDict()
    turn = trio.Lock()

    async def answer(sampler: bytes, asked: bytes) -> bytes:
        await trio.lowlevel.checkpoint()
        if asked != run:
            raise PeerError("this node keeps no accounts of that run")
        now = trio.current_time()
        before = told.get(sampler)
        if before is not None and now - before[0] < SAME_SECONDS:
            return before[1]
        if turn.statistics().tasks_waiting >= WAITING:
            raise BusyError("too many ask for their accounts at once")
        async with turn:
            try:
                sums = await look(sampler)
            except StoreError as error:  # its words are about this machine, and not for others
                log.warning("a sampler's account cannot be told: %s", error)
                raise PeerError("accounts cannot be looked into here for now") from error
        sealed = seal(_statement(sampler, sums, clock()), identity, run)
        told[sampler] = now, sealed
        told.move_to_end(sampler)
        if len(told) > REMEMBERED:
            told.popitem(last=False)
        return sealed

    with network.serve(topics.CREDIT_STREAM, answer, most=len(run)):
        yield


def _statement(sampler: bytes, sums: Sums, now: float) -> CreditStatement:
    at = max(0, int(1000 * now))
    most = sorted(filter(_is_reason, sums.refused), key=lambda reason: (-sums.refused[reason], reason))
    kept = sorted(most[: limits.CREDIT_REASONS])
    return CreditStatement(
        at_ms=at,
        condemned=sums.condemned,
        learnt=sums.learnt,
        refused=tuple(CreditRefusal(reason, sums.refused[reason]) for reason in kept if sums.refused[reason]),
        sampler=sampler,
        since_ms=at if sums.since is None else max(0, min(at, int(1000 * sums.since))),
        tokens=sums.tokens,
        verified=sums.verified,
    )


def _is_reason(text: str) -> bool:
    """Whether it can travel: a file of an earlier program may have others."""
    try:
        fields.slug.load(text)
    except ProtocolError:
        return False
    return True
