"""The trainer: batches in, versions out, in step with the samplers by either of Echo's protocols.

Every step is the same: get a batch, reward it, learn, publish. Where the batch comes from is the mode: asked for
(sequential pull) or gathered (asynchronous push-pull). It knows no sampler's inside, and never imports one.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections import Counter, deque
from collections.abc import Sequence

import torch
import trio

from echo_node.admission import Admission, Admitted, Refused
from echo_node.engine.base import TensorBytes
from echo_node.errors import ContractError, DefectError, PeerError
from echo_node.metrics import Rate, Records, StepRecord, TrainedGroup
from echo_node.net.base import ACCEPT, Message, Network, Validation
from echo_node.net.outbox.deliveries import Taker, serve_deliveries
from echo_node.run import Run
from echo_node.trainer.asking import NobodyAnswersError, SequentialSource
from echo_node.trainer.gathering import GossipSource
from echo_node.trainer.receipts import Receipts
from echo_node.trainer.replay import ReplayBuffer
from echo_node.trainer.roster import JoinDesk
from echo_node.trainer.settings import training_settings
from echo_node.trainer.step import SampledCompletion, StepFigures, TrainingGroup, TrainStep
from echo_node.weights.offering import Offering
from echo_node.weights.publish import Publication, Publisher
from protocol import Envelope, Identity, Join, Opened, Roster, WeightsHead, open_sealed, topics

log = logging.getLogger(__name__)
NOBODY_SECONDS = 5.0
"""How long to wait for a sampler before asking again."""


class TrainerLoop:
    """The trainer that leads a run. `records` gets a record of each step."""

    def __init__(
        self,
        run: Run,
        network: Network,
        identity: Identity,
        *,
        step: TrainStep,
        publisher: Publisher,
        records: Records,
    ) -> None:
        batch, bound = training_settings(run.told).batch_groups, run.told.sync.staleness
        self._run = run
        self._network = network
        self._step = step
        self._publisher = publisher
        self._records = records
        self._admission = Admission(run)
        self._versions_kept = bound + 2
        self._offering = Offering(network, publisher.store)
        self._desk = JoinDesk(run)
        self._roster = Roster(())
        self._announced: list[Opened[WeightsHead]] = []
        """Heads whose blobs can be had."""
        self._buffer = ReplayBuffer(capacity=(bound + 1) * batch, staleness=bound)
        self._receipts = Receipts(
            network, identity, run.id, lambda: self._announced[-1] if self._announced else None
        )
        self._gossip = GossipSource(
            run.id, batch, self._buffer, self._receipts, self._judge, self._admission.release
        )
        self._sequential = SequentialSource(network, identity, run.id, batch, self._judge)
        self._refused: Counter[str] = Counter()
        self._active: deque[set[bytes]] = deque(maxlen=8)
        """Who has filled the last few batches: only they count when the pace is shared out."""
        self._began = time.monotonic()
        self.tokens = Rate()
        """Tokens admitted, by the second."""

    async def work(self, steps: int, *, first_samplers: int = 1) -> None:
        """Wait for the first samplers, take so many steps, and return; whatever helps on the way ends with it."""
        with serve_deliveries(
            self._network,
            {topics.topic(self._run.id, topics.JOINS): Taker(self._look_at_join, self._welcome)},
        ):
            async with self._offering.serve(), trio.open_nursery() as nursery:
                nursery.start_soon(self._gossip.hear, self._network)
                nursery.start_soon(self._receipts.send_now_and_then)
                await self._desk.wait_for(first_samplers)
                await self._publish(())
                for _ in range(steps):
                    await self._take_step()
                await self._receipts.send()
                nursery.cancel_scope.cancel()

    def _look_at_join(self, message: Message) -> Validation:
        Envelope.parse(message.data).claim(Join, self._run.id)
        return ACCEPT

    async def _welcome(self, message: Message) -> bytes:
        """A join, delivered by hand and by whom it is about. It counts from the next head on."""
        join = open_sealed(message.data, Join, self._run.id, signer=message.sender)
        self._desk.welcome(join)
        if not self._desk.roster().find(join.signer):
            raise PeerError("this run does not take that engine class, or has no room")
        return b""

    def _judge(self, envelope: Envelope) -> Admitted | Refused:
        judged = self._admission.judge(envelope)
        if isinstance(judged, Refused):
            self._refused[judged.reason] += 1
        else:
            self.tokens.add(judged.group.message.token_count)
        return judged

    async def _next_batch(self) -> tuple[Opened[WeightsHead], tuple[Admitted, ...]]:
        """A batch, and the head of the policy that it goes to. Where nobody answers, a head with a fresh roster goes out."""
        while True:
            if (head := self._publisher.tip) is None:
                raise DefectError("a step before anything was published")
            if self._run.is_async(head.message.version):
                return head, await self._gossip.next_batch(head.message.step)
            try:
                return head, await self._sequential.next_batch(head, self._roster)
            except NobodyAnswersError:
                log.warning("no sampler answers; waiting for one to join or to come back")
                with trio.move_on_after(NOBODY_SECONDS):
                    await self._desk.wait_for_news()
                await self._publish(())

    async def _take_step(self) -> None:
        start = time.monotonic()
        head, drawn = await self._next_batch()
        ready = time.monotonic()
        figures, rewards = await trio.to_thread.run_sync(self._learn, drawn)
        if figures is None:
            return
        published = await self._publish([group.group.id for group in drawn])
        done = time.monotonic()
        self._active.append({group.group.signer for group in drawn})
        self._gossip.stepped(done - ready, len(set.union(*self._active)))
        self._records.add(
            StepRecord(
                step=published.message.step,
                policy_step=head.message.step,
                version=published.message.version,
                head=published.id,
                reward=figures.reward,
                spread=statistics.pstdev(rewards),
                loss=figures.loss,
                entropy=figures.tally.mean_entropy,
                clip_share=figures.tally.clip_share,
                mismatch_kl=figures.tally.mismatch_kl,
                effective_sample_share=figures.tally.effective_sample_share,
                gradient_norm=figures.gradient_norm,
                tokens=sum(group.group.message.token_count for group in drawn),
                groups=tuple(_trained(group) for group in drawn),
                dropped=dict(self._buffer.dropped + self._refused),
                waited_seconds=ready - start,
                step_seconds=done - ready,
                at_seconds=done - self._began,
            )
        )

    def _learn(self, drawn: Sequence[Admitted]) -> tuple[StepFigures | None, list[float]]:
        """One optimiser step, in a thread. Every reward is computed here, whatever was claimed."""
        batch, rewards = [], []
        for admitted in drawn:
            group = admitted.group.message
            said = group.completions()
            try:
                worth = self._run.scores(admitted.prompt, [each.ids for each in said])
            except ContractError as error:  # completions are hostile text: none of them may end the trainer
                log.warning("a group is left out of its step: %s", error)
                self._refused["contract-failed"] += 1
                continue
            completions = [
                SampledCompletion(each.ids, each.logprobs, score.value)
                for each, score in zip(said, worth, strict=True)
            ]
            rewards += [completion.reward for completion in completions]
            batch.append(TrainingGroup(group.prompt_ids(), completions))
        return (self._step.step(batch) if batch else None), rewards

    async def _publish(self, trained: Sequence[bytes]) -> Opened[WeightsHead]:
        """Sign the next version and let everybody know. Its blobs can be had before its head is heard of."""
        self._roster = self._desk.roster()
        made = await trio.to_thread.run_sync(self._make, trained, self._roster)
        for route in made.head.message.routes:
            self._offering.announce(route.table)
        self._admission.published(made.head, self._roster)
        self._announced.append(made.head)
        await self._network.publish(topics.topic(self._run.id, topics.HEADS), made.head.sealed)
        return made.head

    def _make(self, trained: Sequence[bytes], roster: Roster) -> Publication:
        state = {
            name: TensorBytes(
                "bf16", tuple(tensor.shape), tensor.contiguous().view(torch.uint8).numpy().tobytes()
            )
            for name, tensor in self._step.published().items()
        }
        made = self._publisher.publish(state, step=self._step.version, roster=roster, groups=trained)
        self._publisher.store.prune(versions=self._versions_kept, settled=made.head.id)
        return made


def _trained(group: Admitted) -> TrainedGroup:
    message = group.group.message
    return TrainedGroup(group.group.id, group.group.signer, message.slot, message.heads[0], group.step)
