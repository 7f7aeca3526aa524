"""Updates a sampler's own ledger from its groups, receipts and verdicts.

Only what is signed is written. What verifiers and trainers attest about the same key is fetched by
`credit.statement_client` and shown beside it.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import trio

from echo_node.credit.ledger import Entry, Ledger
from echo_node.credit.statement_client import StatementClient
from echo_node.net.base import Network
from echo_node.rollouts.gossip_validation import validate_verdicts
from echo_node.rollouts.record import RolloutRecord
from echo_node.runs.run import Run
from protocol import (
    Identity,
    Opened,
    Receipt,
    Verdict,
    WeightsHead,
    read_batch,
    topics,
)

SUM_SECONDS: Final = 1.0
"""Seconds between two readings of the sums."""
KEPT_SECONDS: Final = 86_400.0
"""Seconds after which a group is pruned to its sums: all receipts and verdicts have come."""


@asynccontextmanager
async def open_ledger_sync(
    folder: Path | None, run: Run, identity: Identity
) -> AsyncGenerator[LedgerSync | None]:
    """Open the sampler's ledger in a run's folder; without a folder there is none."""
    if folder is None:
        yield None
        return
    with Ledger(folder / "ledger.sqlite") as ledger:
        yield LedgerSync(run, identity, ledger, StatementClient(run, identity, folder / "attested"))


class LedgerSync:
    """One sampler's ledger in one run, and the statements of others about it."""

    def __init__(
        self, run: Run, identity: Identity, ledger: Ledger, attested: StatementClient | None = None
    ) -> None:
        self._run = run
        self._sampler = identity.public
        self._ledger = ledger
        self._attested = attested
        self._credit = ledger.credit(self._sampler, run.id)
        self._changed = trio.Event()

    def status(self) -> dict[str, Any]:
        """Return the sampler's credit, and what others attest."""
        others = {} if self._attested is None else {"attested": self._attested.status()}
        return {**dataclasses.asdict(self._credit), **others}

    async def record(self, groups: Sequence[RolloutRecord], head: Opened[WeightsHead]) -> None:
        """Record groups that were drawn under this head, before they are sent."""

        def write() -> None:
            with self._ledger.transaction():
                for group in groups:
                    self._ledger.sent(Entry.of(group, self._run.id, head.message.version))

        await self._write(write)

    async def receipt(self, receipt: Receipt) -> None:
        """Record the leader's receipt, skipping groups that are not in the ledger.

        Those are of other samplers.
        """

        def write() -> None:
            with self._ledger.transaction():
                for group in receipt.accepted_ids():
                    self._ledger.admitted(group)
                for group, reason in receipt.refused_ids():
                    self._ledger.refused(group, reason)

        await self._write(write)

    async def work(self, network: Network) -> None:
        """Record verdicts and keep the sums up to date, until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._sum_up)
            if self._attested is not None:
                nursery.start_soon(self._attested.work, network)
            topic = topics.topic(self._run.id, topics.VERDICTS)
            async with network.subscribe(topic, partial(validate_verdicts, self._run)) as inbox:
                async for message in inbox:
                    await self._record_verdicts(
                        [each.open(Verdict, self._run.id) for each in read_batch(message.data)]
                    )

    async def _record_verdicts(self, verdicts: Sequence[Opened[Verdict]]) -> None:
        def write() -> None:
            with self._ledger.transaction():
                for each in verdicts:
                    if self._ledger.state(each.message.group) is not None:  # else it is of another's group
                        self._ledger.verdict(each)

        await self._write(write)

    async def _write(self, write: Callable[[], None]) -> None:
        await trio.to_thread.run_sync(write)
        self._changed.set()

    async def _sum_up(self) -> None:
        """Read the sums after changes, at most once a second: there may be many groups."""
        await trio.to_thread.run_sync(self._ledger.prune, time.time() - KEPT_SECONDS)
        while True:
            await self._changed.wait()
            self._changed = trio.Event()
            self._credit = await trio.to_thread.run_sync(self._ledger.credit, self._sampler, self._run.id)
            await trio.sleep(SUM_SECONDS)
