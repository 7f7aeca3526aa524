"""Sampler loop: register, follow the chain, generate groups and deliver them.

Slots are filled on request (sequential mode) or continuously (asynchronous mode). A head's weights
are loaded before anything is drawn under it, and every group names that head. One task at a time
uses the engine.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeAlias

import trio

from echo_node.election.lease import Lease
from echo_node.engine.base import Engine, Update, no_news
from echo_node.errors import (
    ConfigError,
    ContractError,
    DefectError,
    EchoError,
    EngineError,
    PeerError,
    StoreError,
)
from echo_node.net.base import Message, Network
from echo_node.net.outbox.backoff import Patience
from echo_node.net.outbox.outbox import Outbox
from echo_node.net.subscription import Subscription
from echo_node.rollouts.gossip_validation import validate_receipt
from echo_node.rollouts.record import RolloutRecord
from echo_node.runs.run import Run
from echo_node.runtime.change_signal import ChangeSignal
from echo_node.runtime.pause_gate import PauseGate
from echo_node.runtime.threads import run_stoppable
from echo_node.sampler.attempts import Attempts
from echo_node.sampler.delivery import GroupDelivery
from echo_node.sampler.ledger_sync import LedgerSync
from echo_node.sampler.registration import SETTLE_SECONDS, Registration
from echo_node.sampler.requested_groups import RequestedGroups
from echo_node.sampler.rollout import Rollout
from echo_node.sampler.send_rate import SendRate
from echo_node.sampler.throughput import ThroughputMonitor
from echo_node.telemetry.metrics import Rate
from echo_node.weights.engine_sync import hand_over, update_to
from echo_node.weights.puller import Puller
from echo_node.weights.weights_view import WeightsView
from protocol import (
    ZERO,
    Identity,
    Opened,
    ProtocolError,
    Receipt,
    RolloutRequest,
    WeightsHead,
    limits,
    open_sealed,
    topics,
)

log = logging.getLogger(__name__)
HEAD_SECONDS = 30.0
"""Seconds to wait for the head that a request names."""
TRIES: Final = 3
"""Attempts to fill the same slots when the engine process dies."""
WRONG_ENGINE: Final = "wrong-engine"
REFILL_SECONDS: Final = 1.0
"""Seconds of work that are begun at once when rows of the engine fall free."""
NextBlock: TypeAlias = Callable[[], Awaitable[Sequence[int] | None]]
"""Returns the slots to begin next, or None if no more are begun in this call."""
Post: TypeAlias = Callable[[Sequence[RolloutRecord]], Awaitable[None]]
"""Takes groups that have ended."""


@dataclass(slots=True)
class _Place:
    """Progress under one head: the next slot, and slots begun and not posted."""

    head: Opened[WeightsHead]
    slot: int
    unposted: list[int] = field(default_factory=list)

    def take(self, count: int) -> Sequence[int]:
        """Return the slots to begin next: those first that were begun before."""
        if self.unposted:
            block, self.unposted = self.unposted[:count], self.unposted[count:]
            return block
        self.slot += count
        return range(self.slot - count, self.slot)


class SamplerLoop:
    """One sampler of a run.

    `slots_per_call` groups are generated together and wait in the outbox until a receipt names
    them. With a `lease` it stops when the leader's lease has expired, since nobody may want its
    groups then.
    """

    def __init__(
        self,
        run: Run,
        network: Network,
        identity: Identity,
        engine: Engine,
        puller: Puller,
        outbox: Outbox,
        *,
        slots_per_call: int,
        agent: str,
        patience: Patience | None = None,
        lease: Lease | None = None,
        gate: PauseGate | None = None,
        ledger_sync: LedgerSync | None = None,
    ) -> None:
        if engine.engine_class not in {tolerance.engine for tolerance in run.manifest.engines}:
            raise ConfigError(f"this run does not take groups of the engine class {engine.engine_class}")
        self._run = run
        self._network = network
        self._identity = identity
        self._engine = engine
        self._slots = slots_per_call
        self._busy = trio.Lock()
        self._rollout = Rollout(run, identity, engine)
        self._puller = puller
        self._chain = puller.chain
        self._lease = lease
        self._gate = gate or PauseGate()
        self._jitter = random.Random(identity.public)  # noqa: S311 - spreads retries, keeps no secret
        self._registration = Registration(
            run.id, network, identity, puller, engine=engine.engine_class, agent=agent, luck=self._jitter
        )
        self._delivery = GroupDelivery(
            run.id,
            network,
            identity,
            outbox,
            self._chain,
            puller.store.lent,
            staleness=run.manifest.sync.staleness,
            patience=patience,
            luck=self._jitter,
            on_receipt=ledger_sync.receipt if ledger_sync else None,
        )
        self._ledger_sync = ledger_sync
        self.send_rate = SendRate(unanswered=4 * slots_per_call, luck=self._jitter)
        self._throughput = ThroughputMonitor(run.manifest.sync.staleness)
        self.tokens = Rate()
        """Generated tokens per second."""
        self._requested = RequestedGroups(run.id, identity, puller.store.lent, self._fill_requested)
        self._attempts = Attempts()
        self._given_up = 0
        """Groups that were begun and given up, since they would have been stale."""
        self._first: dict[str, float] = {}
        """Unix times of the first weights and of the first accepted group."""
        self._met = 0
        """Number of times that a peer connected."""
        self._news = ChangeSignal()
        """Notified when a peer connects or a new head arrives."""

    def status(self) -> dict[str, Any]:
        """Return the figures that `echo-node status` and the dashboard show."""
        tip = self._chain.tip
        loaded = self._puller.store.find(self._engine.loaded or ZERO)
        return {
            "joined": self._registration.is_joined,
            "turned_away": self._registration.turned_away,
            "leader_is_silent": self._lease is not None and self._lease.is_over,
            "version": tip.message.version if tip else None,
            "engine_version": loaded.message.version if loaded else None,
            "accepted": self.send_rate.accepted,
            "refused": dict(sorted((+self.send_rate.refused).items())),
            "waiting": self._delivery.waiting,
            "paused": list(self._gate.reasons),
            "tokens_per_second": round(self.tokens.per_second(), 1),
            "seconds_per_group": None
            if (each := self._throughput.seconds_per_group) is None
            else round(each, 3),
            "too_slow": self._throughput.too_slow,
            "failing": self._attempts.reason,
            "requested": self._requested.progress,
            "given_up": self._given_up,
            "first": dict(self._first),
            **({"credit": self._ledger_sync.status()} if self._ledger_sync else {}),
        }

    async def work(self) -> None:
        """Sample until cancelled."""
        run, network = self._run.id, self._network
        with network.serve(
            topics.ROLLOUT_STREAM, self._answer, most=limits.SMALL_BYTES + limits.ENVELOPE_BYTES
        ):
            async with (
                self._puller.work(),
                network.subscribe(
                    topics.topic(run, topics.RECEIPTS), partial(validate_receipt, self._run)
                ) as receipts,
                trio.open_nursery() as nursery,
            ):
                await self._delivery.start()
                nursery.start_soon(self._delivery.run)
                nursery.start_soon(self._follow_chain)
                nursery.start_soon(self._watch_peers)
                nursery.start_soon(self._read, receipts)
                nursery.start_soon(self._registration.keep)
                nursery.start_soon(self._push)
                nursery.start_soon(self._requested.work)
                nursery.start_soon(self._attempts.raise_if_hopeless)
                if self._ledger_sync is not None:
                    nursery.start_soon(self._ledger_sync.work, network)

    # The chain

    async def _follow_chain(self) -> None:
        head: Opened[WeightsHead] | None = None
        while True:
            before, head = head, await self._chain.wait_for_newer(head.id if head else None)
            self.send_rate.new_head()
            if before is not None and before.message.term != head.message.term:
                self._registration.doubt()
            self._requested.new_head(head.id)
            self._throughput.record_head(head.message.step, trio.current_time())
            self._news.notify()

    async def _watch_peers(self) -> None:
        async with self._network.watch() as events:
            async for event in events:
                self._met += event.joined
                self._news.notify()

    async def _fill(
        self,
        head: Opened[WeightsHead],
        next_block: NextBlock,
        post: Post,
        news: Callable[[], Update | None] = no_news,
    ) -> EchoError | ProtocolError | None:
        """Fill block after block of slots under a head, and post each group as it ends.

        Its weights are loaded first if needed. Groups that end while others are being posted are
        posted together. The draws of a slot are fixed by its key: after a crash of the engine those
        that have not ended are drawn again, and are the same. Returns the error that ended it.
        """
        begun: dict[int, None] = {}
        outgoing, ended = trio.open_memory_channel[RolloutRecord](self._slots)

        async def take_block() -> Sequence[int] | None:
            block = await next_block()
            begun.update(dict.fromkeys(block or ()))
            return block

        def blocks() -> Iterator[Sequence[int]]:
            if begun:  # by an engine that died
                yield [*begun]
            while (block := trio.from_thread.run(take_block)) is not None:
                yield block

        def draw(stop: Callable[[], bool]) -> None:
            for group in self._rollout.stream(head, blocks(), stop, news):
                del begun[group.slot]
                self._attempts.succeed()
                trio.from_thread.run(outgoing.send, group)

        async with self._busy, trio.open_nursery() as nursery:
            nursery.start_soon(_post_together, ended, post)
            with outgoing:
                failure = await self._draw_in_tries(head, draw)
        if failure is not None:
            self._attempts.fail(failure)
        return failure

    async def _draw_in_tries(
        self, head: Opened[WeightsHead], draw: Callable[[Callable[[], bool]], None]
    ) -> EchoError | ProtocolError | None:
        """Draw, again if the engine dies; return the error.

        It is not raised, so that completed groups are posted.
        """
        for tries_left in reversed(range(TRIES)):
            try:
                if self._engine.loaded != head.id:
                    await self._puller.use(head, self._load)
                await run_stoppable(draw)
            except EngineError as error:
                if self._engine.loaded is not None or not tries_left:
                    return error  # the engine lives and refuses this; or it died in every attempt
                log.warning("the slots under way are drawn again: %s", error)
            except (EchoError, ProtocolError) as error:
                return error
            else:
                return None
        raise DefectError("no attempt was made")

    def _load(self, held: WeightsView) -> None:
        self._first.setdefault("weights", time.time())
        hand_over(held, self._engine)

    # Sequential pull

    async def _answer(self, peer: bytes, sealed_request: bytes) -> bytes:
        """Fill the slots that the leader requests, under the head that it names."""
        opened = open_sealed(sealed_request, RolloutRequest, self._run.id, signer=self._chain.leader)
        if peer != opened.signer:
            raise PeerError("the request is signed by another peer than the one that sent it")
        if not self._gate.is_open:
            raise PeerError(f"this sampler is paused ({', '.join(self._gate.reasons)})")
        request = opened.message
        with trio.move_on_after(HEAD_SECONDS) as waiting:
            head = await self._chain.wait_for(request.head)
        if waiting.cancelled_caught:
            raise PeerError(f"the requested head has not arrived here within {HEAD_SECONDS:.0f} s")
        if not self._registration.is_joined and not await self._registration.is_listed(head):
            raise PeerError(f"this sampler is not in the head's roster with {self._engine.engine_class}")
        return await self._requested.answer(head, request)

    async def _fill_requested(
        self,
        head: Opened[WeightsHead],
        slots: Sequence[int],
        take: Callable[[RolloutRecord], Awaitable[None]],
    ) -> None:
        """Fill slots that the leader requests."""
        blocks = [slots]
        began = trio.current_time()

        async def next_block() -> Sequence[int] | None:
            await trio.lowlevel.checkpoint()
            return blocks.pop() if blocks else None

        async def post(groups: Sequence[RolloutRecord]) -> None:
            await self._count(groups, head)
            self.send_rate.requested([group.id for group in groups])
            for group in groups:
                await take(group)

        if (failure := await self._fill(head, next_block, post)) is not None:
            raise failure
        self._throughput.record_call(len(slots), trio.current_time() - began)

    # Asynchronous push-pull

    async def _push(self) -> None:
        """Fill slot after slot under the newest head, at the rate that receipts ask for."""
        place: _Place | None = None
        while True:
            await self._registration.wait()
            await self.send_rate.wait()
            await self._wait_for_a_leader()
            await self._gate.wait_open()
            tip = await self._chain.wait_for_newer(None)
            if self._chain.holding or not self._run.is_async(tip.message.version):
                await self._chain.wait_for_newer(tip.id)
                continue
            if place is None or place.head.id != tip.id:
                place = _Place(tip, self._delivery.next_slot(tip.id), self._delivery.unposted(tip.id))
            head, met = place.head, self._met
            try:
                await self._push_at(place)
            except (PeerError, ProtocolError, EngineError, ContractError, StoreError) as error:
                pause, version = self._attempts.pause, head.message.version
                log.warning("version %d cannot be sampled, next try in %.0f s: %s", version, pause, error)
                await self._pause(pause, head.id, met)

    async def _pause(self, seconds: float, head: bytes, met: int) -> None:
        """Wait before the next attempt; news of the swarm end it where they may help."""
        with trio.move_on_after(seconds * (0.75 + 0.5 * self._jitter.random())):
            if self._attempts.ends_with_news:
                await self._wait_for_a_chance(head, met)
            else:
                await trio.sleep_forever()

    async def _push_at(self, place: _Place) -> None:
        """Fill slots of a head, as long as it is the newest.

        Further blocks are announced and begun as rows of the engine fall free. Once groups of the
        head would be stale, all that is under way is given up.
        """
        head, began, posted = place.head, trio.current_time(), 0
        times: dict[int, float] = {}
        """Times at which slots were begun that are not posted."""

        async def next_block() -> Sequence[int] | None:
            await trio.lowlevel.checkpoint()
            if (times or posted) and not self._goes_on(head):
                return None
            count = self._refill() if times or posted else self._slots
            block = place.take(count)
            await self._delivery.announce(head.id, range(block[0], block[-1] + 1))
            times.update(dict.fromkeys(block, trio.current_time()))
            return block

        async def post(groups: Sequence[RolloutRecord]) -> None:
            nonlocal posted
            await self._count(groups, head)
            self.send_rate.sent(await self._delivery.put(groups))
            posted += len(groups)
            now = trio.current_time()
            longest = now - min(times.pop(group.slot) for group in groups)
            self._throughput.record_call(posted, now - began, longest)

        failure: EchoError | ProtocolError | None = None
        async with self._in_flight(head) as news, self._until_stale(head) as stale:
            failure = await self._fill(head, next_block, post, news)
        if stale.cancelled_caught and times:
            self._given_up += len(times)
            log.warning("%d groups of version %d were given up: too stale", len(times), head.message.version)
        elif failure is not None:
            place.unposted = sorted({*place.unposted, *times})
            raise failure

    def _goes_on(self, head: Opened[WeightsHead]) -> bool:
        """Return whether further slots of a head are begun while others are drawn."""
        tip = self._chain.tip
        is_newest = tip is not None and tip.id == head.id and not self._chain.holding
        is_led = self._lease is None or not self._lease.is_over
        return is_newest and is_led and self._gate.is_open and self.send_rate.is_open

    def _refill(self) -> int:
        """Return how many slots to begin at once: about a second's worth.

        So few wait for rows.
        """
        each = self._throughput.seconds_per_group or 0.0
        return min(self._slots, max(1, int(REFILL_SECONDS / each))) if each else 1

    @asynccontextmanager
    async def _until_stale(self, head: Opened[WeightsHead]) -> AsyncGenerator[trio.CancelScope]:
        """Cancel the block once groups of the head are too stale to be of use."""
        async with trio.open_nursery() as nursery:
            with trio.CancelScope() as scope:

                async def watch() -> None:
                    newest = head
                    while newest.message.step - head.message.step <= self._run.manifest.sync.staleness:
                        newest = await self._chain.wait_for_newer(newest.id)
                    scope.cancel()

                nursery.start_soon(watch)
                yield scope
            nursery.cancel_scope.cancel()

    async def _wait_for_a_chance(self, head: bytes, met: int) -> None:
        """Wait for a newer version, or for a new peer that may have this one."""
        while self._met == met:
            if (tip := self._chain.tip) is not None and tip.id != head:
                return
            await self._news.wait()
        await trio.sleep(self._jitter.random() * SETTLE_SECONDS)  # it may serve nothing yet

    async def _wait_for_a_leader(self) -> None:
        if self._lease is not None and self._lease.is_over:
            log.warning("the leader's lease has expired: sampling is suspended")
            await self._lease.wait_until_fresh()
            log.warning("the leader of term %d is back: sampling resumes", self._chain.follower.term)

    @asynccontextmanager
    async def _in_flight(self, head: Opened[WeightsHead]) -> AsyncGenerator[Callable[[], Update | None]]:
        """Pull newer weights during the block for running completions, if allowed.

        The run's manifest allows it or not.
        """
        if not self._run.manifest.sync.in_flight:
            yield no_news
            return
        pulled = [head.id]

        def news() -> Update | None:
            since, newest = self._engine.loaded, pulled[-1]
            if since is None or since == newest:
                return None
            return update_to(self._puller.store, since, newest)

        async def pull() -> None:
            newest = head
            while True:
                newest = await self._chain.wait_for_newer(newest.id)
                if self._chain.holding:
                    continue
                try:
                    await self._puller.pull(newest.id)
                except (PeerError, ProtocolError) as error:
                    log.info("version %d not pulled in flight: %s", newest.message.version, error)
                else:
                    pulled.append(newest.id)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(pull)
            yield news
            nursery.cancel_scope.cancel()

    async def _read(self, receipts: Subscription[Message]) -> None:
        async for message in receipts:
            receipt = open_sealed(message.data, Receipt, self._run.id)
            if receipt.signer == self._chain.leader:
                refused = self.send_rate.refused[WRONG_ENGINE]
                self.send_rate.receipt(receipt.message)
                if self.send_rate.accepted:
                    self._first.setdefault("accepted", time.time())
                if self.send_rate.refused[WRONG_ENGINE] > refused:
                    self._registration.doubt()
                await self._delivery.settle(receipt)

    async def _count(self, groups: Sequence[RolloutRecord], head: Opened[WeightsHead]) -> None:
        self.tokens.add(sum(group.message.token_count for group in groups))
        if self._ledger_sync is not None:
            await self._ledger_sync.record(groups, head)


async def _post_together(ended: trio.MemoryReceiveChannel[RolloutRecord], post: Post) -> None:
    """Post groups as they end; those that ended while others were posted go together."""
    async for group in ended:
        groups = [group]
        with suppress(trio.WouldBlock, trio.EndOfChannel):
            while True:
                groups.append(ended.receive_nowait())
        await post(groups)
