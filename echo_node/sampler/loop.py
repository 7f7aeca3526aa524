"""The sampler's loop: join, follow the chain, and fill slots: when asked (sequential) or by itself (asynchronous).

Weights go into the engine before anything is drawn under their head, and every group names that head. One thing at a time
uses the engine. It knows no trainer's inside, and never imports one.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any, Final

import trio

from echo_node.engine.base import Engine, Update, no_news
from echo_node.errors import ConfigError, ContractError, DefectError, EngineError, PeerError, StoreError
from echo_node.metrics import Rate
from echo_node.net.base import ACCEPT, Message, Network, Reject, Validation
from echo_node.net.inbox import Inbox
from echo_node.net.outbox.backoff import Patience
from echo_node.net.outbox.outbox import Outbox
from echo_node.pausing import Gate
from echo_node.run import Run
from echo_node.sampler.crediting import Crediting
from echo_node.sampler.joining import SETTLE_SECONDS, Joining
from echo_node.sampler.keeping_up import KeepingUp
from echo_node.sampler.pacing import Pacing
from echo_node.sampler.posting import Post
from echo_node.sampler.rollout import Rollout
from echo_node.terms.lease import Lease
from echo_node.threads import run_stoppable
from echo_node.weights.handing import hand_over, update_to
from echo_node.weights.leased import Leased
from echo_node.weights.pull import Puller
from protocol import (
    ZERO,
    Envelope,
    Identity,
    Opened,
    ProtocolError,
    Receipt,
    RolloutRequest,
    TrajectoryGroup,
    WeightsHead,
    limits,
    open_sealed,
    topics,
    write_batch,
)

log = logging.getLogger(__name__)
HEAD_SECONDS = 30.0
TRIES: Final = 3
"""How often slots are filled with an engine that dies over them."""
WRONG_ENGINE: Final = "wrong-engine"
RETRY_PAUSES = (1.0, 2.0, 5.0, 10.0, 30.0)
"""Before a version is tried again that could not be sampled. A newer one is tried at once, and whoever comes is asked soon."""


class SamplerLoop:
    """One sampler of a run. `slots_per_call` groups are generated together; they wait in the outbox until they are taken.

    With a `lease`, it stops when the leader's has run out, since what it samples then may be for nobody.
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
        gate: Gate | None = None,
        crediting: Crediting | None = None,
    ) -> None:
        if engine.engine_class not in {tolerance.engine for tolerance in run.told.engines}:
            raise ConfigError(f"this run does not take groups of the engine class {engine.engine_class}")
        self._run = run
        self._network = network
        self._identity = identity
        self._engine = engine
        self._slots = slots_per_call
        self._busy = trio.Lock()
        self._rollout = Rollout(run, identity, engine)
        self._puller = puller
        self._chain = puller.hearing
        self._lease = lease
        self._gate = gate or Gate()
        self._jitter = random.Random(identity.public)  # noqa: S311 - spreads retries, keeps no secret
        self._joining = Joining(
            run.id, network, identity, puller, engine=engine.engine_class, agent=agent, luck=self._jitter
        )
        self._post = Post(
            run.id,
            network,
            identity,
            outbox,
            self._chain,
            puller.store.lent,
            staleness=run.told.sync.staleness,
            patience=patience,
            luck=self._jitter,
            told=crediting.answered if crediting else None,
        )
        self._crediting = crediting
        self.pacing = Pacing(unanswered=4 * slots_per_call, luck=self._jitter)
        self._keeping_up = KeepingUp(run.told.sync.staleness)
        self.tokens = Rate()
        """Tokens generated, by the second."""
        self._first: dict[str, float] = {}
        """When it first had weights, and a group that was accepted."""
        self._met = 0
        """How often somebody came."""
        self._news = trio.Event()
        """Somebody came, or there is another head."""

    def status(self) -> dict[str, Any]:
        """How it goes, in plain numbers."""
        tip = self._chain.tip
        loaded = self._puller.store.find(self._engine.loaded or ZERO)
        return {
            "joined": self._joining.is_joined,
            "turned_away": self._joining.turned_away,
            "leader_is_silent": self._lease is not None and self._lease.is_over,
            "version": tip.message.version if tip else None,
            "engine_version": loaded.message.version if loaded else None,
            "accepted": self.pacing.accepted,
            "refused": dict(sorted((+self.pacing.refused).items())),
            "waiting": self._post.waiting,
            "paused": list(self._gate.reasons),
            "tokens_per_second": round(self.tokens.per_second(), 1),
            "seconds_per_group": None
            if (each := self._keeping_up.seconds_per_group) is None
            else round(each, 3),
            "too_slow": self._keeping_up.too_slow,
            "first": dict(self._first),
            **({"credit": self._crediting.status()} if self._crediting else {}),
        }

    async def work(self) -> None:
        """Sample until cancelled."""
        run, network = self._run.id, self._network
        with network.serve(
            topics.ROLLOUT_STREAM, self._answer, most=limits.SMALL_BYTES + limits.ENVELOPE_BYTES
        ):
            async with (
                self._puller.work(),
                network.subscribe(topics.topic(run, topics.RECEIPTS), self._look_at_receipt) as receipts,
                trio.open_nursery() as nursery,
            ):
                await self._post.start()
                nursery.start_soon(self._post.run)
                nursery.start_soon(self._keep_pace)
                nursery.start_soon(self._meet)
                nursery.start_soon(self._read, receipts)
                nursery.start_soon(self._joining.keep)
                nursery.start_soon(self._push)
                if self._crediting is not None:
                    nursery.start_soon(self._crediting.work, network)

    def _look_at_receipt(self, message: Message) -> Validation:
        """Only trainers of the run say such things. Which of them leads is no fault of who passes it on."""
        envelope = Envelope.parse(message.data)
        if envelope.signer not in self._run.told.trainers:
            return Reject("not-trainer")
        envelope.open(Receipt, self._run.id)
        return ACCEPT

    # The chain

    async def _keep_pace(self) -> None:
        head: Opened[WeightsHead] | None = None
        while True:
            before, head = head, await self._chain.wait_for_newer(head.id if head else None)
            self.pacing.moved_on()
            if before is not None and before.message.term != head.message.term:
                self._joining.doubt()
            self._keeping_up.heard(head.message.step, trio.current_time())
            self._tell()

    async def _meet(self) -> None:
        async with self._network.watch() as events:
            async for event in events:
                self._met += event.joined
                self._tell()

    def _tell(self) -> None:
        self._news.set()
        self._news = trio.Event()

    async def _fill(
        self, head: Opened[WeightsHead], slots: range, news: Callable[[], Update | None] = no_news
    ) -> list[bytes]:
        """Sealed groups under a head, whose weights are fetched and put in first if another's are.

        The draws of a slot are fixed by its key: after a crash of the engine they are made again, and are the same.
        """
        async with self._busy:
            for tries_left in reversed(range(TRIES)):
                try:
                    if self._engine.loaded != head.id:
                        await self._puller.use(head, self._put_in)
                    return await run_stoppable(lambda stop: self._rollout.fill(head.id, slots, stop, news))
                except EngineError as error:
                    if self._engine.loaded is not None or not tries_left:
                        raise  # it is well, and refuses this; or it is not, whatever is done
                    log.warning("slots %d to %d are filled again: %s", slots[0], slots[-1], error)
            raise DefectError("no attempt was made")

    def _put_in(self, held: Leased) -> None:
        self._first.setdefault("weights", time.time())
        hand_over(held, self._engine)

    # Sequential pull

    async def _answer(self, peer: bytes, asked: bytes) -> bytes:
        """Fill the slots that the leader asks for, under the head that it names, whatever this node held before."""
        opened = open_sealed(asked, RolloutRequest, self._run.id, signer=self._chain.leader)
        if peer != opened.signer:
            raise PeerError("a request that somebody else has signed")
        if not self._gate.is_open:
            raise PeerError(f"this sampler is paused ({', '.join(self._gate.reasons)})")
        request = opened.message
        with trio.move_on_after(HEAD_SECONDS) as waiting:
            head = await self._chain.wait_for(request.head)
        if waiting.cancelled_caught:
            raise PeerError("the head that was named has not arrived here")
        if not self._joining.is_joined and not await self._joining.is_listed(head):
            raise PeerError(f"the roster of that head has not this sampler with {self._engine.engine_class}")
        began = trio.current_time()
        sealed = await self._fill(head, range(request.first, request.first + request.count))
        self._keeping_up.called(request.count, trio.current_time() - began)
        await self._count(sealed, head)
        self.pacing.gave([Envelope.parse(each).id for each in sealed])
        return write_batch(sealed, most=limits.ANSWER_BYTES)

    # Asynchronous push-pull

    async def _push(self) -> None:
        """Fill slot after slot under the newest head, and have the groups delivered, at the pace that is wanted."""
        head: Opened[WeightsHead] | None = None
        slot = failures = 0
        while True:
            await self._joining.wait()
            await self.pacing.wait()
            await self._wait_for_a_leader()
            await self._gate.wait_open()
            tip = await self._chain.wait_for_newer(None)
            if self._chain.holding or not self._run.is_async(tip.message.version):
                await self._chain.wait_for_newer(tip.id)
                continue
            if head is None or head.id != tip.id:
                head, slot = tip, self._post.next_slot(tip.id)
            met = self._met
            try:
                began = trio.current_time()
                async with self._in_flight(head) as news:
                    sealed = await self._fill(head, range(slot, slot + self._slots), news)
                self._keeping_up.called(self._slots, trio.current_time() - began)
            except (PeerError, ProtocolError, EngineError, ContractError, StoreError) as error:
                pause = RETRY_PAUSES[min(failures, len(RETRY_PAUSES) - 1)]
                failures += 1
                version = head.message.version
                log.warning("version %d cannot be sampled, next try in %.0f s: %s", version, pause, error)
                with trio.move_on_after(pause * (0.75 + 0.5 * self._jitter.random())):
                    await self._wait_for_a_chance(head.id, met)
                    failures = 0
                continue
            failures = 0
            slot += self._slots
            await self._count(sealed, head)
            self.pacing.sent(await self._post.put(sealed))

    async def _wait_for_a_chance(self, head: bytes, met: int) -> None:
        """Until there is a newer version, or somebody has come since who may have this one, such as the leader itself."""
        while self._met == met:
            if (tip := self._chain.tip) is not None and tip.id != head:
                return
            await self._news.wait()
        await trio.sleep(self._jitter.random() * SETTLE_SECONDS)  # it may serve nothing yet

    async def _wait_for_a_leader(self) -> None:
        if self._lease is not None and self._lease.is_over:
            log.warning("the leader is silent: this sampler waits until it, or another, is heard")
            await self._lease.wait_until_fresh()
            log.warning("the leader of term %d is heard again: sampling goes on", self._chain.follower.term)

    @asynccontextmanager
    async def _in_flight(self, head: Opened[WeightsHead]) -> AsyncGenerator[Callable[[], Update | None]]:
        """Newer weights for completions that run, where the run wants that: they are pulled while the block lasts."""
        if not self._run.told.sync.in_flight:
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
                    log.info("version %d cannot be had in flight: %s", newest.message.version, error)
                else:
                    pulled.append(newest.id)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(pull)
            yield news
            nursery.cancel_scope.cancel()

    async def _read(self, receipts: Inbox[Message]) -> None:
        async for message in receipts:
            receipt = open_sealed(message.data, Receipt, self._run.id)
            if receipt.signer == self._chain.leader:
                refused = self.pacing.refused[WRONG_ENGINE]
                self.pacing.answered(receipt.message)
                if self.pacing.accepted:
                    self._first.setdefault("accepted", time.time())
                if self.pacing.refused[WRONG_ENGINE] > refused:
                    self._joining.doubt()
                await self._post.settle(receipt)

    async def _count(self, sealed: list[bytes], head: Opened[WeightsHead]) -> None:
        groups = [Envelope.parse(item).claim(TrajectoryGroup, self._run.id) for item in sealed]
        self.tokens.add(sum(group.token_count for group in groups))
        if self._crediting is not None:
            await self._crediting.made(sealed, head)
