"""Asynchronous push-pull: groups arrive by gossip and wait in the replay buffer until a step draws them.

It tells samplers, by receipts, what became of each group and how fast it wants more: a batch a step, and a little less
when plenty is waiting, so that groups do not grow stale in the buffer.
"""

from __future__ import annotations

from collections.abc import Callable

import trio

from echo_node.admission import Admitted, Refused
from echo_node.net.base import ACCEPT, Message, Network, Reject, Validation
from echo_node.trainer.receipts import Receipts
from echo_node.trainer.replay import ReplayBuffer
from protocol import Envelope, read_batch, topics

_MEMORY = 0.7
"""How much of the measured pace of steps is the past's."""
_SEEN_BY_ALL = frozenset({"malformed", "wrong-signature"})
"""Faults that whoever passed a group on could have seen."""
_FASTEST = 1e6
"""The largest rate that a receipt can carry."""


class GossipSource:
    """Batches out of whatever has arrived and is fresh enough."""

    def __init__(
        self,
        run: bytes,
        batch: int,
        buffer: ReplayBuffer,
        receipts: Receipts,
        judge: Callable[[Envelope], Admitted | Refused],
        release: Callable[[Admitted], None],
    ) -> None:
        self._run = run
        self._batch = batch
        self._buffer = buffer
        self._receipts = receipts
        self._judge = judge
        self._release = release
        self._arrived = trio.Event()
        self._pace: float | None = None

    async def hear(self, network: Network) -> None:
        """Take in groups for as long as the trainer works."""
        topic = topics.topic(self._run, topics.GROUPS)
        async with network.subscribe(topic, self._look_at) as inbox:
            async for message in inbox:
                for envelope in read_batch(message.data):
                    fault = self._take(envelope)
                    if fault in _SEEN_BY_ALL:
                        network.score(message.sender, fault)

    async def next_batch(self, step: int) -> tuple[Admitted, ...]:
        """A batch for the policy at this step, as soon as there is one."""
        while not (drawn := self._buffer.draw(self._batch, step)):
            self._arrived = trio.Event()
            await self._arrived.wait()
        return drawn

    def stepped(self, seconds: float, samplers: int) -> None:
        """A step has taken so long, without the wait for its batch: tell the samplers the pace that would feed it."""
        self._pace = seconds if self._pace is None else _MEMORY * self._pace + (1 - _MEMORY) * seconds
        waiting = len(self._buffer) / self._batch
        eagerness = 1.3 if waiting < 1 else 1.0 if waiting < 2 else 0.7
        rate = eagerness * self._batch / max(self._pace, 1e-3) / max(samplers, 1)
        self._receipts.rate = min(rate, _FASTEST)

    def _look_at(self, message: Message) -> Validation:
        """What a forwarder could have seen is held against it (a `ProtocolError` too); what is stale or double is not."""
        if any(envelope.run != self._run for envelope in read_batch(message.data)):
            return Reject("wrong-run")
        return ACCEPT

    def _take(self, envelope: Envelope) -> str:
        """Keep a group and answer its sampler; returns why not, if it was refused."""
        judged = self._judge(envelope)
        if isinstance(judged, Refused):
            if judged.signed:
                self._receipts.refuse(judged.id, judged.reason)
            return judged.reason
        if self._buffer.add(judged):
            self._receipts.accept(judged.group.id)
            self._arrived.set()
            return ""
        self._release(judged)
        self._receipts.refuse(judged.group.id, "full")
        return "full"
