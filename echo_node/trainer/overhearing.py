"""What a trainer that stands by overhears: groups on their way to the leader, and the leader's receipts for them.

A group that the leader has accepted is checked as the leader checks it, and waits in this trainer's own journal until a version
is trained on it, or it is too stale. So there is a buffer to go on with, should both the leader and samplers be gone. Groups
that were delivered by hand are not heard here: their samplers have them still, and send them to a new leader.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Iterable
from typing import Final

import trio

from echo_node.admission import Admission, Admitted
from echo_node.net.base import ACCEPT, Message, Network, Reject, Validation
from echo_node.net.inbox import Inbox
from echo_node.referring import groups_in
from echo_node.run import Run
from echo_node.sifting import Sieve
from echo_node.trainer.journal import KeptGroup, TrainingJournal
from echo_node.trainer.remembering import know_heads
from echo_node.weights.store import WeightsStore
from protocol import Envelope, Opened, Receipt, WeightsHead, limits, open_sealed, topics

log = logging.getLogger(__name__)
MOST_NAMED: Final = 4 * limits.RECEIPT_IDS
"""Groups that a receipt may name before they are heard."""


class Overhearing:
    """One trainer's ears while another leads. `room` is how many groups its buffer has; `saw` is told whose groups were heard."""

    def __init__(
        self,
        run: Run,
        network: Network,
        store: WeightsStore,
        journal: TrainingJournal,
        room: int,
        saw: Callable[[dict[bytes, bytes]], Awaitable[None]] | None = None,
    ) -> None:
        self._run = run
        self._network = network
        self._store = store
        self._journal = journal
        self._room = room
        self._saw = saw
        self._bound = run.told.sync.staleness
        self._admission = Admission(run)
        self._sieve = Sieve(run, self._admission)
        self._tip: Opened[WeightsHead] | None = None
        """The newest head that the admission knows."""
        self._heard: OrderedDict[bytes, Envelope] = OrderedDict()
        """Groups, by id, of which no receipt has been heard."""
        self._shares: Counter[bytes] = Counter()
        """How many of them are of whom."""
        self._named: OrderedDict[bytes, None] = OrderedDict()
        """Groups that were accepted and not heard."""
        self._turn = trio.Lock()

    async def follow(self) -> None:
        """Hear until cancelled."""
        run = self._run.id
        async with (
            self._network.subscribe(topics.topic(run, topics.GROUPS), self._look_at) as groups,
            self._network.subscribe(topics.topic(run, topics.RECEIPTS), self._look_at_receipt) as receipts,
            trio.open_nursery() as nursery,
        ):
            nursery.start_soon(self._hear, groups)
            nursery.start_soon(self._read, receipts)

    def bytes_of(self, group: bytes) -> bytes | None:
        """A group that was heard and is not known to be accepted, for who knows that it was. It is heard no more."""
        envelope = self._forget(group)
        return envelope.sealed if envelope else None

    # Groups

    def _look_at(self, message: Message) -> Validation:
        self._know_heads()
        validation, _ = self._sieve.sift(message)
        return validation

    async def _hear(self, groups: Inbox[Message]) -> None:
        async for message in groups:
            self._know_heads()
            accepted = []
            # A stranger's may be beside one of a member: what anybody can make takes nobody's place.
            signed = [each for each in groups_in(message.data) if self._admission.is_signed(each)]
            if self._saw is not None:
                await self._saw({envelope.id: envelope.signer for envelope in signed})
            for envelope in signed:
                if envelope.id in self._named:
                    del self._named[envelope.id]
                    accepted.append(envelope)
                else:
                    self._remember(envelope)
            await self._keep(accepted)

    def _remember(self, envelope: Envelope) -> None:
        """Whoever is heard most gives way first: nobody crowds out the rest."""
        if envelope.id not in self._heard:
            self._heard[envelope.id] = envelope
            self._shares[envelope.signer] += 1
        if len(self._heard) > self._room:
            loudest = max(self._shares, key=lambda signer: self._shares[signer])
            self._forget(next(each.id for each in self._heard.values() if each.signer == loudest))

    def _forget(self, group: bytes) -> Envelope | None:
        envelope = self._heard.pop(group, None)
        if envelope is not None:
            self._shares[envelope.signer] -= 1
            self._shares += Counter()  # without those that have none
        return envelope

    # Receipts

    def _look_at_receipt(self, message: Message) -> Validation:
        """Only trainers of the run say such things. Which of them leads is no fault of who passes it on."""
        envelope = Envelope.parse(message.data)
        if envelope.signer not in self._run.told.trainers:
            return Reject("not-trainer")
        envelope.open(Receipt, self._run.id)
        return ACCEPT

    async def _read(self, receipts: Inbox[Message]) -> None:
        async for message in receipts:
            receipt = open_sealed(message.data, Receipt, self._run.id)
            if receipt.signer == self._store.follower.leader:
                self._know_heads()
                await self._keep(self._accepted(receipt.message.accepted_ids()))
                await self._drop(dict(receipt.message.refused_ids()))

    def _accepted(self, ids: Iterable[bytes]) -> list[Envelope]:
        """Those that were heard. The others are waited for."""
        found = []
        for group in ids:
            if (envelope := self._forget(group)) is not None:
                found.append(envelope)
            else:
                self._named[group] = None
        while len(self._named) > MOST_NAMED:
            self._named.popitem(last=False)
        return found

    async def _drop(self, refused: dict[bytes, str]) -> None:
        """Not used after all: something came to light."""
        for group in refused:
            self._forget(group)
        if refused:
            await self._journal.drop(refused)

    # What waits

    def _know_heads(self) -> None:
        tip = self._store.follower.tip
        if tip is not None and tip is not self._tip:
            known, _ = know_heads(self._admission, self._store, tip, self._bound)
            self._tip = tip if tip.id in known else self._tip  # else its roster is still on its way

    async def _keep(self, groups: list[Envelope]) -> None:
        """Have groups wait that the leader has accepted, as far as there is room."""
        if not groups or self._tip is None:
            return
        async with self._turn:
            judged = await self._admission.judge_all(groups)
            waiting = await self._journal.expire(self._tip.message.step - self._bound)
            good = [each for each in judged if isinstance(each, Admitted)][: max(0, self._room - waiting)]
            await self._journal.keep([KeptGroup.of(each.group, each.step) for each in good])
        if len(good) < len(groups):
            log.info("%d groups that the leader accepted are not kept here", len(groups) - len(good))
