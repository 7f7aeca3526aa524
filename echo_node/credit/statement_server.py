"""Server of signed credit statements, for each sampler about itself.

The asking sampler is known by its connection, so nobody can ask about another. A statement is
cached for a while, so that asking repeatedly costs nothing.
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

from echo_node.credit.ledger import Ledger
from echo_node.errors import PeerError, StoreError
from echo_node.net.base import BusyError, Network
from protocol import CreditRefusal, CreditStatement, Identity, ProtocolError, fields, limits, seal, topics

log = logging.getLogger(__name__)
SAME_SECONDS: Final = 10.0
"""Seconds for which a sampler gets the same statement."""
REMEMBERED: Final = 1_024
"""Samplers whose statement is cached."""
WAITING: Final = 16
"""Requests that wait for their turn to be summed; more are refused as busy."""


@dataclass(frozen=True, slots=True)
class Sums:
    """Credit sums of one sampler, as in `protocol.credit`.

    `since` is Unix time, None without groups.
    """

    tokens: int = 0
    verified: int = 0
    condemned: int = 0
    learnt: int = 0
    refused: Mapping[str, int] = field(default_factory=dict)
    since: float | None = None


ReadSums: TypeAlias = Callable[[bytes], Awaitable[Sums]]
"""Reads the sums of a sampler's key; failures are `StoreError`s."""


def ledger_sums(ledger: Ledger, verifier: bytes, run: bytes) -> ReadSums:
    """Return a reader of the verifier's own verdicts in its ledger."""

    async def read(sampler: bytes) -> Sums:
        found = await trio.to_thread.run_sync(ledger.found_by, verifier, sampler, run)
        return Sums(found.tokens, found.honest, found.dishonest, since=found.since)

    return read


@contextmanager
def serve_statements(
    network: Network,
    identity: Identity,
    run: bytes,
    read: ReadSums,
    *,
    clock: Callable[[], float] = time.time,
) -> Generator[None]:
    """Serve statements to the samplers of the run, until the context is left."""
    cache: OrderedDict[bytes, tuple[float, bytes]] = OrderedDict()
    turn = trio.Lock()

    async def answer(sampler: bytes, requested_run: bytes) -> bytes:
        await trio.lowlevel.checkpoint()
        if requested_run != run:
            raise PeerError("this node keeps no accounts of that run")
        now = trio.current_time()
        before = cache.get(sampler)
        if before is not None and now - before[0] < SAME_SECONDS:
            return before[1]
        if turn.statistics().tasks_waiting >= WAITING:
            raise BusyError("too many requests for credit statements at once")
        async with turn:
            try:
                sums = await read(sampler)
            except StoreError as error:  # its text is about this machine, and not for peers
                log.warning("credit statement not made: %s", error)
                raise PeerError("accounts cannot be read here for now") from error
        sealed = seal(_statement(sampler, sums, clock()), identity, run)
        cache[sampler] = now, sealed
        cache.move_to_end(sampler)
        if len(cache) > REMEMBERED:
            cache.popitem(last=False)
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
    """Return whether a reason is valid on the wire.

    Files of older programs may hold others.
    """
    try:
        fields.slug.load(text)
    except ProtocolError:
        return False
    return True
