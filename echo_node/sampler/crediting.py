"""What a sampler's groups came to: its own ledger, of what it made, what receipts said, and what verifiers found.

It is written from what this node hears and can prove, and outlives it on disk. What others keep under its key, `attested` knows,
and stands beside it. It knows no engine and no pace.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import trio

from echo_node.ledger import Entry, Ledger
from echo_node.net.base import ACCEPT, Message, Network, Reject, Validation
from echo_node.run import Run
from echo_node.sampler.attested import Attested
from protocol import (
    Envelope,
    Identity,
    Opened,
    Receipt,
    TrajectoryGroup,
    Verdict,
    WeightsHead,
    read_batch,
    topics,
)

SUM_SECONDS: Final = 1.0
"""Between two looks at the sums."""
KEPT_SECONDS: Final = 86_400.0
"""After which all has been said of a group, and only the sums are kept."""


@asynccontextmanager
async def open_crediting(
    folder: Path | None, run: Run, identity: Identity
) -> AsyncGenerator[Crediting | None]:
    """A sampler's account in a run's folder; without one there is nothing that would outlive it."""
    if folder is None:
        yield None
        return
    with Ledger(folder / "ledger.sqlite") as ledger:
        yield Crediting(run, identity, ledger, Attested(run, identity, folder / "attested"))


class Crediting:
    """One sampler's account in one run, and what others attest of it."""

    def __init__(
        self, run: Run, identity: Identity, ledger: Ledger, attested: Attested | None = None
    ) -> None:
        self._run = run
        self._sampler = identity.public
        self._ledger = ledger
        self._attested = attested
        self._credit = ledger.credit(self._sampler, run.id)
        self._changed = trio.Event()

    def status(self) -> dict[str, Any]:
        """Verified tokens and their groups, groups that were taken and not judged, and what came to nothing."""
        others = {} if self._attested is None else {"attested": self._attested.status()}
        return {**dataclasses.asdict(self._credit), **others}

    async def made(self, sealed: Sequence[bytes], head: Opened[WeightsHead]) -> None:
        """Groups were drawn under this head, and are about to be sent."""
        groups = [Envelope.parse(each).open(TrajectoryGroup, self._run.id) for each in sealed]

        def write() -> None:
            with self._ledger.together():
                for group in groups:
                    self._ledger.sent(Entry.of(group, head.message.version))

        await self._write(write)

    async def answered(self, receipt: Receipt) -> None:
        """The leader has spoken, mostly of others' groups, of which the ledger knows nothing."""

        def write() -> None:
            with self._ledger.together():
                for group in receipt.accepted_ids():
                    self._ledger.admitted(group)
                for group, reason in receipt.refused_ids():
                    self._ledger.refused(group, reason)

        await self._write(write)

    async def work(self, network: Network) -> None:
        """Hear verdicts and keep the sums, until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._sum_up)
            if self._attested is not None:
                nursery.start_soon(self._attested.work, network)
            topic = topics.topic(self._run.id, topics.VERDICTS)
            async with network.subscribe(topic, self._look_at) as inbox:
                async for message in inbox:
                    await self._heed([each.open(Verdict, self._run.id) for each in read_batch(message.data)])

    def _look_at(self, message: Message) -> Validation:
        """Only verifiers of the run say such things, and whoever passes one on can see that it is signed."""
        for envelope in read_batch(message.data):
            if envelope.signer not in self._run.told.verifiers:
                return Reject("not-verifier")
            envelope.open(Verdict, self._run.id)
        return ACCEPT

    async def _heed(self, verdicts: Sequence[Opened[Verdict]]) -> None:
        def write() -> None:
            with self._ledger.together():
                for each in verdicts:
                    if self._ledger.state(each.message.group) is not None:  # else it is of another's group
                        self._ledger.verdict(each)

        await self._write(write)

    async def _write(self, write: Callable[[], None]) -> None:
        await trio.to_thread.run_sync(write)
        self._changed.set()

    async def _sum_up(self) -> None:
        """Sum up what has changed, now and then: there may be many groups."""
        await trio.to_thread.run_sync(self._ledger.prune, time.time() - KEPT_SECONDS)
        while True:
            await self._changed.wait()
            self._changed = trio.Event()
            self._credit = await trio.to_thread.run_sync(self._ledger.credit, self._sampler, self._run.id)
            await trio.sleep(SUM_SECONDS)
